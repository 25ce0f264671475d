"""Puts the node agent together, and runs it."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from kvplane.agent.v1 import agent_pb2_grpc
from kvplane_common.background import background
from kvplane_common.channels import dial
from kvplane_common.clock import SystemClock
from kvplane_common.errors import EngineUnavailableError
from kvplane_common.metastore import MetastoreClient, WriteBehind
from kvplane_common.node_ids import legal_node_id
from kvplane_common.serving import Serving, serving
from kvplane_node_agent.config import (
    LLAMA_SERVER_URL,
    OLLAMA_URL,
    NodeAgentConfig,
)
from kvplane_node_agent.engine_watch import EngineWatch
from kvplane_node_agent.engines.base import Engine
from kvplane_node_agent.engines.detect import detect
from kvplane_node_agent.engines.settings import EngineSettings
from kvplane_node_agent.generate import Generation
from kvplane_node_agent.gpu_search import read_gpu_memory
from kvplane_node_agent.ledger import Ledger, Limits
from kvplane_node_agent.memory import Memory, operators_memory
from kvplane_node_agent.node import Node
from kvplane_node_agent.records import Records
from kvplane_node_agent.registration import Registration
from kvplane_node_agent.servicer import NAME, AgentServicer

MIB = 1024 * 1024


async def serve(config: NodeAgentConfig, stop: asyncio.Event) -> None:
    """Answer until `stop` is set. Raises OSError if the address is taken."""
    async with running(config):
        await stop.wait()


@asynccontextmanager
async def running(config: NodeAgentConfig) -> AsyncIterator[Serving]:
    """Answer while the block runs; serving once the engine was found.

    At the end no work is admitted and running work gets `drain_s` seconds; then the registry is
    told goodbye, so that routers stop at once. It remembers the node, and its drain, as lost.
    """
    started: asyncio.Future[Serving] = asyncio.get_running_loop().create_future()
    async with dial(config.registry) as registry, dial(config.metastore) as metastore:
        writes = WriteBehind(MetastoreClient(metastore))
        node = _node(config, writes)
        watch = EngineWatch(node, lambda: find_engine(config), lambda: read_memory(config))
        owned = (
            watch.run(),
            writes.run(),
            node.expire_reservations(),
            _tell_health(node, started),
        )
        registration = Registration(node, registry, config.labels)
        async with background(*owned):
            async with (
                background(_register(config, registration, started)),
                _answering(config, node) as answering,
            ):
                started.set_result(answering)
                try:
                    yield answering
                finally:
                    node.stop()
            # Only now: a heartbeat after it would register the node again.
            await registration.say_goodbye()
            await writes.flush()


@asynccontextmanager
async def _answering(config: NodeAgentConfig, node: Node) -> AsyncIterator[Serving]:
    servicer = AgentServicer(node, Generation(node, config.assumed_output_tokens))

    def register(server: grpc.aio.Server) -> None:
        agent_pb2_grpc.add_AgentServiceServicer_to_server(servicer, server)

    async with serving(config.listen, [NAME], register, config.drain_s) as answering:
        yield answering


def _node(config: NodeAgentConfig, writes: WriteBehind) -> Node:
    clock = SystemClock()
    node_id = config.node_id or legal_node_id(socket.gethostname())
    budget_mb = config.kv_budget_mb
    limits = Limits(
        block_bytes=config.block_mb * MIB,
        queue_limit=config.queue_limit,
        kv_budget_bytes=None if budget_mb is None else budget_mb * MIB,
    )
    records = Records(node_id, writes)
    return Node(Ledger(node_id, limits, clock.now_ms(), records), records, clock)


async def _register(
    config: NodeAgentConfig,
    registration: Registration,
    started: "asyncio.Future[Serving]",
) -> None:
    address = config.advertise or (await started).address
    await registration.run(address)


async def _tell_health(node: Node, started: "asyncio.Future[Serving]") -> None:
    answering = await started
    while True:
        node.engine_changed.clear()
        await answering.set_ready(node.ready)
        await node.engine_changed.wait()


async def find_engine(config: NodeAgentConfig) -> Engine:
    """Return the engine that answers where the configuration says, or at a default address.

    Raises EngineUnavailableError.
    """
    urls = [config.engine_url] if config.engine_url else [OLLAMA_URL, LLAMA_SERVER_URL]
    failures = []
    for url in urls:
        settings = EngineSettings(
            url=url,
            api_key=config.engine_api_key.get_secret_value(),
            slots=config.slots,
            context_tokens=config.context_tokens,
            kv_bytes_per_token=config.kv_bytes_per_token,
        )
        try:
            return await detect(settings)
        except EngineUnavailableError as error:
            failures.append(str(error))
    raise EngineUnavailableError("; ".join(failures))


async def read_memory(config: NodeAgentConfig) -> Memory:
    """Return the memory of the GPUs, or what the operator says where none tells."""
    memory = await read_gpu_memory()
    return operators_memory(config.memory_mb) if memory.total_bytes is None else memory
