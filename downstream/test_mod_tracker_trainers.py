"""mod-tracker around and inside other people's training loops."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from _cases import case_of
from _checks import assert_same, tensors_of, twins
from _models import Case, need
from _table import library
from _trainers import TRAINERS
from torch.utils.flop_counter import FlopCounterMode

from ckpt_wrap import checkpoint_
from mod_tracker import ModTracker, profile_flops, profile_memory, profile_time, trace

REPORTS = {
    "tracker": ModTracker,
    "flops": profile_flops,
    "time": profile_time,
    "memory": profile_memory,
    "trace": trace,
}
LANGUAGE = ["Llama", "GPT-2"]


def run(trainer: str, case: Case, folder: Path, report: str) -> None:
    """Train inside a report and without: the weights are the same."""
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


@library("transformers")
@pytest.mark.parametrize("report", list(REPORTS))
@pytest.mark.parametrize("name", LANGUAGE)
def test_around_the_trainer_of_transformers(name: str, report: str, tmp_path: Path) -> None:
    """`with report(): trainer.train()` changes no weight."""
    run("transformers", case_of(name), tmp_path, report)


@library("accelerate")
@pytest.mark.parametrize("report", list(REPORTS))
@pytest.mark.parametrize("name", LANGUAGE)
def test_around_a_loop_of_accelerate(name: str, report: str, tmp_path: Path) -> None:
    """`with report():` around a loop with accumulation changes no weight."""
    run("accelerate", case_of(name), tmp_path, report)


@library("lightning")
@pytest.mark.parametrize("report", list(REPORTS))
@pytest.mark.parametrize("name", LANGUAGE)
def test_around_the_trainer_of_lightning(name: str, report: str, tmp_path: Path) -> None:
    """`with report(): trainer.fit(...)` changes no weight."""
    run("lightning", case_of(name), tmp_path, report)


@library("transformers")
@pytest.mark.parametrize("trainer", list(TRAINERS))
@pytest.mark.parametrize("checkpointed", [False, True])
def test_flops_of_a_training_run(trainer: str, checkpointed: bool, tmp_path: Path) -> None:
    """The total of a whole run is `FlopCounterMode`'s, with recomputation and without."""
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


@library("peft")
def test_names_of_an_adapted_model(tmp_path: Path) -> None:
    """Under LoRA the adapters' products are counted in modules of their own."""
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
