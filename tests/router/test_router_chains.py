"""Canonical bytes and the chains over them."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.routing import chain, chat
from kvplane.common.v1 import prompt_pb2
from kvplane_common.chains import Chain
from kvplane_router.canonical import Canonical, canonical
from kvplane_router.chain import STEP_BYTES, build

messages = st.lists(
    st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), st.text(max_size=700)),
    min_size=1,
    max_size=5,
)


def talk(*pairs: tuple[str, str]) -> prompt_pb2.Prompt:
    spoken = [prompt_pb2.Message(role=role, content=content) for role, content in pairs]
    return prompt_pb2.Prompt(chat=prompt_pb2.Chat(messages=spoken))


def as_bytes(prompt: prompt_pb2.Prompt) -> bytes:
    made = canonical("m", "s", prompt)
    return made.seed + b"".join(made.parts)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (talk(("user", "ab")), talk(("user", "a"), ("user", "b"))),
        (talk(("user", "ab")), talk(("user", "abassistant"))),
        (talk(("user", "a"), ("user", "")), talk(("user", "a"))),
        (talk(("user", "a")), prompt_pb2.Prompt(text="a")),
        (talk(("user", "a")), prompt_pb2.Prompt(text="usera")),
        (talk(("user", "a"), ("system", "s")), talk(("system", "s"), ("user", "a"))),
        (talk(("user", "\u00ff\u00fe")), talk(("user", "\u00fe\u00ff"))),
    ],
    ids=[
        "one message is not two",
        "content is not a role",
        "an empty message counts",
        "a chat is not a text",
        "a text cannot pose as a chat",
        "a late system message is not moved to the front",
        "characters named like markers are not markers",
    ],
)
def test_different_prompts_have_different_bytes(
    one: prompt_pb2.Prompt, other: prompt_pb2.Prompt
) -> None:
    assert as_bytes(one) != as_bytes(other)


@given(messages, messages)
def test_no_content_can_forge_another_conversation(
    one: list[tuple[str, str]], other: list[tuple[str, str]]
) -> None:
    assert (as_bytes(talk(*one)) == as_bytes(talk(*other))) == (one == other)


@given(messages, messages)
def test_a_conversation_shares_the_whole_chain_of_its_earlier_turns(
    turns: list[tuple[str, str]], more: list[tuple[str, str]]
) -> None:
    before, after = chain(talk(*turns)), chain(talk(*turns, *more))
    assert after.digests[: len(before.digests)] == before.digests
    assert after.ends[: len(before.ends)] == before.ends
    assert after.continues(before)


@given(messages)
def test_positions_grow_to_the_end_and_lie_on_steps_and_message_ends(
    turns: list[tuple[str, str]],
) -> None:
    made = canonical("llama", "default", talk(*turns))
    built = build(made)
    ends = {len(made.seed + b"".join(made.parts[:count])) for count in range(len(turns) + 1)}
    assert all(earlier < later for earlier, later in pairwise(built.ends))
    assert built.length_bytes == max(ends)
    assert {end for end in built.ends if end % STEP_BYTES} <= ends
    assert ends - {len(made.seed)} <= set(built.ends)


@given(st.lists(st.binary(min_size=1, max_size=600), min_size=1, max_size=4))
def test_digests_depend_on_bytes_and_not_on_where_the_parts_are_cut(parts: list[bytes]) -> None:
    cut, whole = build(Canonical(b"s", tuple(parts))), build(Canonical(b"s", (b"".join(parts),)))
    assert set(zip(whole.ends, whole.digests, strict=True)) <= set(
        zip(cut.ends, cut.digests, strict=True)
    )


def test_a_message_that_ends_on_a_step_is_counted_once() -> None:
    seed = b"seed"
    exact = build(Canonical(seed, (b"x" * (STEP_BYTES - len(seed)), b"y" * 3)))
    assert exact.ends == (STEP_BYTES, STEP_BYTES + 3)


def test_prompts_that_part_in_the_middle_share_the_steps_before() -> None:
    one, other = chain("a" * 1000 + "b" * 500), chain("a" * 1000 + "c" * 500)
    assert one.shared_bytes(other) == 768


@pytest.mark.parametrize(
    ("name", "salt"),
    [("other", "default"), ("llama", "other"), ("l" * 600, "default"), ("llam", "adefault")],
    ids=["another model", "another tenant", "a long name", "a name that ends elsewhere"],
)
def test_chains_of_other_models_and_tenants_share_nothing(name: str, salt: str) -> None:
    prompt = chat("be kind", "x" * 2000)
    assert not set(chain(prompt).digests) & set(chain(prompt, name, salt).digests)


def test_models_whose_long_names_begin_alike_share_nothing() -> None:
    one, other = chain("hello", "n" * 600 + "1"), chain("hello", "n" * 600 + "2")
    assert not set(one.digests) & set(other.digests)


def test_a_chain_survives_the_wire() -> None:
    made = chain(chat("be kind", "x" * 2000))
    assert Chain.from_proto(made.to_proto()) == made
