"""llama.cpp's own HTTP server in a process of its own, for machines without an engine yet.

    python -m kvplane_cli.embedded_engine --model FILE.gguf --port P

Prints `READY url` once the model answers. It ends on SIGTERM and SIGINT, and with the process that
process of `--parent` if that is given. The engine is the unmodified one of the `xllamacpp` wheel:
`pip install '.[local]'` in a clone of kvplane.
"""

import argparse
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

_BATCH_TOKENS = 256
"""Prompt tokens evaluated at a time: a cancelled prefill ends after the batch it is in."""
_PARENT_CHECK_S = 0.5


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until told to stop; return the process's exit status if it cannot begin."""
    options = _parser().parse_args(arguments)
    if importlib.util.find_spec("xllamacpp") is None:
        return _fail(
            "the engine is not installed: run `pip install '.[local]'` in your clone of kvplane"
        )
    if not options.model.is_file():
        return _fail(f"there is no model file {options.model}")
    stop = _stopping()
    try:
        server = _start(options)
    except RuntimeError as error:
        return _fail(f"the engine did not start with {options.model}: {error}")
    with suppress(BrokenPipeError):
        sys.stdout.write(f"READY {server.listening_address}\n")
        sys.stdout.flush()
        while not stop.wait(_PARENT_CHECK_S):
            if options.parent not in (None, os.getppid()):
                break
    # Not by returning: an engine taken apart in its first moments waits for itself for ever.
    os._exit(0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvplane_cli.embedded_engine", description=__doc__)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="GGUF file")
    add("--host", default="127.0.0.1", help="address to answer on")
    add("--port", type=int, default=0, help="port to answer on; 0 for any free one")
    add("--alias", default="", help="name of the model in the API; otherwise its file's name")
    add("--context", type=int, default=4096, help="tokens of all slots together")
    add("--slots", type=int, default=1, help="requests decoded side by side")
    add("--threads", type=int, default=1, help="CPU threads")
    add("--batch", type=int, default=_BATCH_TOKENS, help="prompt tokens evaluated at a time")
    add("--cache-ram-mb", type=int, default=8192, help="host RAM for prompts that left their slot")
    add("--api-key", default="", help="key that requests must carry")
    add("--parent", type=int, help="process id of its parent, with which it ends")
    return parser


def _start(options: argparse.Namespace) -> Any:
    # Loading it takes a moment and 100 MB: only once the arguments are known to be good.
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(options.model.resolve())
    params.model_alias = {options.alias or options.model.stem}
    params.hostnames = [options.host]
    params.port = options.port
    params.n_ctx = options.context
    params.n_parallel = options.slots
    params.n_batch = params.n_ubatch = options.batch
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
    params.cache_ram_mib = options.cache_ram_mb
    params.endpoint_slots = params.endpoint_props = params.endpoint_metrics = True
    params.ui = False
    params.offline = True
    params.verbosity = 1
    if options.api_key:
        params.api_keys = [options.api_key]
    return xllamacpp.Server(params)


def _stopping() -> threading.Event:
    stop = threading.Event()

    def told(number: int, frame: FrameType | None) -> None:
        del number, frame
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, told)
    return stop


def _fail(message: str) -> int:
    sys.stderr.write(f"embedded engine: {message}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
