"""`python -m torchparts_conformance` and the `torchparts-conformance` command.

A command that judges starts again in a process that finds only the judge, so that nothing that
Python imports by itself is there when a verdict is given; see `_isolation`.
"""

from __future__ import annotations

import os
import subprocess
import sys

from torchparts_conformance.subject import _isolation

_JUDGING = ("run", "verify")


def main() -> int:
    """Run a command, where it judges in a process that finds nothing else; gives its exit code."""
    if sys.argv[1:2] and sys.argv[1] in _JUDGING and not _isolation.is_isolated():
        return _start_again(_isolation.command("torchparts_conformance.__main__", *sys.argv[1:]))
    from torchparts_conformance.commands._cli import main as run_command

    return run_command()


def _start_again(command: list[str]) -> int:
    if sys.platform != "win32":
        os.execv(command[0], command)
    return subprocess.call(command)


if __name__ == "__main__":
    sys.exit(main())
