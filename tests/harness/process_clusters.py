"""A cluster of processes, and what tests ask of it."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc

from harness.agents import Agent
from harness.clusters import Asking
from harness.services import health, until
from kvplane.agent.v1 import agent_pb2_grpc
from kvplane.common.v1 import node_pb2
from kvplane.registry.v1 import registry_pb2, registry_pb2_grpc
from kvplane.router.v1 import router_pb2_grpc
from kvplane_cli.layout import Embedded
from kvplane_cli.local_cluster import LocalCluster
from kvplane_common.channels import dial
from kvplane_common.metastore import MetastoreClient

MODEL = "mini"
LEASE_S = 2.0
NODES = ("node-1", "node-2")


class ProcessCluster:
    """Metastore, registry, router, two agents and their engines, each a process that may die."""

    def __init__(
        self, local: LocalCluster, router: Asking, agents: Mapping[str, Agent],
        registry: registry_pb2_grpc.RegistryServiceStub, metastore: MetastoreClient,
    ) -> None:  # fmt: skip
        self.local = local
        self.router = router
        self.agents = agents
        self.registry = registry
        self.metastore = metastore

    async def terminate(self, name: str) -> int:
        """End one process with SIGTERM and return its exit status."""
        await self.local.child(name).stop(20)
        status = self.local.child(name).status
        assert status is not None
        return status

    async def node(self, node_id: str) -> node_pb2.Node:
        """Return a node as the registry knows it."""
        reply = await self.registry.ListNodes(registry_pb2.ListNodesRequest())
        return {node.node_id: node for node in reply.nodes}[node_id]

    async def until_node(
        self, node_id: str, holds: Callable[[node_pb2.Node], bool], limit_s: float = 20.0
    ) -> node_pb2.Node:
        """Wait until something holds of a node, and return it."""
        seen: list[node_pb2.Node] = []

        async def holds_now() -> bool:
            seen[:] = [await self.node(node_id)]
            return holds(seen[0])

        await until(holds_now, limit_s)
        return seen[0]

    async def drain(self, node_id: str, draining: bool = True) -> None:
        """Drain a node, or end that, and wait until its agent knows."""
        request = registry_pb2.DrainRequest(node_id=node_id, draining=draining)
        await self.registry.Drain(request)
        await self.agents[node_id].until_admitting(not draining)

    async def keys(self, prefix: str = "/cache/") -> set[bytes]:
        """Return the keys that the metastore has under a prefix."""
        kvs, _ = await self.metastore.range(prefix.encode())
        return {kv.key for kv in kvs}

    async def until_keys(self, wanted: set[bytes], prefix: str = "/cache/") -> None:
        """Wait until the metastore has all of these."""

        async def holds() -> bool:
            return wanted <= await self.keys(prefix)

        await until(holds)

    async def until_health(self, name: str, wanted: str) -> None:
        """Wait until a service's health is as wanted."""
        at = self.local.addresses
        address = at.agents[name] if name in at.agents else str(getattr(at, name))

        async def holds() -> bool:
            return await health(address) == wanted

        await until(holds)

    async def until_whole(self, node_ids: Sequence[str] = NODES) -> None:
        """Wait until nothing is held anywhere, and the router can use these nodes alone."""
        for agent in self.agents.values():
            await agent.until_idle()

        async def able() -> bool:
            try:
                routed = await self.router.route("the")
            except grpc.aio.AioRpcError:
                return False
            await self.router.release(routed)
            candidates = routed.decision.candidates
            return {one.node_id for one in candidates if not one.excluded_reason} == set(node_ids)

        await until(able)


@asynccontextmanager
async def process_cluster(model: Path, run_dir: Path) -> AsyncIterator[ProcessCluster]:
    """Run a cluster of processes while the block runs."""
    local = LocalCluster(
        [Embedded(model, MODEL)] * len(NODES),
        run_dir,
        flags={"registry": [f"--lease-s={LEASE_S}"], **{name: ["--block-mb=1"] for name in NODES}},
    )
    at = local.addresses
    async with local, AsyncExitStack() as stack:

        async def to(address: str) -> grpc.aio.Channel:
            return await stack.enter_async_context(dial(address))

        agents = {
            node_id: Agent(address, agent_pb2_grpc.AgentServiceStub(await to(address)), MODEL)
            for node_id, address in at.agents.items()
        }
        yield ProcessCluster(
            local,
            Asking(router_pb2_grpc.RouterServiceStub(await to(at.router)), MODEL),
            agents,
            registry_pb2_grpc.RegistryServiceStub(await to(at.registry)),
            MetastoreClient(await to(at.metastore)),
        )
