"""Build the extension once for each torch and each state of its source, outside the repository.

Builds are in `$SIMDEV_CACHE`, or in the user's cache folder, under a name made of the versions of
torch and Python and a hash of all source. A process that finds a build there uses it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

CSRC = Path(__file__).resolve().parent.parent / "csrc"
NAME = "simdev_C"
FLAGS = ["-O1", "-std=c++20", "-w"]


class BuildError(RuntimeError):
    """The extension cannot be built here."""


def cache() -> Path:
    """Return the folder of all builds."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchparts-simdev"
    return Path(os.environ.get("SIMDEV_CACHE") or default)


def folder() -> Path:
    """Return the folder of the extension for this torch and this source."""
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for path in sorted(CSRC.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    return cache() / f"torch-{torch.__version__}-{python}-{digest.hexdigest()[:16]}"


def missing() -> str | None:
    """Return the missing build tools, or None."""
    if sys.platform != "linux":
        return f"it is written for Linux, not for {sys.platform}"
    wanted = [tool for tool in (os.environ.get("CXX", "g++"), "ninja") if not shutil.which(tool)]
    return f"no {' and no '.join(wanted)} on this machine" if wanted else None


def is_built() -> bool:
    """Whether the extension is built."""
    return (folder() / f"{NAME}.so").exists()


def extension() -> ModuleType:
    """Return the extension. Builds it if necessary, which takes about a minute.

    Raises:
        BuildError: it is not built yet, and a tool for that is missing.
    """
    target = folder()
    if not is_built():
        if reason := missing():
            raise BuildError(f"simdev: the simulated device cannot be built: {reason}.")
        target.parent.mkdir(parents=True, exist_ok=True)
        with _alone(target.parent / "building.lock"):
            if not is_built():
                return _build(target)
    spec = importlib.util.spec_from_file_location(NAME, target / f"{NAME}.so")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _build(target: Path) -> ModuleType:
    from torch.utils import cpp_extension  # slow to import, and seldom needed

    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".building-") as made:
        sources = [str(path) for path in sorted(CSRC.glob("*.cpp"))]
        verbose = bool(os.environ.get("SIMDEV_VERBOSE"))
        module = cpp_extension.load(
            NAME, sources, extra_cflags=FLAGS, build_directory=made, verbose=verbose
        )
        target.mkdir(exist_ok=True)
        os.replace(Path(made) / f"{NAME}.so", target / f"{NAME}.so")
    return module


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Lock the folder for one process; the lock of a killed process is released."""
    import fcntl

    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
