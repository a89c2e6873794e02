"""Folders of several processes: forked, started and killed ones, and what each leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from ckpt_wrap import OffloadError, offload_

WORKER = """
import os, signal, sys, torch
from ckpt_wrap import offload_
torch.set_num_threads(1)
module = offload_(torch.nn.Tanh(), to=sys.argv[1])
loss = module(torch.randn(64, 64, requires_grad=True)).sum()
assert [p for p in os.scandir(sys.argv[1])]
if sys.argv[2] == "raise":
    raise ValueError("on purpose")
if sys.argv[2] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "fork":
    if os.fork() == 0:
        sys.exit(0)
    os.wait()
    loss.backward()
"""


def _run(folder: Path, ending: str) -> int:
    command = [sys.executable, "-c", WORKER, str(folder), ending]
    return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode


@pytest.mark.parametrize(("ending", "code"), [("normal", 0), ("raise", 1), ("fork", 0)])
def test_the_folder_is_empty_after_the_process(tmp_path, ending, code):
    """Normal exit, exception, and a forked child that exits first."""
    assert _run(tmp_path, ending) == code
    assert list(tmp_path.iterdir()) == []


def test_a_killed_process_is_cleaned_up_after_by_the_next(tmp_path):
    """What SIGKILL left is removed at the next start; a living process's folder is not."""
    offload_(nn.Tanh(), to=tmp_path)
    (mine,) = tmp_path.iterdir()
    assert _run(tmp_path, "kill") == -signal.SIGKILL
    assert len(list(tmp_path.glob("ckpt_wrap-*"))) == 2
    assert _run(tmp_path, "normal") == 0
    assert list(tmp_path.iterdir()) == [mine]


TRAINING = """
import os, sys, torch
from torch import nn
from ckpt_wrap import offload_
torch.set_num_threads(1)
folder, how = sys.argv[1:]

def train(module, seed, steps):
    torch.manual_seed(seed)
    for _ in range(steps):
        module(torch.randn(16, 32)).square().sum().backward()
    return [p.grad.clone() for p in module.parameters()]

def run(seed):
    torch.set_num_threads(1)
    expected = train(plain(), seed, 30)
    got = train(offload_(plain(), to=folder, min_bytes=1), seed, 30)
    return all(map(torch.equal, expected, got))

def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())

def child(seed):
    sys.exit(0 if run(seed) else 3)

if __name__ == "__main__":
    loss = offload_(plain(), to=folder, min_bytes=1)(torch.randn(16, 32)).sum()
    mine = set(os.listdir(folder))
    if how == "os.fork":
        children = []
        for seed in range(3):
            pid = os.fork()
            if pid == 0:
                child(seed)
            children.append(pid)
        ok = run(7)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    else:
        from multiprocessing import get_context
        started = [get_context(how).Process(target=child, args=(seed,)) for seed in range(3)]
        for process in started:
            process.start()
        ok = run(7)
        for process in started:
            process.join()
        codes = [process.exitcode for process in started]
    assert set(os.listdir(folder)) == mine, os.listdir(folder)
    loss.backward()
    assert ok and codes == [0, 0, 0], (ok, codes)
"""


@pytest.mark.parametrize("how", ["os.fork", "fork", "spawn"])
def test_processes_made_in_any_way_share_a_folder(tmp_path, how):
    """Parent and children have plain gradients, and each removes its own files only."""
    script, folder = tmp_path / "train.py", tmp_path / "folder"
    script.write_text(TRAINING)
    folder.mkdir()
    command = [sys.executable, str(script), str(folder), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert list(folder.iterdir()) == []


def _in_child(work) -> bool:
    """Whether `work()` is true in a forked child."""
    child = os.fork()
    if child == 0:
        code = 2
        try:
            code = 0 if work() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("first", ["child", "parent"])
def test_a_fork_between_forward_and_backward(tmp_path, first):
    """A child reads what its parent stored, or is told that it is gone; the parent has it."""
    x = torch.linspace(-2, 2, 1024, requires_grad=True)
    loss = offload_(nn.Tanh(), to=tmp_path)(x).sum()
    (expected,) = torch.autograd.grad(nn.Tanh()(x).sum(), x)

    def backward() -> bool:
        return torch.equal(torch.autograd.grad(loss, x)[0], expected)

    def refused() -> bool:
        with pytest.raises(OffloadError, match="cannot be read back"):
            torch.autograd.grad(loss, x)
        return True

    if first == "child":
        assert _in_child(backward)
        assert backward()
    else:
        wait, go = os.pipe()
        child = os.fork()
        if child == 0:
            code = 2
            try:
                os.read(wait, 1)
                code = 0 if refused() else 1
            finally:
                os._exit(code)
        assert backward()
        os.write(go, b"x")
        os.close(go)
        os.close(wait)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
