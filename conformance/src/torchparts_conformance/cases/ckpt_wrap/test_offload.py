"""Offload to a folder, which works the same on every device."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from torchparts_conformance import requirement


class Feed(nn.Module):
    """A feed-forward block with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 64)
        self.down = nn.Linear(64, 16)

    def forward(self, x):
        """Run."""
        return x + nn.functional.dropout(self.down(torch.tanh(self.up(x))), 0.5)


class Reuse(nn.Module):
    """Saves its input several times and one other tensor."""

    def forward(self, x):
        """Run."""
        return torch.sin(x) + torch.cos(x) + torch.tanh(x)


def leaf(device, *shape):
    """A random leaf that requires grad."""
    return torch.randn(*shape, device=device, requires_grad=True)


def files(folder):
    """The files that hold tensors."""
    return list(folder.glob("*/*.bin"))


@requirement(
    "CW-070",
    level="MUST",
    text="Offload to a folder MUST give the plain gradients and leave no file after backward.",
    rationale="no other implementation offers it; measured benefit in the package's documentation",
    since="0.1.0",
    profile="offload",
)
def test_plain_gradients_and_no_files_left(part, device, tmp_path):
    """Four blocks, two steps."""
    plain = nn.Sequential(*[Feed() for _ in range(4)]).to(device)
    moved = copy.deepcopy(plain)
    for block in moved:
        part.offload_(block, to=tmp_path)
    x = leaf(device, 32, 16)
    for _ in range(2):
        grads = []
        for model in (plain, moved):
            torch.manual_seed(0)
            model.zero_grad()
            model(x).sum().backward()
            grads.append([p.grad.clone() for p in model.parameters()])
        assert all(map(torch.equal, *grads))
    assert part.offload_stats(moved).copies_out > 0
    assert not files(tmp_path)


@requirement(
    "CW-071",
    level="MUST",
    text=(
        "Each storage MUST leave once, parameters and buffers never, and the statistics MUST be"
        " exact to the byte."
    ),
    rationale="no other implementation offers it; measured benefit in the package's documentation",
    since="0.1.0",
    profile="offload",
)
def test_statistics_are_exact(part, device, tmp_path):
    """Two storages of 1024 bytes; and of a linear layer, its input only."""
    module = part.offload_(Reuse(), to=tmp_path, min_bytes=1)
    loss = module(leaf(device, 16, 16)).sum()
    stats = part.offload_stats(module)
    assert (stats.copies_out, stats.bytes_out, stats.bytes_away) == (2, 2048, 2048)
    loss.backward()
    stats = part.offload_stats(module)
    assert (stats.copies_in, stats.bytes_in, stats.bytes_away) == (2, 2048, 0)
    linear = part.offload_(nn.Linear(16, 16, device=device), to=tmp_path, min_bytes=1)
    linear(leaf(device, 4, 16)).sum().backward()
    assert part.offload_stats(linear).bytes_out == 4 * 16 * 4


@requirement(
    "CW-072",
    level="MUST",
    text="Checkpoint and offload in either order MUST move the same: the inputs.",
    rationale="no other implementation offers it; measured benefit in the package's documentation",
    since="0.1.0",
    profile="offload",
)
def test_either_order_moves_the_inputs(part, device, tmp_path):
    """One copy of the input's bytes."""
    for change in (
        lambda m: part.offload_(part.checkpoint_(m), to=tmp_path),
        lambda m: part.checkpoint_(part.offload_(m, to=tmp_path)),
    ):
        module = change(Feed().to(device))
        module(leaf(device, 32, 16)).sum().backward()
        stats = part.offload_stats(module)
        assert (stats.copies_out, stats.bytes_out) == (1, 32 * 16 * 4)


@requirement(
    "CW-073",
    level="MUST",
    text="`keep_last` MUST keep the tensors of that many latest calls.",
    rationale="no other implementation offers it; measured benefit in the package's documentation",
    since="0.1.0",
    profile="offload",
)
def test_keep_last(part, device, tmp_path):
    """Of four blocks one is left to move."""
    model = nn.Sequential(*[Feed() for _ in range(4)]).to(device)
    for block in model:
        part.checkpoint_(part.offload_(block, to=tmp_path, keep_last=3))
    model(leaf(device, 32, 16)).sum().backward()
    assert part.offload_stats(model).copies_out == 1


@requirement(
    "CW-074",
    level="MUST",
    text="Files MUST be gone when the graph is dropped without backward.",
    rationale="no other implementation offers it; measured benefit in the package's documentation",
    since="0.1.0",
    profile="offload",
)
def test_a_dropped_graph_leaves_no_file(part, device, tmp_path):
    """Files exist after forward and not after the result is gone."""
    module = part.offload_(Feed().to(device), to=tmp_path)
    result = module(leaf(device, 32, 16))
    assert files(tmp_path)
    del result
    assert not files(tmp_path)


