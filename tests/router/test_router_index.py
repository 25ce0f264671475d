"""The prefix index against the plain definition of what it finds."""

from hypothesis import given
from hypothesis import strategies as st

from harness.routing import chain, chat, entry
from kvplane_common.chains import Chain
from kvplane_router.index import Entry, Home, Match, PrefixIndex

texts = st.sampled_from(["a" * 300, "b" * 300, "a" * 40, "b", ""])
talks = st.lists(texts, min_size=1, max_size=6).map(lambda contents: chain(chat(*contents)))
entries = st.builds(
    entry,
    st.sampled_from(["n1", "n2", "n3"]),
    talks,
    epoch=st.integers(1, 2),
    last_use_ms=st.integers(0, 9),
)


def index_of(*held: Entry) -> PrefixIndex:
    made = PrefixIndex()
    for one in held:
        made.put(one)
    return made


def last_written(held: list[Entry]) -> list[Entry]:
    return list({one.key: one for one in held}.values())


def brute_force(held: list[Entry], asked: Chain) -> dict[Home, Match]:
    found: dict[Home, Match] = {}
    for home in {one.home for one in held}:
        same = [one for one in held if one.home == home]
        shared = max(asked.shared_bytes(one.chain) for one in same)
        if shared:
            digest = asked.digests[asked.ends.index(shared)]
            continues = any(one.chain.last == digest for one in same)
            found[home] = Match(shared, shared == asked.length_bytes, continues)
    return found


@given(st.lists(entries, max_size=12), talks)
def test_a_match_is_the_longest_shared_beginning_of_each_home(
    held: list[Entry], asked: Chain
) -> None:
    assert index_of(*held).match(asked) == brute_force(last_written(held), asked)


@given(st.lists(entries, max_size=12), st.data(), talks)
def test_removal_leaves_no_phantom(held: list[Entry], data: st.DataObject, asked: Chain) -> None:
    index = index_of(*held)
    kept = last_written(held)
    for gone in data.draw(st.lists(st.sampled_from(kept), unique=True) if kept else st.just([])):
        index.remove(gone.key)
        kept.remove(gone)
    assert index.match(asked) == brute_force(kept, asked)
    assert index.entries == len(kept)
    assert index.digests == len({digest for one in kept for digest in one.chain.digests})


@given(st.lists(entries, max_size=12))
def test_the_coldest_resident_is_the_one_used_longest_ago(held: list[Entry]) -> None:
    index = index_of(*held)
    for home in {one.home for one in last_written(held)}:
        same = [one for one in last_written(held) if one.home == home]
        coldest = index.coldest(home)
        assert coldest is not None
        assert coldest.last_use_ms == min(one.last_use_ms for one in same)
        assert index.residents(home) == len(same)


def test_a_dropped_node_holds_nothing_and_comes_back_empty() -> None:
    asked = chain(chat("be kind", "hello"))
    index = index_of(entry("n1", asked), entry("n1", asked, epoch=2), entry("n2", asked))
    assert index.drop(lambda home: home.node_id == "n1") == 1
    assert {home.node_id for home in index.match(asked)} == {"n2"}
    assert index.drop(lambda home: home.node_id == "n2") == 1
    assert (index.entries, index.digests, index.match(asked)) == (0, 0, {})
    assert index.coldest(Home("n1", "llama", 2, 1)) is None


def test_a_record_of_a_new_epoch_takes_the_place_of_the_old_one() -> None:
    asked = chain(chat("be kind", "hello"))
    index = index_of(entry("n1", asked), entry("n1", asked, epoch=2))
    assert set(index.match(asked)) == {Home("n1", "llama", 2, 1)}
    assert index.entries == 1


def test_a_used_again_entry_is_no_longer_the_coldest() -> None:
    old, new = chain(chat("old")), chain(chat("new"))
    index = index_of(entry("n1", old, last_use_ms=1), entry("n1", new, last_use_ms=2))
    home = Home("n1", "llama", 1, 1)
    assert index.coldest(home) == entry("n1", old, last_use_ms=1)
    index.put(entry("n1", old, last_use_ms=3))
    assert index.coldest(home) == entry("n1", new, last_use_ms=2)


def test_a_branch_within_a_cached_prompt_does_not_continue_it() -> None:
    index = index_of(entry("n1", chain(chat("be kind", "hello", "hi", "how are you?"))))
    home = Home("n1", "llama", 1, 1)
    branch = index.match(chain(chat("be kind", "good evening")))[home]
    onward = index.match(chain(chat("be kind", "hello", "hi", "how are you?", "fine")))[home]
    assert (branch.continues, branch.whole) == (False, False)
    assert (onward.continues, onward.whole) == (True, False)
