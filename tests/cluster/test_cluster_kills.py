"""kill -9 of each process of a cluster, while it works."""

import asyncio

from harness.clusters import begun, fresh
from harness.flows import flowing
from harness.process_clusters import LEASE_S, NODES, ProcessCluster
from harness.routers import Answer
from harness.routing import chat
from harness.services import until
from kvplane.common.v1 import node_pb2
from kvplane.router.v1 import router_pb2

Stage = router_pb2.Stage
Node = node_pb2.Node

LOST_WITHIN_S = LEASE_S * 1.1 + 0.5
"""The lease, a tenth of it between two looks at the leases, and the wire's delay."""


def other(node_id: str) -> str:
    (name,) = set(NODES) - {node_id}
    return name


def credited(decision: router_pb2.Decision, node_id: str) -> int:
    return sum(one.predicted_cached_tokens for one in decision.candidates if one.node_id == node_id)


async def first_turn(processes: ProcessCluster, session_id: str) -> tuple[list[str], Answer]:
    """Have a conversation's first turn, and wait until it is on record."""
    said = [fresh(200), fresh(20)]
    before = await processes.keys()
    answer = await processes.router.ask(prompt=chat(*said), session_id=session_id)
    await processes.until_keys({f"/session/default/{session_id}".encode()}, "/session/")

    async def recorded() -> bool:
        return bool(await processes.keys() - before)

    await until(recorded)
    return [*said, answer.text], answer


async def test_a_killed_metastore_fails_no_request_and_its_entries_are_there_afterwards(
    processes: ProcessCluster,
) -> None:
    said, first = await first_turn(processes, "metastore")
    kept = await processes.keys() | await processes.keys("/session/")
    async with flowing(processes.router) as flow:
        await flow.until_answered(4)
        await processes.local.kill("metastore")
        await flow.until_answered(4)
        while_away = await processes.router.ask(
            prompt=chat(*said, fresh(20)), session_id="metastore"
        )
        await processes.local.restart("metastore")
        await flow.until_answered(4)
    # From memory; whether it goes there depends on what else runs.
    assert credited(while_away.decision, first.decision.node_id) > 200
    sessions = {key for key in kept if key.startswith(b"/session/")}
    await processes.until_keys(sessions, "/session/")
    held = [
        f"/cache/{one.node_id}/{one.model}/{one.chain.digests[-8:].hex()}".encode()
        for agent in processes.agents.values()
        for one in (await agent.listing()).residencies
    ]
    assert held
    await processes.until_keys(set(held))


async def test_a_killed_registry_fails_no_request_and_the_drain_survives(
    processes: ProcessCluster,
) -> None:
    await processes.drain("node-2")
    async with flowing(processes.router) as flow:
        await flow.until_answered(4)
        await processes.local.kill("registry")
        await flow.until_answered(4)
        await processes.local.restart("registry")
        await flow.until_answered(4)
        node = await processes.until_node("node-2", lambda node: node.state == Node.STATE_READY)
        assert node.draining
        assert (await processes.router.ask(fresh(20))).decision.node_id == "node-1"
        await processes.until_node("node-1", lambda node: node.state == Node.STATE_READY)
    await processes.drain("node-2", draining=False)


async def test_a_killed_router_serves_again_only_with_what_was_known_before(
    processes: ProcessCluster,
) -> None:
    said, first = await first_turn(processes, "router")
    await processes.local.kill("router")
    await processes.local.kill("metastore")
    await processes.local.child("router").start()
    # It answers, but has not seen what is cached: nobody may be sent to it yet.
    await processes.until_health("router", "NOT_SERVING")
    await processes.local.restart("metastore")
    await processes.until_health("router", "SERVING")
    exact = await processes.router.ask(prompt=chat(*said[:2]))
    session = await processes.router.ask(prompt=chat(*said, fresh(20)), session_id="router")
    assert exact.decision.stage == Stage.STAGE_EXACT
    assert session.decision.stage == Stage.STAGE_SESSION
    homes = {answer.decision.node_id for answer in (first, exact, session)}
    assert len(homes) == 1
    assert session.completion.usage.cached_tokens > 0.8 * first.completion.usage.prompt_tokens


