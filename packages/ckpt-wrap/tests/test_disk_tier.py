"""The folder tier: full disks, missing folders and other processes."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile

import pytest
import torch
from torch import nn

from ckpt_wrap import OffloadError, offload_, offload_stats


def _x():
    return torch.randn(64, 64, requires_grad=True)


def test_full_disk_is_an_error_in_forward(tmp_path, monkeypatch):
    """The message gives a remedy, no file remains, and the module can be used again."""
    module = offload_(nn.Tanh(), to=tmp_path)

    make = tempfile.NamedTemporaryFile

    def write(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    def full(**options):
        file = make(**options)
        file.write = write
        return file

    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "NamedTemporaryFile", full)
        with pytest.raises(OffloadError) as error:
            module(_x())
    assert str(error.value) == (
        f"ckpt_wrap.offload_: folder '{tmp_path}' cannot take 16384 bytes (No space left on "
        "device), but what is saved for backward must go there. Free some space or pass another "
        "folder as 'to'. This was for a tensor saved by module Tanh."
    )
    assert list(tmp_path.iterdir()) == []
    assert offload_stats(module).bytes_away == 0
    module(_x()).sum().backward()


def test_folder_that_cannot_be_written_to_changes_nothing(tmp_path, monkeypatch):
    """`offload_` raises before the module is touched."""
    module = nn.Tanh()

    def denied(**_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", denied)
    with pytest.raises(OffloadError, match=r"cannot be written to \(Permission denied\)"):
        offload_(module, to=tmp_path)
    assert type(module) is nn.Tanh


def test_folder_removed_between_steps_is_an_error_in_forward(tmp_path):
    """Tensors saved before the removal can still be read."""
    folder = tmp_path / "a"
    folder.mkdir()
    module = offload_(nn.Tanh(), to=folder)
    loss = module(x := _x()).sum()
    folder.rmdir()  # it is empty: files have no names
    with pytest.raises(OffloadError, match=r"No such file or directory"):
        module(_x())
    loss.backward()
    torch.testing.assert_close(x.grad, 1 - torch.tanh(x.detach()).square())


def test_relative_folder_and_home_directory(tmp_path, monkeypatch):
    """A relative path is resolved when it is passed; `~` is the home directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "relative").mkdir()
    modules = [offload_(nn.Tanh(), to=to) for to in ("relative", "~/relative")]
    monkeypatch.chdir("/")
    for module in modules:
        module(_x()).sum().backward()
        assert offload_stats(module).copies_in == 1


WORKER = """
import os, signal, sys, torch
from ckpt_wrap import offload_, offload_stats
torch.set_num_threads(1)
module = offload_(torch.nn.Tanh(), to=sys.argv[1])
loss = module(torch.randn(64, 64, requires_grad=True)).sum()
assert offload_stats(module).bytes_away == 64 * 64 * 4
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_folder_is_empty_after_a_killed_process(tmp_path):
    """Files have no names, so a process cannot leave any, however it ends."""
    command = [sys.executable, "-c", WORKER, str(tmp_path)]
    code = subprocess.run(command, capture_output=True, timeout=60, check=False).returncode
    assert code == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("first", ["child", "parent"])
def test_fork_between_forward_and_backward(tmp_path, first):
    """Both processes can read the saved tensors, in either order."""
    x = torch.linspace(-2, 2, 1024, requires_grad=True)
    module = offload_(nn.Tanh(), to=tmp_path)
    loss = module(x).sum()
    (expected,) = torch.autograd.grad(nn.Tanh()(x).sum(), x)

    def backward() -> bool:
        return torch.equal(torch.autograd.grad(loss, x)[0], expected)

    wait, go = os.pipe()
    child = os.fork()
    if child == 0:
        code = 2
        try:
            if first == "parent":
                os.read(wait, 1)
            code = 0 if backward() and module(x).sum().isfinite() else 1
        finally:
            os._exit(code)
    if first == "child":
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert backward()
    os.write(go, b"x")
    os.close(go)
    os.close(wait)
    if first == "parent":
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_offload_to_host_memory_without_accelerator_warns_once(monkeypatch):
    """Offload moves nothing without an accelerator, and warns; gradients are plain."""
    from ckpt_wrap import _offload

    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    _offload._warn_of_no_device.cache_clear()
    with pytest.warns(UserWarning, match="offload to 'cpu' moves nothing. Pass a folder") as said:
        modules = [offload_(nn.Tanh()) for _ in range(3)]
    assert len(said) == 1
    modules[0](_x()).sum().backward()
    assert offload_stats(modules[0]).copies_out == 0
