"""`python -m simdev ARGUMENTS...`: run Python with the simulated device, here and in its children.

torch looks for device modules in installed distributions. So a distribution is written next to the
build, and every process with it on its path has the device when it imports torch.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from . import _build

METADATA = "Metadata-Version: 2.1\nName: simdev\nVersion: 0\n"
ENTRY_POINT = "[torch.backends]\nsimdev = simdev:autoload\n"


def main() -> None:
    """Write the distribution, add it to the path, and run Python."""
    site = _build.folder() / "site"
    info = site / "simdev-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text(ENTRY_POINT)
    paths = [str(Path(__file__).resolve().parent.parent), str(site)]
    if given := os.environ.get("PYTHONPATH"):
        paths.append(given)
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])


if __name__ == "__main__":
    main()
