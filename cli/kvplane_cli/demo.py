"""`kvplane demo`: a real cluster, a real conversation, and what the cache saved."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from kvplane.common.v1 import prompt_pb2
from kvplane.router.v1 import router_pb2, router_pb2_grpc
from kvplane_cli import clients, options
from kvplane_cli.asking import ask
from kvplane_cli.demo_checks import Report, Turn, checks
from kvplane_cli.demo_script import OTHER_USER, TURNS, UNRELATED, message, opening
from kvplane_cli.demo_view import Turns, report_json, show_report, shown_turns
from kvplane_cli.layout import Embedded
from kvplane_cli.local_cluster import LocalCluster, run_directory
from kvplane_cli.models import embedded_model
from kvplane_cli.progress import progress
from kvplane_cli.render import show_json
from kvplane_cli.shell import CliError, run, stderr
from kvplane_common.clock import SystemClock
from kvplane_common.keys import CACHE_PREFIX, SESSION_PREFIX

_NODES = 2
_MAX_TOKENS = 24
_SESSION = "demo"
_OTHER_SESSION = "demo-other-user"
_SETTLE_S = 0.3
_SETTLE_LIMIT_S = 10.0


def demo(model: options.ModelFile = None, as_json: options.Json = False) -> None:
    """Run a real cluster for a conversation, kill its metastore, and show what the cache saved."""
    run(_demo(model, as_json=as_json))


async def _demo(given: Path | None, *, as_json: bool) -> None:
    model, alias = embedded_model(given)
    with run_directory(None) as run_dir, progress(stderr(), "starting the cluster") as starting:
        cluster = LocalCluster([Embedded(model, alias)] * _NODES, run_dir)
        async with cluster, clients.router(cluster.addresses.router) as stub:
            starting.stop()
            with shown_turns(quiet=as_json) as shown:
                report = await _converse(cluster, Asker(stub, alias, shown))
        found = tuple(checks(report))
        if as_json:
            show_json(report_json(report, found))
        else:
            show_report(report, found)
        broken = "; ".join(
            f"{check.what} (found {check.found})" for check in found if not check.holds
        )
        if broken:
            raise CliError(f"the demo failed: {broken}")


class Asker:
    """Asks one request after the other, and shows each."""

    def __init__(
        self,
        stub: router_pb2_grpc.RouterServiceStub,
        model: str,
        shown: Turns,
    ) -> None:
        self._stub = stub
        self._model = model
        self._shown = shown

    async def __call__(
        self, what: str, messages: Sequence[prompt_pb2.Message], session_id: str = ""
    ) -> Turn:
        """Ask `messages`, drawing the likeliest tokens. Raises AioRpcError and CliError."""
        request = router_pb2.GenerateRequest(
            model=self._model,
            prompt=prompt_pb2.Prompt(chat=prompt_pb2.Chat(messages=messages)),
            sampling=prompt_pb2.Sampling(max_tokens=_MAX_TOKENS, temperature=0.0),
            session_id=session_id,
        )
        self._shown.begin(what)
        turn = Turn(what, await ask(self._stub, request, SystemClock()))
        self._shown.end(turn)
        return turn


async def _converse(cluster: LocalCluster, asked: Asker) -> Report:
    question, *later, last_question = TURNS
    messages = [*opening(question)]
    turns = [await asked("turn 1", messages, _SESSION)]
    for question in later:
        messages += _next(turns[-1], question)
        turns.append(await asked(f"turn {len(turns) + 1}", messages, _SESSION))
    again = await asked("turn 1 again, no session", opening(TURNS[0]))
    other_user = await asked("another user, same instructions", opening(OTHER_USER), _OTHER_SESSION)
    unrelated = await asked("something else", [message("user", UNRELATED)])
    before, after = await _killed_and_back(cluster)
    messages += _next(turns[-1], last_question)
    after_restart = await asked("next turn, metastore restarted", messages, _SESSION)
    return Report(turns, again, other_user, unrelated, after_restart, before, after)


def _next(turn: Turn, question: str) -> Sequence[prompt_pb2.Message]:
    return message("assistant", turn.answer.text), message("user", question)


async def _killed_and_back(cluster: LocalCluster) -> tuple[frozenset[bytes], frozenset[bytes]]:
    before = await _settled_keys(cluster.addresses.metastore)
    await cluster.kill("metastore")
    await cluster.restart("metastore")
    return before, await _keys(cluster.addresses.metastore)


async def _settled_keys(address: str) -> frozenset[bytes]:
    """Return the keys once no late write changes them any more."""
    async with asyncio.timeout(_SETTLE_LIMIT_S):
        keys = await _keys(address)
        while True:
            await asyncio.sleep(_SETTLE_S)
            earlier, keys = keys, await _keys(address)
            if keys and keys == earlier:
                return keys


async def _keys(address: str) -> frozenset[bytes]:
    async with clients.metastore(address) as client:
        ranges = [await client.range(prefix) for prefix in (CACHE_PREFIX, SESSION_PREFIX)]
    return frozenset(kv.key for kvs, _ in ranges for kv in kvs)
