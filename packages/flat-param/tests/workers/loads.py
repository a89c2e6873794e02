"""Loads that fail on one rank, or during a save; one check per claim. Rank 2 is alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _harness import batches, loss_of, main, run_checks, sharded, share
from torch import nn

import flat_param

FOLDER = Path()


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """This rank's parameters, buffers, moments and options."""
    params = [p.detach().clone() for p in model.parameters()]
    buffers = [b.clone() for b in model.buffers()]
    states = [optimizer.state.get(p, {}) for p in model.parameters()]
    moments = [state[key].clone() for state in states for key in sorted(state)]
    options = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return [params + buffers + moments, options]


def same(first: list[Any], second: list[Any]) -> bool:
    """Bit for bit."""
    return first[1] == second[1] and all(
        torch.equal(a, b) for a, b in zip(first[0], second[0], strict=True)
    )


def trained(seed: int, lr: float, group: Any, rank: int) -> tuple[nn.Module, torch.optim.AdamW]:
    """A model of ranks 0 and 1, or of rank 2."""
    model = sharded(seed=seed, process_group=group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    loss_of(model, share(batches(3)[0], rank)).backward()
    optimizer.step()
    return model, optimizer


def check_refusal_on_one_rank_is_one_on_all(rank: int, world: int) -> None:
    """Damage that only one rank reads: both refuse, and keep all they had."""
    group = GROUPS[rank == 2]
    saved, target = trained(0, 0.1, group, rank), trained(9, 0.5, group, rank)
    path = FOLDER / f"one-{rank == 2}"
    flat_param.save_sharded(saved[0], path, optimizer=saved[1])
    before = bits(*target)
    dist.barrier()
    data = next(path.glob("*-rank-1-*/__0_0.distcp"), None)
    if rank == 0:
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(bytes(content))
    dist.barrier()
    if rank < 2:
        with pytest.raises(flat_param.CheckpointError, match="has the checksum") as raised:
            flat_param.load_sharded(target[0], path, optimizer=target[1])
        text = str(raised.value)
        assert ("rank 1 cannot load" in text or "rank 0 cannot load" in text) or "was saved" in text
    assert same(bits(*target), before)
    dist.barrier()


class Stubborn(torch.optim.AdamW):
    """Fails on one rank, after it has taken the state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Fail."""
        super().load_state_dict(state_dict)
        if dist.get_rank() == 1:
            raise KeyError("stubborn")


def check_failing_optimizer_takes_the_model_back(rank: int, world: int) -> None:
    """The last thing that can fail: parameters, buffers, moments and options are put back."""
    group = GROUPS[rank == 2]
    model, optimizer = trained(0, 0.1, group, rank)
    path = FOLDER / f"stubborn-{rank == 2}"
    flat_param.save_sharded(model, path, optimizer=optimizer)
    other = sharded(seed=9, process_group=group)
    stubborn = Stubborn(other.parameters(), lr=0.5)
    before = bits(other, stubborn)
    if rank < 2:
        said = r"KeyError: 'stubborn'"
        with pytest.raises(flat_param.CheckpointError, match=said):
            flat_param.load_sharded(other, path, optimizer=stubborn)
    assert same(bits(other, stubborn), before)
    assert not stubborn.state
    dist.barrier()


def check_reader_during_saves_sees_one_of_them(rank: int, world: int) -> None:
    """Ranks 0 and 1 save again and again, rank 2 loads: one step, or a word of the save."""
    model, path = sharded(process_group=GROUPS[rank == 2]), FOLDER / "read"
    seen, last = set(), 30
    for step in range(last) if rank < 2 else ():
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(float(step))
        assert flat_param.save_sharded(model, path)
    while rank == 2 and last - 1 not in seen:
        try:
            flat_param.load_sharded(model, path)
        except flat_param.CheckpointError as error:
            text = str(error)
            assert "is under way" in text or "has no .metadata" in text, text
            continue
        found = torch.cat([p.detach().flatten() for p in model.parameters()]).unique()
        assert found.numel() == 1, found
        seen.add(int(found))
    assert rank < 2 or len(seen) > 1
    dist.barrier()


class Extra(nn.Linear):
    """Has state that is neither parameter nor buffer."""

    seen = 0

    def get_extra_state(self) -> dict[str, int]:
        """It."""
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Take it."""
        self.seen = state["seen"]


def check_extra_state_comes_back(rank: int, world: int) -> None:
    """What `get_extra_state` gave is set again."""
    model, path = Extra(4, 4), FOLDER / f"extra-{rank == 2}"
    flat_param.fully_shard(model, process_group=GROUPS[rank == 2])
    model.seen = 7
    flat_param.save_sharded(model, path)
    model.seen = 0
    flat_param.load_sharded(model, path)
    assert model.seen == 7


def check_training_goes_on_as_if_nothing_had_been(rank: int, world: int) -> None:
    """With moments and steps loaded, the next step is bit for bit the one without the pause."""
    group = GROUPS[rank == 2]
    first, second = trained(0, 0.1, group, rank), trained(9, 0.5, group, rank)
    path = FOLDER / f"goes-on-{rank == 2}"
    flat_param.save_sharded(first[0], path, optimizer=first[1])
    flat_param.load_sharded(second[0], path, optimizer=second[1])
    for model, optimizer in (first, second):
        optimizer.zero_grad()
        loss_of(model, share(batches(3)[1], rank)).backward()
        optimizer.step()
    assert same(bits(*first), bits(*second))


def check_groups_are_matched_by_name(rank: int, world: int) -> None:
    """Both ways of loading: each group has the options that its parameters were saved with."""
    path = FOLDER / f"groups-{rank == 2}"

    def built(order: tuple[str, str], lr: float) -> tuple[nn.Module, torch.optim.AdamW]:
        model = nn.Linear(4, 4)
        flat_param.fully_shard(model, process_group=GROUPS[rank == 2])
        options = {"weight": {"lr": lr, "weight_decay": 0.1}, "bias": {"lr": lr / 10}}
        groups = [{"params": [getattr(model, name)], **options[name]} for name in order]
        return model, torch.optim.AdamW(groups, weight_decay=0.0)

    model, optimizer = built(("weight", "bias"), 0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    flat_param.save_sharded(model, path, optimizer=optimizer)
    whole = flat_param.full_state_dict(model, optimizer=optimizer)
    for load in (
        lambda other, own: flat_param.load_sharded(other, path, optimizer=own),
        lambda other, own: flat_param.load_full_state_dict(other, whole, optimizer=own),
    ):
        other, own = built(("bias", "weight"), 0.5)
        load(other, own)
        assert [(g["lr"], g["weight_decay"]) for g in own.param_groups] == [(0.01, 0), (0.1, 0.1)]
        for name in ("weight", "bias"):
            mine, saved = own.state[getattr(other, name)], optimizer.state[getattr(model, name)]
            assert torch.equal(mine["exp_avg"], saved["exp_avg"])


def check_state_of_another_rank_is_refused(rank: int, world: int) -> None:
    """Pieces have one shape on both ranks; this rank's own state is loaded as ever."""
    group = GROUPS[rank == 2]
    path = FOLDER / f"own-{rank}.pt"
    model, optimizer = trained(0, 0.1, group, rank)
    torch.save(optimizer.state_dict(), path)
    dist.barrier()
    fresh = torch.optim.AdamW(model.parameters(), lr=0.5)
    before = bits(model, fresh)
    if rank < 2:
        other = torch.load(FOLDER / f"own-{1 - rank}.pt", weights_only=True)
        with pytest.raises(flat_param.StateError, match=r"is of .*, but this rank has .*Nothing"):
            fresh.load_state_dict(other)
        assert same(bits(model, fresh), before)
        plain = torch.optim.AdamW([nn.Parameter(torch.ones(4))], lr=0.5)
        one = {**other, "param_groups": [{**other["param_groups"][0], "params": [0]}]}
        with pytest.raises(flat_param.StateError, match="this rank has elements 0 to 4 of"):
            plain.load_state_dict(one)
    fresh.load_state_dict(torch.load(path, weights_only=True))
    assert same(bits(model, fresh), bits(model, optimizer))


GROUPS: list[Any] = []


def run(rank: int, world: int, folder: str) -> dict[str, str]:
    """All checks."""
    global FOLDER
    FOLDER = Path(folder)
    GROUPS.extend([dist.new_group([0, 1]), dist.new_group([2])])
    return run_checks(globals(), rank, world)


if __name__ == "__main__":
    main(run)
