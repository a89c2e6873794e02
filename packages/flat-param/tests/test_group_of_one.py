"""What holds on two ranks holds in a group of one, which communicates nothing."""

from __future__ import annotations

import importlib
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

WORKERS = Path(__file__).parent / "workers"
OF_UNITS = sorted(path.stem for path in WORKERS.glob("unit_*.py"))
NOT_HERE = {
    "freed_units_are_gathered_again": "counts gathers",
    "freeing_is_switched_off_and_on": "counts gathers",
    "frozen_segments_have_no_gradient_memory_or_traffic": "counts sums over ranks",
    "lists_change_when_and_not_what_is_gathered": "counts gathers",
    "no_sync_accumulates_and_stays_silent": "counts gathers",
    "units_in_another_order_are_named_on_every_rank": "there is one order",
    "units_listed_and_not_used_are_freed": "counts gathers",
}
"""Claims that are not tried in a group of one, and why."""
OF_ITS_OWN_DTYPE = {
    "peaks_are_as_planned",
    "ranks_come_from_a_mesh_or_a_group",
}
"""Claims that compare bits, bytes or outputs with the plain module's."""


def _text(script: str) -> str:
    return (WORKERS / f"{script}.py").read_text(encoding="utf-8")


def _claims(*scripts: str) -> list[tuple[str, str]]:
    """Every `check_<claim>` of some scripts; files of two ranks say which there have to be."""
    found = re.compile(r"^def check_(\w+)\(", re.MULTILINE).findall
    return [(script, claim) for script in scripts for claim in found(_text(script))]


def _but_for(left_out: Iterable[str], claims: list[tuple[str, str]]) -> list[tuple[str, str]]:
    unknown = set(left_out) - {claim for _, claim in claims}
    assert not unknown, f"{sorted(unknown)} are left out, but no script of workers has them"
    return [each for each in claims if each[1] not in left_out]


CLAIMS = _but_for(NOT_HERE, _claims(*OF_UNITS))
MAKES_THEM = re.compile(r"^from _harness import [^)]*\bsharded\b", re.MULTILINE)
OF_SHARDED = [script for script in OF_UNITS if MAKES_THEM.search(_text(script))]
"""Scripts whose models are the harness's, so that a test can have them compute in another dtype."""


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], ModuleType]]:
    """Give a script of tests/workers as a module, in a process that is the only rank."""
    before, imported = set(sys.modules), list(sys.path)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    sys.path.insert(0, str(WORKERS))

    def load(name: str) -> ModuleType:
        module = importlib.import_module(name)
        if hasattr(module, "FOLDER"):
            module.FOLDER = tmp_path_factory.mktemp(name)
        return module

    yield load
    sys.path[:] = imported
    for name in set(sys.modules) - before:
        if WORKERS in Path(getattr(sys.modules[name], "__file__", None) or "/").parents:
            del sys.modules[name]
    dist.destroy_process_group()


@pytest.mark.parametrize(("script", "claim"), CLAIMS)
def test_claim_holds(worker: Callable[[str], ModuleType], script: str, claim: str) -> None:
    """`check_<claim>` of a worker passes here."""
    getattr(worker(script), f"check_{claim}")(0, 1)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("script", "claim"),
    _but_for(OF_ITS_OWN_DTYPE, [each for each in CLAIMS if each[0] in OF_SHARDED]),
)
def test_claim_holds_where_whole_parameters_are_made(
    worker: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    claim: str,
) -> None:
    """The same where the model computes in float64: its shards are gathered, and freed again."""
    module = worker(script)
    precise = MixedPrecisionPolicy(param_dtype=torch.float64)

    def sharded(*args: Any, **options: Any) -> torch.nn.Module:
        return real(*args, **{"mp_policy": precise, **options})

    real = worker("_harness").sharded
    monkeypatch.setattr(module, "sharded", sharded)
    getattr(module, f"check_{claim}")(0, 1)


def test_cleared_gradients_are_freed(worker: Callable[[str], ModuleType]) -> None:
    """Only `.grad` refers to a gradient."""
    module = worker("unit_memory")
    model = module.sharded()
    module.loss_of(model, *module.batches(1, 1)).backward()
    left = [weakref.ref(param.grad) for param in model.parameters() if param.grad is not None]
    assert any(each() is not None for each in left)
    model.zero_grad()
    assert all(each() is None for each in left)
