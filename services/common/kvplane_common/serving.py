"""Starting a service, telling its health, and stopping it without breaking running work."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import grpc
import structlog
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from kvplane_common.addresses import check_bindable, with_port
from kvplane_common.channels import MAX_MESSAGE_BYTES
from kvplane_common.config import Config, load
from kvplane_common.interceptor import ErrorInterceptor
from kvplane_common.logs import configure_logs

_log = structlog.get_logger(__name__)

_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Without this a second process on the same port would silently share it.
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
)


class Serving:
    """A server that answers. Its health is NOT_SERVING until it is said to be ready."""

    def __init__(self, address: str, names: Sequence[str], health: HealthServicer) -> None:
        self.address = address
        self._names = names
        self._health = health

    async def set_ready(self, ready: bool) -> None:
        """Tell the health of every service, and of the server as a whole."""
        states = health_pb2.HealthCheckResponse
        state = states.SERVING if ready else states.NOT_SERVING
        for name in ("", *self._names):
            await self._health.set(name, state)


@asynccontextmanager
async def serving(
    listen: str,
    names: Sequence[str],
    register: Callable[[grpc.aio.Server], None],
    drain_s: float,
) -> AsyncIterator[Serving]:
    """Answer on `listen` while the block runs, with health and reflection.

    `names` are the full names of the services that `register` adds. At the end no new call is
    taken, and running ones get `drain_s` seconds before they are cancelled. Raises OSError if the
    address is taken.
    """
    server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=_OPTIONS)
    health = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    listed = (*names, "grpc.health.v1.Health", reflection.SERVICE_NAME)
    reflection.enable_server_reflection(listed, server)
    register(server)
    await asyncio.to_thread(check_bindable, listen)
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {listen}: {error}") from error
    running = Serving(with_port(listen, port), names, health)
    await running.set_ready(False)
    await server.start()
    _log.info("listening", address=running.address)
    try:
        yield running
    finally:
        await running.set_ready(False)
        _log.info("draining", seconds=drain_s)
        await server.stop(drain_s)


def run(
    kind: type[Config], program: str, main: Callable[[Config, asyncio.Event], Awaitable[None]]
) -> None:
    """Run a service until SIGTERM or SIGINT: load its configuration, then await `main`.

    `main` gets the configuration and an event that is set when it is time to stop. Exits with
    status 0 after a graceful stop, 2 for bad configuration, 1 for what it could not start with.
    """
    config = load(kind, program, sys.argv[1:])
    # gRPC's own lines are no JSON, and say nothing that an error here does not.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    configure_logs(program, config.log_level, human=config.log_format == "text")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(_until_stopped(config, main))
        except OSError as error:
            sys.stderr.write(f"{program}: {error}\n")
            raise SystemExit(1) from error


async def _until_stopped(
    config: Config, main: Callable[[Config, asyncio.Event], Awaitable[None]]
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await main(config, stop)
    _log.info("stopped")
