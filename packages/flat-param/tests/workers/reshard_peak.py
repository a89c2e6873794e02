"""Cut checkpoints anew in a process of its own, and report how much memory that took.

Started as `python reshard_peak.py <warm> <source> <ways, descending>`; prints a list of bytes.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import flat_param


def peak_bytes() -> int:
    """The most memory that this process has had; `ru_maxrss` would count its parent's too."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def main(warm: str, source: str, *ways: str) -> None:
    """Cut a small checkpoint for imports and caches, then the other: smallest parts first.

    Code that runs for the first time counts too: the sums of checksums are 0.8 MB of torch's
    library, and run for tensors of 17 KB and more.
    """
    with tempfile.TemporaryDirectory() as folder:
        flat_param.reshard_checkpoint(warm, Path(folder, "warm"), world_size=2)
        before, peaks = peak_bytes(), []
        for world_size in map(int, ways):
            target = Path(folder, str(world_size))
            flat_param.reshard_checkpoint(source, target, world_size=world_size)
            peaks.append(peak_bytes() - before)
    print(json.dumps(peaks))


if __name__ == "__main__":
    main(*sys.argv[1:])
