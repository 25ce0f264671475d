"""Revisions, conditions and history, without a disk."""

import pytest

from kvplane.metastore.v1 import metastore_pb2
from kvplane_common.metastore import delete, delete_prefix, put
from kvplane_metastore.store import Change, Draft, Event, KeyRange, Store

Condition = metastore_pb2.Condition
ALL = KeyRange(b"\x00", b"\xff")


def wrote(store: Store, *operations: metastore_pb2.Operation) -> Change:
    draft = Draft(store)
    draft.add(operations)
    store.apply(draft.changes)
    return draft.changes[0]


def contents(store: Store) -> dict[bytes, bytes]:
    return {key: entry.value for key, entry in store.between(ALL)}


def test_keys_come_in_the_order_of_their_bytes_and_a_range_ends_before_its_end() -> None:
    store = Store()
    wrote(store, *(put(key, key) for key in (b"b", b"a/2", b"a", b"a/1", b"\xfe")))
    assert list(contents(store)) == [b"a", b"a/1", b"a/2", b"b", b"\xfe"]
    assert [key for key, _ in store.between(KeyRange(b"a/", b"b"))] == [b"a/1", b"a/2"]
    assert [key for key, _ in store.between(KeyRange(b"a", b""))] == [b"a"]
    assert [key for key, _ in store.between(KeyRange(b"c", b""))] == []


OPERATIONS = {
    # a sentence: (the batch, what is left of a/1, a/2 and b, what watchers are told)
    "a put sets a key": ([put(b"b", b"2")], {b"a/1": b"", b"a/2": b"", b"b": b"2"}, {b"b": b"2"}),
    "the last put of a key counts": (
        [put(b"b", b"2"), put(b"b", b"3")],
        {b"a/1": b"", b"a/2": b"", b"b": b"3"},
        {b"b": b"3"},
    ),
    "a delete removes a key": ([delete(b"b")], {b"a/1": b"", b"a/2": b""}, {b"b": None}),
    "removing what is not there is no error": (
        [delete(b"none")],
        {b"a/1": b"", b"a/2": b"", b"b": b""},
        {},
    ),
    "a prefix goes at once": (
        [delete_prefix(b"a/")],
        {b"b": b""},
        {b"a/1": None, b"a/2": None},
    ),
    "a put after a prefix's removal stays": (
        [delete_prefix(b"a/"), put(b"a/3", b"3")],
        {b"a/3": b"3", b"b": b""},
        {b"a/1": None, b"a/2": None, b"a/3": b"3"},
    ),
    "a prefix's removal takes what the batch put before": (
        [put(b"a/3", b"3"), delete_prefix(b"a/")],
        {b"b": b""},
        {b"a/1": None, b"a/2": None, b"a/3": None},
    ),
}


@pytest.mark.parametrize(("batch", "left", "told"), OPERATIONS.values(), ids=OPERATIONS.keys())
def test_a_batch(
    batch: list[metastore_pb2.Operation], left: dict[bytes, bytes], told: dict[bytes, bytes | None]
) -> None:
    store = Store()
    wrote(store, put(b"a/1", b""), put(b"a/2", b""), put(b"b", b""))
    change = wrote(store, *batch)
    assert contents(store) == left
    assert {event.key: event.value for event in change.events} == told
    assert store.revision == change.revision == 2


CONDITIONS = {
    "the revision is the last one": (Condition(key=b"k", mod_revision=2), True),
    "the revision is an older one": (Condition(key=b"k", mod_revision=1), False),
    "the key should not be there": (Condition(key=b"k", mod_revision=0), False),
    "the key is not there, as it should": (Condition(key=b"none", mod_revision=0), True),
    "the key is not there": (Condition(key=b"none", mod_revision=2), False),
    "the value is that one": (Condition(key=b"k", value=b"new"), True),
    "the value is another": (Condition(key=b"k", value=b"old"), False),
    "an empty value is not a missing key": (Condition(key=b"none", value=b""), False),
}


@pytest.mark.parametrize(("condition", "holds"), CONDITIONS.values(), ids=CONDITIONS.keys())
def test_a_condition(condition: metastore_pb2.Condition, holds: bool) -> None:
    store = Store()
    wrote(store, put(b"k", b"old"))
    wrote(store, put(b"k", b"new"))
    failed = Draft(store).failed_condition([Condition(key=b"k", mod_revision=2), condition])
    assert (failed is None) == holds


def test_a_condition_sees_the_batches_before_it_in_the_same_group() -> None:
    draft = Draft(Store())
    taken = [Condition(key=b"lock", mod_revision=0)]
    assert draft.failed_condition(taken) is None
    assert draft.add([put(b"lock", b"mine")]) == 1
    assert draft.failed_condition(taken) == taken[0]
    draft.add([delete(b"lock")])
    assert draft.failed_condition(taken) is None


def test_a_key_that_the_group_removed_already_is_not_told_again() -> None:
    store = Store()
    wrote(store, put(b"a/1", b""), put(b"a/2", b""))
    draft = Draft(store)
    draft.add([delete(b"a/1")])
    draft.add([delete_prefix(b"a/")])
    draft.add([delete_prefix(b"a/"), delete(b"a/1")])
    assert [[event.key for event in change.events] for change in draft.changes] == [
        [b"a/1"],
        [b"a/2"],
        [],
    ]


def test_events_stand_in_the_order_of_the_last_change_of_each_key() -> None:
    change = wrote(Store(), put(b"a", b"1"), put(b"b", b"1"), put(b"a", b"2"))
    assert change.events == (Event(b"b", b"1"), Event(b"a", b"2"))


def test_nothing_is_changed_by_a_draft_alone() -> None:
    store = Store()
    Draft(store).add([put(b"k", b"v")])
    assert store.revision == 0
    assert contents(store) == {}


def test_the_history_gives_each_change_after_a_revision() -> None:
    store = Store()
    made = [wrote(store, put(b"k", bytes((i,)))) for i in range(3)]
    assert [store.change_after(revision) for revision in range(4)] == [*made, None]
    assert store.remembers(0)
    assert store.remembers(3)
    assert not store.remembers(4)


@pytest.mark.parametrize(
    ("store", "oldest"),
    [(Store(history_changes=2), 3), (Store(history_bytes=5), 4), (Store(history_bytes=1), 5)],
    ids=["bounded in changes", "bounded in bytes", "too small for a single change"],
)
def test_the_history_forgets_what_does_not_fit(store: Store, oldest: int) -> None:
    for _ in range(5):
        wrote(store, put(b"key", b"v"))
    assert [store.remembers(revision) for revision in range(6)] == [
        revision >= oldest for revision in range(6)
    ]
    assert store.change_after(oldest - 1) is None
    if oldest < 5:
        assert store.change_after(oldest) == Change(oldest + 1, (Event(b"key", b"v"),))
