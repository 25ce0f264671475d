"""Runs a module as a program that ends with the process that started it.

    python -m kvplane_cli.bound PARENT_PID MODULE [ARGUMENT ...]

The kernel's own tie (Linux only) survives the exec below, and a SIGKILL of the parent too.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Tie this process to its parent, then become the module."""
    parent, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # The parent may have died before the tie was made.
        if os.getppid() != int(parent):
            raise SystemExit(1)
    os.execv(sys.executable, [sys.executable, "-m", *command])


if __name__ == "__main__":
    main()
