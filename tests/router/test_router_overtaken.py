"""What a node's last report still counts of requests that have ended."""

from harness.clock import ManualClock
from harness.routing import MODEL, chain, model, node, request, step
from kvplane.common.v1 import generation_pb2
from kvplane_common.errors import ExhaustedError
from kvplane_router.core import Choice, Core
from kvplane_router.decide import Rules
from kvplane_router.overtaken import LATE_MS, Overtaken
from kvplane_router.reservations import Lease

TEXT = "the same beginning of every turn of this conversation. " * 40


class Router:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.core = Core(self.clock, Rules(), session_ttl_s=60)
        self.told(active=0)

    def told(self, active: int) -> None:
        served = model(slots=1, queue_limit=0, kv_bytes_per_token=1024.0)
        self.core.nodes_told(step(node("a", served, blocks=1, active=active, active_blocks=active)))

    def begin(self) -> Choice:
        return self.core.choose(request(chain(TEXT)), {})

    def end(self, choice: Choice) -> None:
        self.core.finished(choice, generation_pb2.Completion())

    def waits(self) -> bool:
        """Tell whether the node looks busy to the next request."""
        try:
            choice = self.begin()
        except ExhaustedError:
            return True
        self.core.release(choice)
        return False


def test_the_next_turn_does_not_wait_for_the_report_that_the_last_one_has_ended() -> None:
    router = Router()
    choice = router.begin()
    router.told(active=1)
    router.end(choice)
    assert not router.waits()


def test_a_report_that_was_made_before_the_end_and_comes_after_it_is_seen_through() -> None:
    router = Router()
    router.end(router.begin())
    router.told(active=1)
    assert not router.waits()


def test_a_later_report_is_believed() -> None:
    router = Router()
    choice = router.begin()
    router.told(active=1)
    router.end(choice)
    router.clock.advance_ms(LATE_MS)
    router.told(active=1)
    assert router.waits()


def test_what_another_router_runs_there_still_counts() -> None:
    router = Router()
    router.told(active=1)
    assert router.waits()


def test_while_no_report_comes_memory_does_not_grow() -> None:
    overtaken = Overtaken()
    overtaken.reported("a", 0, 0.0)
    for number in range(1, 1_000):
        overtaken.ended(Lease(number, "a", MODEL, 1, 1), number * LATE_MS)
    assert len(overtaken._ended["a"]) <= 2
