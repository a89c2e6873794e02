"""mod-tracker around and inside training loops of other libraries."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from _cases import case_of
from _checks import assert_same, tensors_of, twins
from _models import Case, need
from _trainers import TRAINERS, by_lightning, by_transformers
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ckpt_wrap import checkpoint_
from mod_tracker import (
    FlopReport,
    ModTracker,
    ReportSchedule,
    lightning_callback,
    profile_flops,
    profile_memory,
    profile_time,
    trace,
    transformers_callback,
)

REPORTS = {
    "tracker": ModTracker,
    "flops": profile_flops,
    "time": profile_time,
    "memory": profile_memory,
    "trace": trace,
}
LANGUAGE = ["Llama", "GPT-2"]


def run(trainer: str, case: Case, folder: Path, report: str) -> None:
    """Train inside and outside of a report; weights are the same."""
    model, plain = twins(case)
    with REPORTS[report]() as found:
        TRAINERS[trainer](model, folder / "ours")
    TRAINERS[trainer](plain, folder / "plain")
    assert_same(tensors_of(model.state_dict()), tensors_of(plain.state_dict()))
    if report == "tracker":
        assert found.phase == "outside"
    else:
        assert found.total > 0
        assert found.to_json()


@pytest.mark.parametrize("report", list(REPORTS))
@pytest.mark.parametrize("name", LANGUAGE)
def test_around_the_trainer_of_transformers(name: str, report: str, tmp_path: Path) -> None:
    """`with report(): trainer.train()` changes no weight."""
    run("transformers", case_of(name), tmp_path, report)


@pytest.mark.parametrize("report", list(REPORTS))
@pytest.mark.parametrize("name", LANGUAGE)
def test_around_a_loop_of_accelerate(name: str, report: str, tmp_path: Path) -> None:
    """`with report():` around a loop with accumulation changes no weight."""
    run("accelerate", case_of(name), tmp_path, report)


@pytest.mark.parametrize("report", list(REPORTS))
@pytest.mark.parametrize("name", LANGUAGE)
def test_around_the_trainer_of_lightning(name: str, report: str, tmp_path: Path) -> None:
    """`with report(): trainer.fit(...)` changes no weight."""
    run("lightning", case_of(name), tmp_path, report)


@pytest.mark.parametrize("trainer", list(TRAINERS))
@pytest.mark.parametrize("checkpointed", [False, True])
def test_flops_of_a_training_run(trainer: str, checkpointed: bool, tmp_path: Path) -> None:
    """The total of a whole run equals `FlopCounterMode`'s, with and without recomputation."""
    case = case_of("Llama")
    pair = twins(case)
    if checkpointed:
        for model in pair:
            for block in case.blocks_of(model).values():
                checkpoint_(block)
    with profile_flops() as report:
        TRAINERS[trainer](pair[0], tmp_path / "ours")
    with FlopCounterMode(display=False) as counter:
        TRAINERS[trainer](pair[1], tmp_path / "torch")
    assert report.total == counter.get_total_flops() > 0
    assert (report.sum("self_recompute") > 0) == checkpointed


def measured_steps(loop: Any, callback: Any, folder: Path, **settings: Any) -> None:
    """Measure the second of two steps of two batches each: half the FLOPs, the same weights."""
    model, plain = twins(case_of("Llama"))
    found: dict[int, FlopReport] = {}
    schedule = ReportSchedule(
        profile_flops,
        every_n_steps=2,
        on_report=lambda report, step: found.update({step: report}),
        skip_first=1,
    )
    original = nn.Module.__call__
    loop(model, folder / "ours", callbacks=[callback(schedule)], **settings)
    assert nn.Module.__call__ is original
    with profile_flops() as whole:
        loop(plain, folder / "plain", **settings)
    assert_same(tensors_of(model.state_dict()), tensors_of(plain.state_dict()))
    assert list(found) == [1]
    assert 2 * found[1].total == whole.total > 0


def step_that_raises(loop: Any, callback: Any, folder: Path, *, is_told: bool) -> None:
    """Raise in the second measured step: the first has its report, and nothing is left."""
    model, calls, found = case_of("Llama").build(), [], []

    def fails(module: nn.Module, args: Any, output: Any) -> None:
        calls.append(nn.Module.__call__ is original)
        if len(calls) == 2:
            raise ValueError("in a step")

    original = nn.Module.__call__
    model.register_forward_hook(fails)
    schedule = ReportSchedule(
        profile_memory, every_n_steps=1, on_report=lambda report, step: found.append(step)
    )
    with pytest.raises(ValueError, match="in a step"), nullcontext() if is_told else schedule:
        loop(model, folder, callbacks=[callback(schedule)])
    assert calls == [False, False]
    assert found == [0]
    assert nn.Module.__call__ is original


def test_steps_of_the_trainer_of_transformers(tmp_path: Path) -> None:
    """The callback measures one optimizer step with all its batches."""
    need("transformers")
    measured_steps(by_transformers, transformers_callback, tmp_path, gradient_accumulation_steps=2)


def test_steps_of_the_trainer_of_lightning(tmp_path: Path) -> None:
    """The callback measures one optimizer step with all its batches."""
    need("lightning.pytorch")
    measured_steps(by_lightning, lightning_callback, tmp_path, accumulate_grad_batches=2)


def test_step_of_transformers_that_raises(tmp_path: Path) -> None:
    """After `with schedule: trainer.train()` no hook or mode is left."""
    need("transformers")
    step_that_raises(by_transformers, transformers_callback, tmp_path, is_told=False)


def test_step_of_lightning_that_raises(tmp_path: Path) -> None:
    """The trainer reports the error to its callbacks, and no hook or mode is left."""
    need("lightning.pytorch")
    step_that_raises(by_lightning, lightning_callback, tmp_path, is_told=True)


def test_names_of_an_adapted_model(tmp_path: Path) -> None:
    """Under LoRA the adapters' products count in separate modules."""
    peft = need("peft")
    case = case_of("Llama")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.1)
    model = peft.get_peft_model(case.build(), config)
    with profile_flops(model) as report, torch.random.fork_rng():
        case.loss(model).backward()
    adapters = [row for row in report if row.name.endswith("lora_A.default")]
    assert len(adapters) == 2
    # tokens x width x rank, a multiplication and an addition each
    assert all(row.forward == 2 * 12 * 32 * 2 for row in adapters)
