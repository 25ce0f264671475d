"""Compile protos/ into gen/ before a wheel is built, editable ones included."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


def compile_protos(root: Path) -> None:
    """Write the Python for every .proto under `root`/protos to `root`/gen."""
    out = root / "gen"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    plugins = os.environ["PATH"] + os.pathsep + str(Path(sys.executable).parent)
    subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc", "-Iprotos"),
            *(f"--python_out={out}", f"--mypy_out=quiet:{out}"),
            *(f"--grpc_python_out={out}", f"--mypy_grpc_out=quiet,only_async:{out}"),
            *(str(path.relative_to(root)) for path in sorted(root.glob("protos/**/*.proto"))),
        ],
        cwd=root,
        env={**os.environ, "PATH": plugins},
        check=True,
    )


class ProtoBuildHook(BuildHookInterface[Any]):
    """Runs the compiler for both kinds of wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the files of the wheel are collected."""
        del version, build_data
        compile_protos(Path(self.root))


if __name__ == "__main__":
    compile_protos(Path(__file__).parent)
