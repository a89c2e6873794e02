"""The folder tier: files, their removal in every way a process can end, and a full disk."""

from __future__ import annotations

import contextlib
import errno
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from ckpt_wrap import OffloadError, by_class, make_plan, offload_
from ckpt_wrap._disk_tier import DiskTier, remove_abandoned

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


class FullFile(contextlib.nullcontext):
    """A file on a disk that has no room."""

    def __init__(self, path, mode, buffering) -> None:
        super().__init__()
        Path(path).touch()

    def __enter__(self):
        return self

    def write(self, data):
        raise OSError(errno.ENOSPC, "No space left on device")


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
    mine = DiskTier(tmp_path).folder
    assert _run(tmp_path, "kill") == -signal.SIGKILL
    assert len(list(tmp_path.glob("ckpt_wrap-*"))) == 2
    assert _run(tmp_path, "normal") == 0
    assert list(tmp_path.iterdir()) == [mine]


def test_bytes_come_back_and_the_file_goes(tmp_path):
    """A stored tensor reads back; writing to what was read changes no file."""
    source = torch.arange(100, dtype=torch.uint8)
    stored = DiskTier(tmp_path).store(source)
    first = stored.fetch()
    first.add_(1)
    assert torch.equal(stored.fetch(), source)
    stored.discard()
    assert not list(tmp_path.glob("*/*.bin"))
    assert torch.equal(first, source + 1)


def test_a_full_disk_is_an_error_in_forward_that_says_what_to_do(tmp_path, monkeypatch):
    """The model can be used again, and no file is left."""
    module = offload_(nn.Tanh(), to=tmp_path)
    x = torch.randn(64, 64, requires_grad=True)

    with monkeypatch.context() as patch:
        patch.setattr("ckpt_wrap._disk_tier.open", FullFile, raising=False)
        with pytest.raises(OffloadError) as error:
            module(x)
    assert str(error.value) == (
        f"ckpt_wrap.offload_: folder '{tmp_path}' cannot take 16384 bytes (No space left on "
        "device), but what is saved for backward must go there. Free some space or pass another "
        "folder as 'to'. This was for a tensor saved by module Tanh."
    )
    assert not list(tmp_path.glob("*/*.bin"))
    module(x).sum().backward()


def test_a_folder_that_cannot_be_made_is_an_error_that_changes_nothing(tmp_path):
    """`offload_` raises before the module is touched."""
    (tmp_path / "file").write_text("")
    module = nn.Tanh()
    with pytest.raises(OffloadError, match=r"folder '.*file/below' cannot take 0 bytes"):
        offload_(module, to=tmp_path / "file" / "below")
    assert type(module) is nn.Tanh


def test_a_folder_removed_meanwhile_is_made_again(tmp_path):
    """Someone else's cleaning up between steps does not end the training."""
    module = offload_(nn.Tanh(), to=tmp_path / "a")
    x = torch.randn(64, 64, requires_grad=True)
    module(x).sum().backward()
    shutil.rmtree(tmp_path / "a")
    module(x).sum().backward()
    assert offload_(nn.Tanh(), to=tmp_path / "a")(x).requires_grad


def test_a_relative_folder_is_where_it_was_when_it_was_given(tmp_path, monkeypatch):
    """Changing the working directory between forward and backward moves no file."""
    monkeypatch.chdir(tmp_path)
    module = offload_(nn.Tanh(), to="relative")
    loss = module(torch.randn(64, 64, requires_grad=True)).sum()
    monkeypatch.chdir("/")
    loss.backward()
    module(torch.randn(64, 64, requires_grad=True)).sum().backward()
    assert (tmp_path / "relative").is_dir()


def test_a_folder_in_the_home_directory(tmp_path, monkeypatch):
    """`~` is the home directory and not a folder of that name."""
    monkeypatch.setenv("HOME", str(tmp_path))
    offload_(nn.Tanh(), to="~/acts")
    assert (tmp_path / "acts").is_dir()


def test_an_unwritable_folder_is_an_error_that_changes_nothing(tmp_path, monkeypatch):
    """`offload_` raises before the module is touched."""

    def deny(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    module = nn.Tanh()
    monkeypatch.setattr("ckpt_wrap._disk_tier.tempfile.mkdtemp", deny)
    with pytest.raises(OffloadError) as error:
        offload_(module, to=tmp_path)
    assert str(error.value) == (
        f"ckpt_wrap.offload_: folder '{tmp_path}' cannot take 0 bytes (Permission denied), but "
        "what is saved for backward must go there. Free some space or pass another folder as 'to'."
    )
    assert type(module) is nn.Tanh


def test_a_folder_made_unwritable_meanwhile_is_an_error_of_forward(tmp_path, monkeypatch):
    """The module is named, and works again once the folder can be written to."""

    def deny(path, mode, buffering):
        raise PermissionError(errno.EACCES, "Permission denied")

    model = nn.Sequential(nn.Tanh())
    make_plan(model, by_class(nn.Tanh), action="offload", to=tmp_path).apply(model)
    x = torch.randn(64, 64, requires_grad=True)
    with monkeypatch.context() as patch:
        patch.setattr("ckpt_wrap._disk_tier.open", deny, raising=False)
        with pytest.raises(OffloadError) as error:
            model(x)
    assert str(error.value) == (
        f"ckpt_wrap.offload_: folder '{tmp_path}' cannot take 16384 bytes (Permission denied), but "
        "what is saved for backward must go there. Free some space or pass another folder as "
        "'to'. This was for a tensor saved by module '0' (Tanh)."
    )
    model(x).sum().backward()


def test_folders_without_a_lock_file_are_left_alone(tmp_path):
    """Only what this package made, completely, is ever removed."""
    (tmp_path / "ckpt_wrap-mine").mkdir()
    (tmp_path / "ckpt_wrap-mine" / "precious").write_text("")
    remove_abandoned(tmp_path)
    assert (tmp_path / "ckpt_wrap-mine" / "precious").exists()
