import asyncio

import grpc
import pytest
import typer
from grpc.aio import Metadata
from typer.testing import CliRunner

from kvplane.common.v1 import node_pb2
from kvplane_cli import clients
from kvplane_cli.__main__ import app
from kvplane_cli.asking import only_model, the_only_model
from kvplane_cli.layout import free_ports
from kvplane_cli.shell import CliError, run
from kvplane_common.errors import (
    DETAILS_KEY,
    KvplaneError,
    MetastoreUnavailableError,
    ModelNotFoundError,
    QueueFullError,
    UnavailableError,
    UnsupportedError,
)

ADDRESS = "127.0.0.1:7700"


def _told(error: KvplaneError) -> grpc.aio.AioRpcError:
    details = Metadata((DETAILS_KEY, error.to_status().SerializeToString()))
    return grpc.aio.AioRpcError(error.code, Metadata(), details, str(error))


def _bare(code: grpc.StatusCode, message: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, Metadata(), Metadata(), message)


ELSEWHERE = "--router or KVPLANE_ROUTER names another address."


@pytest.mark.parametrize(
    ("error", "line"),
    [
        pytest.param(
            _told(ModelNotFoundError("no node has 'x'; there is 'y'")),
            "MODEL_NOT_FOUND: no node has 'x'; there is 'y'",
            id="the reason and the message",
        ),
        pytest.param(
            _told(QueueFullError("4 wait, the limit is 4", retry_after_ms=1500)),
            "QUEUE_FULL: 4 wait, the limit is 4 (retry after 1,500 ms)",
            id="when to retry",
        ),
        pytest.param(
            _told(MetastoreUnavailableError("the nodes are not read yet")),
            "METASTORE_UNAVAILABLE: the nodes are not read yet",
            id="a service that answers is not called away",
        ),
        pytest.param(
            _told(UnavailableError("the service stops")),
            "UNAVAILABLE: the service stops",
            id="nor one that says so with the plainest reason",
        ),
        pytest.param(
            _bare(grpc.StatusCode.UNAVAILABLE, "connection refused"),
            "no router answers at 127.0.0.1:7700. Start a cluster on this machine with "
            "`kvplane up`, or the service alone with `kvplane-router`; " + ELSEWHERE,
            id="nobody answers",
        ),
        pytest.param(
            _bare(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"),
            "the router at 127.0.0.1:7700 did not answer in time",
            id="no answer in time",
        ),
        pytest.param(
            _bare(grpc.StatusCode.UNIMPLEMENTED, "Method not found!"),
            "127.0.0.1:7700 answers, but is not a router; " + ELSEWHERE,
            id="another service behind the address",
        ),
        pytest.param(
            _told(UnsupportedError("not in this version")),
            "UNSUPPORTED: not in this version",
            id="the right service without the feature",
        ),
    ],
)
def test_an_error_becomes_one_clear_line(error: grpc.aio.AioRpcError, line: str) -> None:
    assert clients.say(error, "router", ADDRESS) == line


async def test_a_web_server_behind_the_address_is_no_router() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(CliError, match=f"{address} answers, but is not a registry"):
            await clients.list_nodes(address)


async def test_without_a_registry_naming_the_model_is_the_way_out() -> None:
    with pytest.raises(CliError, match=r"no registry answers.*names its --model does without it"):
        await the_only_model(f"127.0.0.1:{free_ports(1)[0]}")


async def test_a_service_that_is_away_is_named_with_its_address() -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(CliError, match=f"no registry answers at {address}"):
        await clients.list_nodes(address)
    with pytest.raises(CliError, match=f"no metastore answers at {address}"):
        async with clients.metastore(address) as metastore:
            await metastore.range(b"/cache/")


def test_a_command_that_fails_says_so_on_stderr_and_exits_with_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def fails() -> None:
        raise CliError("it did not work")

    with pytest.raises(typer.Exit) as exit_:
        run(fails())
    assert exit_.value.exit_code == 1
    assert capsys.readouterr() == ("", "kvplane: it did not work\n")


def _ready(*models: str) -> node_pb2.Node:
    capacity = node_pb2.Capacity(models=[node_pb2.Model(name=name) for name in models])
    return node_pb2.Node(capacity=capacity, state=node_pb2.Node.STATE_READY)


def test_the_only_model_of_a_fleet_need_not_be_named() -> None:
    assert only_model([_ready("m"), _ready("m"), _ready()]) == "m"


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        pytest.param([_ready("b"), _ready("a")], "--model; the fleet has a, b", id="two models"),
        pytest.param([_ready()], "no node that is ready has a model", id="no model"),
        pytest.param(
            [node_pb2.Node(capacity=_ready("m").capacity, state=node_pb2.Node.STATE_LOST)],
            "no node that is ready",
            id="a lost node's model does not count",
        ),
    ],
)
def test_a_model_must_be_named_unless_there_is_just_one(
    nodes: list[node_pb2.Node], message: str
) -> None:
    with pytest.raises(CliError, match=message):
        only_model(nodes)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["generate", "hi", "--router", "nonsense"], id="an address without port"),
        pytest.param(["generate", "hi", "--max-tokens", "0"], id="no tokens at all"),
        pytest.param(["generate", "hi", "--temperature", "-1"], id="a negative temperature"),
        pytest.param(["generate"], id="no prompt"),
        pytest.param(["up", "--nodes", "0"], id="no nodes"),
        pytest.param(["up", "--policy", "guess"], id="an unknown policy"),
        pytest.param(["up", "--nodes", "2", "--ollama", "http://x"], id="embedded and named"),
        pytest.param(["up", "--ollama", "localhost:11434"], id="a URL without http"),
        pytest.param(["drain"], id="no node"),
        pytest.param(["forget"], id="nobody to forget"),
        pytest.param(["no-such-command"], id="an unknown command"),
    ],
)
def test_bad_arguments_exit_with_2_and_a_message(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert result.stderr
    assert not result.stdout


def test_an_address_from_the_environment_is_checked_too() -> None:
    result = CliRunner().invoke(app, ["nodes"], env={"KVPLANE_REGISTRY": "nonsense"})
    assert result.exit_code == 2
    assert "nonsense" in result.stderr


def test_the_version_is_told() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, "kvplane 0.1.0\n")