async def test_a_killed_agent_is_lost_within_its_lease_and_never_credited_again(
    processes: ProcessCluster,
) -> None:
    said, first = await first_turn(processes, "agent")
    home = first.decision.node_id
    before = await processes.node(home)
    await processes.local.kill(home)
    said.append(fresh(20))
    moved = processes.router.ask(prompt=chat(*said), session_id="agent")
    answer, lost = await asyncio.gather(
        moved,
        processes.until_node(home, lambda node: node.state == Node.STATE_LOST, LOST_WITHIN_S),
    )
    assert lost.epoch == before.epoch
    assert answer.decision.node_id == other(home)
    # Which of the two depends on the room that other prompts have left there.
    assert answer.decision.stage in (Stage.STAGE_MISS, Stage.STAGE_EVICT)
    said += [answer.text, fresh(20)]
    again = await processes.router.ask(prompt=chat(*said), session_id="agent")
    assert (again.decision.node_id, again.decision.stage) == (other(home), Stage.STAGE_SESSION)
    assert credited(again.decision, home) == 0
    await processes.local.restart(home)
    back = await processes.until_node(home, lambda node: node.state == Node.STATE_READY)
    assert back.epoch > before.epoch
    await processes.until_whole()
    returned = await processes.router.ask(prompt=chat(*said[:2]))
    assert credited(returned.decision, home) == 0


async def test_a_killed_engine_moves_its_sessions_and_comes_back_with_nothing_credited(
    processes: ProcessCluster,
) -> None:
    said, first = await first_turn(processes, "engine")
    home = first.decision.node_id
    engine = f"engine-{home.removeprefix('node-')}"
    before = await processes.node(home)
    await processes.local.kill(engine)
    moved = await processes.router.ask(prompt=chat(*said, fresh(20)), session_id="engine")
    assert moved.decision.node_id == other(home)
    await processes.until_node(home, lambda node: not node.capacity.models)
    await processes.local.restart(engine)
    await processes.until_node(home, lambda node: node.epoch > before.epoch)
    await processes.until_whole()
    again = await processes.router.ask(prompt=chat(*said[:2]))
    assert credited(again.decision, home) == 0


async def test_a_killed_agent_fails_no_request_whose_answer_has_not_begun(
    processes: ProcessCluster,
) -> None:
    asking = asyncio.create_task(processes.router.ask(fresh(1200)))
    busy: list[str] = []

    async def evaluated() -> bool:
        loads = {name: await agent.load() for name, agent in processes.agents.items()}
        busy[:] = [name for name, load in loads.items() if load.models]
        return bool(busy)

    await until(evaluated)
    await processes.local.kill(busy[0])
    answer = await asking
    assert answer.decision.attempts == 2
    assert answer.decision.node_id == other(busy[0])


async def test_a_killed_router_frees_what_its_requests_held_on_the_nodes(
    processes: ProcessCluster,
) -> None:
    calls = [processes.router.stream(fresh(20), max_tokens=3000) for _ in range(3)]
    await begun(calls[0])
    await processes.local.kill("router")
    for agent in processes.agents.values():
        await agent.until_idle()


async def test_a_node_that_dies_while_the_registry_is_away_is_lost_when_that_is_back(
    processes: ProcessCluster,
) -> None:
    await processes.local.kill("registry")
    await processes.local.kill("node-1")
    assert (await processes.router.ask(fresh(20))).decision.node_id == "node-2"
    await processes.local.restart("registry")
    await processes.until_node("node-1", lambda node: node.state == Node.STATE_LOST, LOST_WITHIN_S)
    await processes.local.restart("node-1")
    await processes.until_node("node-1", lambda node: node.state == Node.STATE_READY)


async def test_an_agent_that_is_back_takes_requests_at_once(processes: ProcessCluster) -> None:
    before = await processes.node("node-1")
    await processes.local.kill("node-1")
    for _ in NODES:
        # Sooner or later the router calls the dead one, and hears that nobody is there.
        assert (await processes.router.ask(fresh(20))).decision.node_id == "node-2"
    await processes.drain("node-2")
    await processes.local.restart("node-1")
    await processes.until_node("node-1", lambda node: node.epoch > before.epoch)
    await processes.until_whole(("node-1",))
    answer = await processes.router.ask(fresh(20))
    assert (answer.decision.node_id, answer.decision.attempts) == ("node-1", 1)
    await processes.drain("node-2", draining=False)
