"""The folder tier: files and folders that can be made or not, and a full disk."""

from __future__ import annotations

import contextlib
import errno
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from ckpt_wrap import OffloadError, OptionError, offload_


class FullFile(contextlib.nullcontext):
    """A file on a disk that has no room."""

    def __init__(self, path, mode, buffering) -> None:
        super().__init__()
        Path(path).touch()

    def __enter__(self):
        return self

    def write(self, data):
        raise OSError(errno.ENOSPC, "No space left on device")


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
    with pytest.raises(OffloadError, match=r"folder '.*file/below' cannot be made"):
        offload_(module, to=tmp_path / "file" / "below", create=True)
    assert type(module) is nn.Tanh


def test_a_folder_that_is_not_there_is_made_only_if_asked(tmp_path):
    """A word mistyped is no folder; two modules that share one, made by one, share all."""
    with pytest.raises(OptionError, match="the folder must exist"):
        offload_(module := nn.Tanh(), to=tmp_path / "cup")
    assert type(module) is nn.Tanh
    assert list(tmp_path.iterdir()) == []
    made = offload_(nn.Tanh(), to=tmp_path / "cup", create=True)
    later = offload_(nn.Tanh(), to=tmp_path / "cup")
    assert (
        vars(made)["_ckpt_wrap"].offload._scheduler is vars(later)["_ckpt_wrap"].offload._scheduler
    )


def test_a_folder_removed_meanwhile_is_made_again(tmp_path):
    """Someone else's cleaning up between steps does not end the training."""
    module = offload_(nn.Tanh(), to=tmp_path / "a", create=True)
    x = torch.randn(64, 64, requires_grad=True)
    module(x).sum().backward()
    shutil.rmtree(tmp_path / "a")
    module(x).sum().backward()
    assert offload_(nn.Tanh(), to=tmp_path / "a", create=True)(x).requires_grad


def test_a_relative_folder_is_where_it_was_when_it_was_given(tmp_path, monkeypatch):
    """Changing the working directory between forward and backward moves no file."""
    monkeypatch.chdir(tmp_path)
    module = offload_(nn.Tanh(), to="relative", create=True)
    loss = module(torch.randn(64, 64, requires_grad=True)).sum()
    monkeypatch.chdir("/")
    loss.backward()
    module(torch.randn(64, 64, requires_grad=True)).sum().backward()
    assert (tmp_path / "relative").is_dir()


def test_a_folder_in_the_home_directory(tmp_path, monkeypatch):
    """`~` is the home directory and not a folder of that name."""
    monkeypatch.setenv("HOME", str(tmp_path))
    offload_(nn.Tanh(), to="~/acts", create=True)
    assert (tmp_path / "acts").is_dir()


@pytest.mark.parametrize("function", ["mkdir", "rename"])
def test_an_interrupt_while_the_folder_is_made_leaves_nothing(tmp_path, monkeypatch, function):
    """Ctrl-C just after the effect: what is there is removed, at the latest at exit."""
    done = getattr(Path, function)

    def interrupted(self, *args, **kwargs):
        done(self, *args, **kwargs)
        if self != tmp_path:
            raise KeyboardInterrupt

    registered = []
    monkeypatch.setattr(Path, function, interrupted)
    monkeypatch.setattr("atexit.register", lambda *call: registered.append(call))
    with pytest.raises(KeyboardInterrupt):
        offload_(nn.Tanh(), to=tmp_path)
    for call, *args in registered:
        call(*args)
    assert list(tmp_path.iterdir()) == []


def test_what_others_keep_in_a_shared_place_is_no_obstacle(tmp_path):
    """A plain file, a link to nowhere, and a folder whose lock may not be opened."""
    (tmp_path / "ckpt_wrap-file").write_text("")
    (tmp_path / "ckpt_wrap-link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "ckpt_wrap-other").mkdir()
    (tmp_path / "ckpt_wrap-other" / "owner.lock").mkdir()  # opening it for writing fails
    before = sorted(tmp_path.iterdir())
    module = offload_(nn.Tanh(), to=tmp_path)
    module(torch.randn(64, 64, requires_grad=True)).sum().backward()
    assert set(before) <= set(tmp_path.iterdir())
