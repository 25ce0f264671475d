"""Route, and what becomes of the reservation: used on the node, given back, or left to expire."""

import pytest

import kvplane_node_agent.service
import kvplane_router.service
from harness.clusters import Cluster, drawing, engine_cluster, fresh, refused
from harness.engines import EngineProcess
from harness.services import until
from kvplane.agent.v1 import agent_pb2, agent_pb2_grpc
from kvplane.common.v1 import prompt_pb2
from kvplane.router.v1 import router_pb2
from kvplane_common.channels import dial
from kvplane_common.clock import SystemClock
from kvplane_common.errors import QueueFullError, ReservationUnknownError


class SkippingClock(SystemClock):
    """The machine's clock, which a test can put forward."""

    skipped_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.skipped_ms

    def monotonic_ms(self) -> float:
        return super().monotonic_ms() + self.skipped_ms


def using(routed: router_pb2.RouteResponse, model: str, text: str) -> agent_pb2.GenerateRequest:
    return agent_pb2.GenerateRequest(
        model=model,
        prompt=prompt_pb2.Prompt(text=text),
        sampling=drawing(4),
        reservation_id=routed.reservation_id,
    )


async def test_a_client_runs_its_prompt_on_the_node_with_the_reservation(nano: Cluster) -> None:
    text = fresh(100)
    routed = await nano.router.route(text)
    home = nano.agents[routed.decision.node_id]
    assert routed.address == home.address
    assert [model.active for model in (await home.load()).models] == [1]
    async with dial(routed.address) as channel:
        stub = agent_pb2_grpc.AgentServiceStub(channel)
        steps = [step async for step in stub.Generate(using(routed, nano.model, text))]
        kinds = [step.WhichOneof("event") for step in steps]
        assert (kinds[0], kinds[-1]) == ("admission", "completion")
        assert steps[-1].completion.usage.completion_tokens == 4
    await home.until_idle()
    # It was reserved with its chain, and so its cache is known to all.
    await nano.until_recorded()
    await nano.router.until(lambda core: bool(core.index.entries))
    again = await nano.router.ask(text)
    assert again.decision.stage == router_pb2.STAGE_EXACT
    await nano.router.release(routed)


async def test_a_reservation_is_used_once(nano: Cluster) -> None:
    text = fresh(20)
    routed = await nano.router.route(text)
    home = nano.agents[routed.decision.node_id]
    await home.run(using(routed, nano.model, text))
    error = await refused(home.run(using(routed, nano.model, text)))
    assert type(error) is ReservationUnknownError
    await nano.router.release(routed)


async def test_a_reservation_that_is_given_back_frees_all_and_twice_is_no_error(
    nano: Cluster,
) -> None:
    routed = await nano.router.route(fresh(20))
    assert len(nano.router.core.reservations) == 1
    await nano.router.release(routed)
    await nano.router.release(routed)
    await nano.until_at_rest()
    error = await refused(
        nano.agents[routed.decision.node_id].run(using(routed, nano.model, "the"))
    )
    assert type(error) is ReservationUnknownError


async def test_the_node_gives_up_an_unused_reservation_by_itself(nano: Cluster) -> None:
    request = agent_pb2.ReserveRequest(model=nano.model)
    request.hold_duration.FromMilliseconds(100)
    home = nano.agents["a"]
    await home.stub.Reserve(request)
    assert (await home.load()).active_blocks
    await home.until_idle()


async def test_an_unused_reservation_expires_on_the_node_and_at_the_router(
    nano_engines: list[EngineProcess],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SkippingClock()
    for module in (kvplane_router.service, kvplane_node_agent.service):
        monkeypatch.setattr(module, "SystemClock", lambda: clock)
    data_dir = tmp_path_factory.mktemp("expiry")
    async with engine_cluster(data_dir, nano_engines[:1], queue_limit=0) as cluster:
        held = [await cluster.router.route(fresh(20)) for _ in "ab"]  # both slots
        assert type(await refused(cluster.router.route(fresh(20)))) is QueueFullError
        assert held[0].expire_time.ToMilliseconds() > clock.now_ms()
        clock.skipped_ms = 11_000
        home = cluster.agents["a"]
        error = await refused(home.run(using(held[0], cluster.model, "the")))
        assert type(error) is ReservationUnknownError
        await home.until_idle()
        await cluster.router.until(lambda core: not cluster.router.in_flight("a"))
        assert (await cluster.router.ask(fresh(20))).text
        assert not len(cluster.router.core.reservations)


async def test_at_rest_is_reached_after_reservations_of_every_fate(nano: Cluster) -> None:
    used, returned = [await nano.router.route(fresh(20)) for _ in "ab"]
    await nano.agents[used.decision.node_id].run(using(used, nano.model, "the"))
    await nano.router.release(returned)
    # A router learns of a use only when it is told, or by the expiry.
    await nano.router.release(used)
    await until(nano.at_rest)
