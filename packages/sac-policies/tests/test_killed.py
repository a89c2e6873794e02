"""A process killed in `fit_` or during offload leaves only its checkpoint file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import nn

from sac_policies import MATMULS, checkpoint, fit_, offload

KIND = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def blocks() -> nn.Sequential:
    """Three blocks, which `fit_` finds."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3))
    ).to(KIND)


def batch() -> torch.Tensor:
    """Input rows for the blocks."""
    return torch.linspace(-1, 1, 512 * 16).view(512, 16).to(KIND)


def main(when: str, saved: str) -> None:
    """Train from a checkpoint until the process is killed."""
    model, x = blocks(), batch()
    model.load_state_dict(torch.load(saved))
    steps = count()

    def end(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def loss(out: torch.Tensor) -> torch.Tensor:
        if next(steps) == 3:
            end()
        return out.sum()

    if when == "fit_":
        fit_(model, x, "60%", loss=loss)
        return
    model[1][0].weight.register_post_accumulate_grad_hook(end)
    for block in model:
        x = checkpoint(block, x, policy=offload(MATMULS))
    x.sum().backward()


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
@pytest.mark.parametrize("when", ["fit_", "offload"])
def test_killed_process_leaves_only_its_checkpoint(when: str, tmp_path: Path) -> None:
    """Another process resumes from the file, with the gradients of the plain model."""
    expected = blocks()
    folder = tmp_path / "run"
    folder.mkdir()
    saved = folder / "model.pt"
    torch.save(expected.state_dict(), saved)
    before = saved.read_bytes()
    child = subprocess.run(
        [sys.executable, __file__, when, str(saved)],
        cwd=folder,
        env={
            **os.environ,
            "TMPDIR": str(folder),
            "PYTHONPATH": os.pathsep.join(sys.path),
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),  # torch makes it at import
        },
        capture_output=True,
        timeout=180,
        check=False,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert list(folder.iterdir()) == [saved]
    assert saved.read_bytes() == before
    model = blocks()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(torch.load(saved))
    assert fit_(model, batch(), "80%")
    for each in (expected, model):
        each(batch()).sum().backward()
    pairs = zip(expected.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(one.grad, other.grad) for one, other in pairs)


if __name__ == "__main__":
    main(*sys.argv[1:])