@requirement(
    "CW-075",
    level="MUST",
    text="A kept tensor changed in place before backward MUST raise and name the module.",
    rationale="no other implementation offers it; measured benefit in the package's documentation",
    since="0.1.0",
    profile="offload",
)
def test_a_kept_tensor_changed_in_place(part, device, tmp_path):
    """The error names the module's class."""
    module = part.offload_(Reuse(), to=tmp_path, min_bytes=10**9)
    x = leaf(device, 4, 4) * 1
    loss = module(x).sum()
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="Reuse"):
        loss.backward()


@requirement(
    "CW-076",
    level="MUST",
    text="A file that is gone before backward MUST raise and name the module.",
    rationale="no other implementation offers it; measured benefit in the package's documentation",
    since="0.1.0",
    profile="offload",
)
def test_a_file_that_is_gone(part, device, tmp_path):
    """The error names the module's class, and the next step works."""
    module = part.offload_(Reuse(), to=tmp_path, min_bytes=1)
    loss = module(leaf(device, 16, 16)).sum()
    for file in files(tmp_path):
        file.unlink()
    with pytest.raises(RuntimeError, match="Reuse"):
        loss.backward()
    module(leaf(device, 16, 16)).sum().backward()


def in_child(work) -> bool:
    """Whether `work()` is true in a forked process, which ends without cleaning up."""
    child = os.fork()
    if child == 0:
        code = 2
        try:
            code = 0 if work() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@requirement(
    "CW-098",
    level="MUST",
    text=(
        "Forked processes that offload to one folder MUST have the plain gradients, and MUST "
        "leave each other's files alone."
    ),
    rationale="names must be unique across processes however they are made",
    since="0.1.0",
    profile="offload",
    devices=("cpu",),
)
def test_forked_processes_share_a_folder(part, device, tmp_path):
    """A child trains while its parent's files are there; then the parent goes on."""
    plain = Feed().to(device)
    moved = part.offload_(copy.deepcopy(plain), to=tmp_path, min_bytes=1)
    x = leaf(device, 32, 16)

    def result(module):
        torch.manual_seed(0)
        return module(x).square().sum()

    def right() -> bool:
        wanted = torch.autograd.grad(result(plain), plain.up.weight)
        return torch.equal(wanted[0], torch.autograd.grad(result(moved), moved.up.weight)[0])

    assert right()
    loss = result(moved)
    before = {file: file.read_bytes() for file in files(tmp_path)}
    assert before
    assert in_child(right)
    assert {file: file.read_bytes() for file in before} == before
    got = torch.autograd.grad(loss, moved.up.weight)
    assert torch.equal(torch.autograd.grad(result(plain), plain.up.weight)[0], got[0])
    assert right()


@requirement(
    "CW-099",
    level="MUST",
    text="A folder that does not exist MUST be refused unless the call asks for it to be made.",
    rationale="a mistyped word becomes a folder on the wrong disk",
    since="0.1.0",
    profile="offload",
)
def test_a_folder_that_is_not_there_is_refused(part, device, tmp_path):
    """Nothing is made or changed; asked for, it is made."""
    folder = Path(tmp_path) / "cup"
    with pytest.raises(ValueError, match="cup"):
        part.offload_(nn.Linear(4, 4, device=device), to=folder)
    assert not folder.exists()
    part.offload_(nn.Linear(4, 4, device=device), to=folder, create=True)
    assert folder.is_dir()


@requirement(
    "CW-109",
    level="MUST",
    text=(
        "Folders that tensors are offloaded to MUST NOT each keep a file open between forward "
        "and backward."
    ),
    rationale="248 folders were too many for the usual limit of 256 open files",
    since="0.1.0",
    profile="offload",
)
def test_many_folders_take_few_descriptors(part, device, tmp_path):
    """Twenty modules with a folder each, all with tensors in it."""
    folders = [Path(tmp_path) / str(number) for number in range(20)]
    layers = nn.Sequential(*[Reuse() for _ in folders])
    for layer, folder in zip(layers, folders, strict=True):
        folder.mkdir()
        part.offload_(layer, to=folder, min_bytes=1)
    x = leaf(device, 32, 16)
    layers[0](x).sum().backward()  # what is opened once and stays is not a folder's
    before = len(os.listdir("/dev/fd"))
    loss = layers(x).sum()
    assert all(map(files, folders))
    assert len(os.listdir("/dev/fd")) - before < len(folders) // 2
    loss.backward()
