"""From where a follower resumes, told by a metastore that plays a script."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc
import pytest
from structlog.testing import capture_logs

from kvplane.metastore.v1 import metastore_pb2
from kvplane_common.channels import dial
from kvplane_common.errors import InvalidRequestError, KvplaneError, UnavailableError
from kvplane_common.interceptor import Context
from kvplane_common.metastore import MetastoreClient
from kvplane_common.serving import serving
from kvplane_metastore.service import NAME

Step = metastore_pb2.WatchResponse
Script = list[metastore_pb2.WatchResponse | KvplaneError]

RESET = Step(kind=Step.KIND_RESET, revision=7)
SNAPSHOT = Step(kind=Step.KIND_SNAPSHOT, revision=7)
SYNCED = Step(kind=Step.KIND_SYNCED, revision=7)
CHANGES = Step(kind=Step.KIND_CHANGES, revision=9)
LOST = UnavailableError("lost")


class Scripted:
    """Plays the script in one watch after another; an error ends the watch it falls in."""

    def __init__(self, script: Script) -> None:
        self.asked: list[int] = []
        self._script = iter(script)

    async def watch(
        self, request: metastore_pb2.WatchRequest, context: Context
    ) -> AsyncIterator[metastore_pb2.WatchResponse]:
        self.asked.append(request.start_revision)
        for step in self._script:
            if isinstance(step, KvplaneError):
                raise step
            yield step

    def register(self, server: grpc.aio.Server) -> None:
        watch = grpc.unary_stream_rpc_method_handler(
            self.watch,
            request_deserializer=metastore_pb2.WatchRequest.FromString,
            response_serializer=Step.SerializeToString,
        )
        handlers = grpc.method_handlers_generic_handler(NAME, {"Watch": watch})
        server.add_generic_rpc_handlers((handlers,))


SCRIPTS: dict[str, tuple[Script, list[int]]] = {
    # a sentence: (what the metastore plays, the revisions from which the follower asks)
    "nothing was seen yet": ([LOST, RESET, SYNCED], [0, 0]),
    "a snapshot that broke off begins again": ([RESET, SNAPSHOT, LOST, RESET, SYNCED], [0, 0]),
    "a snapshot was whole": ([RESET, SNAPSHOT, SYNCED, LOST, SYNCED], [0, 7]),
    "changes were seen": ([RESET, SYNCED, CHANGES, LOST, SYNCED], [0, 9]),
    "a new snapshot broke off": ([RESET, SYNCED, CHANGES, RESET, LOST, RESET], [0, 0]),
    "it was lost twice": ([RESET, SYNCED, LOST, LOST, SYNCED], [0, 7, 7]),
}


@pytest.mark.parametrize(("script", "asked"), SCRIPTS.values(), ids=SCRIPTS.keys())
async def test_a_follower_resumes_from_the_last_whole_state(
    script: Script, asked: list[int]
) -> None:
    scripted = Scripted(script)

    expected = [step for step in script if isinstance(step, Step)]
    with capture_logs() as logs:
        async with (
            asyncio.timeout(20),
            serving("127.0.0.1:0", (), scripted.register, 0) as running,
            dial(running.address) as channel,
            aclosing(MetastoreClient(channel).follow(b"a/")) as steps,
        ):
            assert [await anext(steps) for _ in expected] == expected
    assert scripted.asked == asked
    assert [log["event"] for log in logs].count("lost the metastore") == 1


async def test_a_follower_that_is_refused_raises() -> None:
    scripted = Scripted([InvalidRequestError("no such range")])

    async with (
        serving("127.0.0.1:0", (), scripted.register, 0) as running,
        dial(running.address) as channel,
    ):
        with pytest.raises(InvalidRequestError, match="no such range"):
            await anext(MetastoreClient(channel).follow(b"a/"))
