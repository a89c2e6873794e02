"""Print what is missing to build the simulated device here, or `nothing`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

path = Path(__file__).parent / "simdev" / "_build.py"
spec = importlib.util.spec_from_file_location("_build", path)
assert spec is not None
assert spec.loader is not None
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)
print(build.missing() or "nothing")
