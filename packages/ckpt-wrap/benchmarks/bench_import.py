"""What does importing the package cost over importing torch?"""

from __future__ import annotations

import statistics
import subprocess
import sys

CODE = (
    "import gc, sys, time, torch; before = len(sys.modules); gc.disable()\n"
    "start = time.thread_time(); import ckpt_wrap; took = time.thread_time() - start\n"
    "print(took * 1e3, len(sys.modules) - before, 'torch.distributed.fsdp' in sys.modules)"
)


def test_import(benchmark, capsys):
    """To be under 50 ms, and without torch.distributed.fsdp."""
    runs = benchmark.pedantic(lambda: [_run() for _ in range(3)], rounds=1)
    took = statistics.median(run[0] for run in runs)
    with capsys.disabled():
        print(f"\nimport ckpt_wrap: {took:.1f} ms (must 50), {runs[0][1]} modules more than torch")
    assert runs[0][2] == "False"


def _run() -> tuple[float, int, str]:
    output = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=True, timeout=60
    ).stdout.split()
    return float(output[0]), int(output[1]), output[2]
