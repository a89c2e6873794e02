"""Offload within a limit, and copies that nobody asked for in time; to a folder on every device."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn

from torchparts_conformance import requirement
from torchparts_conformance.cases._devices import (
    lag,
    races_are_read,  # noqa: F401
    synchronize,
)

ROWS, FEATURES = 32, 64
SAVED_BYTES = 2 * ROWS * FEATURES * 4  # of a block


class Block(nn.Module):
    """Saves two results, each of ROWS * FEATURES numbers, and a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, FEATURES)

    def forward(self, x):
        """Run."""
        return torch.sigmoid(self.up(torch.tanh(x)))


def places(device, tmp_path):
    """Where to offload to: a folder, and the memory of the host where tensors are not in it."""
    folders = tmp_path / "limits"
    folders.mkdir(exist_ok=True)
    return [{"to": folders}, *([{}] if device != "cpu" else [])]


def blocks(count, device):
    """A chain of them."""
    return nn.Sequential(*[Block() for _ in range(count)]).to(device)


def given(device, scale=1.0):
    """An input whose gradient is wanted."""
    x = torch.linspace(-scale, scale, ROWS * FEATURES).view(ROWS, FEATURES)
    return x.to(device).requires_grad_()


def gradients(device, model, x):
    """On the host, after all is done."""
    synchronize(device)
    return [t.grad.cpu() for t in (x, *model.parameters())]


@requirement(
    "CW-117",
    level="MUST",
    text=(
        "With `max_bytes_away` the bytes that offload has elsewhere MUST NOT exceed it at any "
        "time, over all modules with the same options and all threads; what would pass it MUST "
        "stay where it is and be counted as `kept`, gradients MUST be those of the plain model,"
        " bitwise, and there MUST be room again after backward."
    ),
    rationale="pinned memory that runs out ends the process, or the machine",
    since="0.1.0",
    profile="offload",
)
@pytest.mark.parametrize("room", [0, 1, 5, 8], ids=lambda room: f"{room}-results")
def test_what_is_away_keeps_to_its_limit(part, device, tmp_path, room):
    """Room for some of the eight results of four blocks, in each of two steps."""
    limit = room * SAVED_BYTES // 2 + 4  # a few bytes more hold no further one
    plain, x = blocks(4, device), given(device)
    plain(x).square().sum().backward()
    expected = gradients(device, plain, x)
    for place in places(device, tmp_path):
        model = copy.deepcopy(plain)
        for block in model:
            part.offload_(block, min_bytes=1, max_bytes_away=limit, **place)
        lag(device)
        for _ in range(2):
            model.zero_grad()
            x = given(device)
            before = part.offload_stats(model)
            loss = model(x).square().sum()
            inside = part.offload_stats(model)
            assert inside.bytes_away == room * SAVED_BYTES // 2
            assert inside.copies_out - before.copies_out == room
            assert inside.kept - before.kept >= 8 - room
            loss.backward()
            del loss
            assert all(map(torch.equal, expected, gradients(device, model, x)))
            assert part.offload_stats(model).bytes_away == 0
        assert max(part.offload_stats(block).peak_bytes_away for block in model) <= limit


@requirement("CW-117")
def test_threads_keep_to_one_limit(part, device, tmp_path):
    """Models of several threads, none of which has the limit for itself."""
    limit, count = 5 * SAVED_BYTES // 2, 4
    for place in places(device, tmp_path):
        models, losses = [blocks(2, device) for _ in range(count)], {}
        for model in models:
            for block in model:
                part.offload_(block, min_bytes=1, max_bytes_away=limit, **place)
        meet = threading.Barrier(count, timeout=60)

        def run(number, models=models, losses=losses, meet=meet):
            meet.wait()
            losses[number] = models[number](given(device)).sum()

        threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(losses) == count
        assert sum(part.offload_stats(model).bytes_away for model in models) == limit
        losses.clear()
        assert sum(part.offload_stats(model).bytes_away for model in models) == 0


@requirement(
    "CW-118",
    level="MUST",
    text=(
        "`offload_stats(...).late` MUST count the storages that nobody had asked for before "
        "backward read them, and no others: in a chain of modules those of the last call, and "
        "none where that call is kept."
    ),
    rationale=(
        "backward stands still for a copy that begins where its value is read, and nothing else"
        " tells"
    ),
    since="0.1.0",
    profile="offload",
)
@pytest.mark.parametrize("keep_last", [0, 1])
def test_copies_that_backward_waits_for_are_counted(part, device, tmp_path, keep_last):
    """Of three blocks those of the last; where it keeps what it saves, none."""
    lag(device)
    for place in places(device, tmp_path):
        model = blocks(3, device)
        for block in model:
            part.offload_(block, min_bytes=1, keep_last=keep_last, **place)
        loss = model(given(device)).sum()
        synchronize(device)
        with torch.no_grad():  # saves nothing; what is copied is let go of
            model(given(device))
        loss.backward()
        stats = [part.offload_stats(block) for block in model]
        assert [each.late for each in stats[:2]] == [0, 0]
        assert stats[2].late == stats[2].copies_in == (0 if keep_last else 2)
        assert [each.copies_in for each in stats[:2]] == [2, 2]
        assert part.offload_stats(model).late == stats[2].late
