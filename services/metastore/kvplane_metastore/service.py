"""The metastore as a whole: its log, its server, its health."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from kvplane.metastore.v1 import metastore_pb2, metastore_pb2_grpc
from kvplane_common.background import background
from kvplane_common.serving import Serving, serving
from kvplane_metastore.config import MetastoreConfig
from kvplane_metastore.engine import Engine, running_engine
from kvplane_metastore.files import locked
from kvplane_metastore.format import SALT_BYTES
from kvplane_metastore.servicer import MetastoreServicer

NAME = metastore_pb2.DESCRIPTOR.services_by_name["MetastoreService"].full_name


async def serve(config: MetastoreConfig, stop: asyncio.Event) -> None:
    """Serve until `stop` is set. Raises what `serving_metastore` raises."""
    async with serving_metastore(config):
        await stop.wait()


@asynccontextmanager
async def serving_metastore(config: MetastoreConfig) -> AsyncIterator[Serving]:
    """Replay the log, then answer while the block runs.

    Raises OSError if the directory or the address is in use, or the log is damaged.
    """
    with locked(config.data_dir) as files:
        async with running_engine(files, os.urandom(SALT_BYTES)) as engine:
            servicer = MetastoreServicer(engine)

            def register(server: grpc.aio.Server) -> None:
                metastore_pb2_grpc.add_MetastoreServiceServicer_to_server(servicer, server)

            async with serving(config.listen, (NAME,), register, config.drain_s) as running:
                await running.set_ready(True)
                async with background(_tell_read_only(engine, running)):
                    try:
                        yield running
                    finally:
                        engine.end_watches()


async def _tell_read_only(engine: Engine, running: Serving) -> None:
    # Reads and watches go on, but whoever minds the process should know that it needs a restart.
    await engine.ended.wait()
    await running.set_ready(False)
