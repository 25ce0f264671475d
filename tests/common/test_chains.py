"""Chains as values and on the wire."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.common.v1 import prompt_pb2
from kvplane_common.chains import DIGEST_BYTES, MAX_DIGESTS, Chain


def _chain(*links: tuple[str, int]) -> Chain:
    return Chain(
        tuple(name.encode().ljust(DIGEST_BYTES) for name, _ in links),
        tuple(end for _, end in links),
    )


ONE = _chain(("a", 10), ("b", 20), ("c", 35))


@pytest.mark.parametrize(
    ("other", "shared_bytes"),
    [
        pytest.param(ONE, 35, id="itself"),
        pytest.param(_chain(("a", 10), ("b", 20), ("x", 30)), 20, id="two links"),
        pytest.param(_chain(("a", 10)), 10, id="a shorter one"),
        pytest.param(_chain(("x", 10), ("y", 20)), 0, id="nothing"),
        pytest.param(_chain(("b", 20)), 20, id="one that keeps fewer links"),
    ],
)
def test_shared_bytes_are_those_before_the_longest_shared_digest(
    other: Chain, shared_bytes: int
) -> None:
    assert ONE.shared_bytes(other) == shared_bytes
    assert other.shared_bytes(ONE) == shared_bytes


def test_a_chain_continues_its_beginnings_and_itself_only() -> None:
    beginning = _chain(("a", 10), ("b", 20))
    assert ONE.continues(beginning)
    assert ONE.continues(ONE)
    assert not beginning.continues(ONE)
    assert not ONE.continues(_chain(("a", 10), ("x", 20)))


def test_a_chain_knows_its_last_digest_and_length() -> None:
    assert ONE.last == b"c       "
    assert ONE.length_bytes == 35


@given(st.lists(st.tuples(st.binary(min_size=8, max_size=8), st.integers(1, 10_000)), min_size=1))
def test_a_chain_survives_the_wire(links: list[tuple[bytes, int]]) -> None:
    ends, end = [], 0
    for _, step in links:
        end += step
        ends.append(end)
    chain = Chain(tuple(digest for digest, _ in links), tuple(ends))
    packed = prompt_pb2.Chain.FromString(chain.to_proto().SerializeToString())
    assert Chain.from_proto(packed) == chain


def test_an_empty_chain_is_none() -> None:
    assert Chain.from_proto(prompt_pb2.Chain()) is None


@pytest.mark.parametrize(
    ("packed", "words"),
    [
        pytest.param(
            prompt_pb2.Chain(digests=b"x" * 8, ends=[1, 2]), "needs 16 bytes", id="too few digests"
        ),
        pytest.param(
            prompt_pb2.Chain(digests=b"x" * 17, ends=[1, 2]), "needs 16 bytes", id="a torn digest"
        ),
        pytest.param(
            prompt_pb2.Chain(digests=b"x" * 9, ends=[1, 2]), "needs 16 bytes", id="a torn last one"
        ),
        pytest.param(prompt_pb2.Chain(digests=b"x" * 8), "needs 0 bytes", id="no ends"),
        pytest.param(
            prompt_pb2.Chain(digests=b"x" * 16, ends=[2, 2]), "must grow", id="an end that stays"
        ),
        pytest.param(
            prompt_pb2.Chain(digests=b"x" * 16, ends=[2, 1]), "must grow", id="an end that shrinks"
        ),
        pytest.param(
            prompt_pb2.Chain(digests=b"x" * 8, ends=[0]), "from 1 up", id="an end at nothing"
        ),
        pytest.param(
            prompt_pb2.Chain(ends=range(1, MAX_DIGESTS + 2)),
            f"has {MAX_DIGESTS + 1} digests; at most {MAX_DIGESTS}",
            id="too many digests",
        ),
        pytest.param(
            prompt_pb2.Chain(digests=b"x" * 8 * (MAX_DIGESTS + 1)), "needs 0", id="digests alone"
        ),
    ],
)
def test_a_malformed_chain_is_refused(packed: prompt_pb2.Chain, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Chain.from_proto(packed)
