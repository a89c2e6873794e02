"""`python -m sac_policies plan`: estimated steps, compared with measured ones."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sac_policies.__main__ import main
from sac_policies.budget._checkpointed import Checkpointed
from sac_policies.budget._measure import bytes_of
from sac_policies.plan._devices import DEVICES, Device, device_named
from sac_policies.plan._plan import _POLICIES, HIDDEN, OFFLOADED, PLAIN, estimate

from ._fitted import peak_growth
from ._plan_subject import build

SUBJECT = f"{Path(__file__).parent / '_plan_subject.py'}:build"
CPU = torch.device("cpu")


def no_workspace(name: str = "H100") -> Device:
    """A device whose libraries allocate no workspace."""
    known = device_named(name)
    return Device(name, known.memory_bytes, known.flops, known.bandwidth, known.link, 0)


def measured_peak(level: str) -> int:
    """Peak bytes of a step on the CPU, from the allocator."""
    model, tokens = build((2, 256))
    for block in model.blocks if level != PLAIN else ():
        Checkpointed(block, policy=_POLICIES[level]).put()

    def step() -> None:
        model(tokens).backward()
        for parameter in model.parameters():
            parameter.grad = None

    step()
    step()
    resident = bytes_of([*model.parameters(), tokens], device=CPU)
    return resident + peak_growth(step, device=CPU)


def test_predicted_peaks_are_the_measured_ones() -> None:
    """Estimates on fake tensors are within 2 % of the allocator's peak on the CPU."""
    found = estimate(SUBJECT, no_workspace(), (2, 256), optimizer="none", dtype=torch.float32)
    for level in (PLAIN, *_POLICIES):
        predicted = found.uniform[level].peak_bytes
        assert predicted == pytest.approx(measured_peak(level), rel=0.02), level


# One H200, 27 November 2026, torch 2.11, transformers 5.17: a Llama of 1.1B, 2 x 4,096 tokens,
# without an optimizer. MiB and ms of a step.
MEASURED = {
    PLAIN: (18_886, 142.4),
    "keeps matmuls": (11_717, 156.2),
    "recomputes everything": (5_813, 180.9),
}


@pytest.mark.nightly
def test_estimates_agree_with_steps_of_an_h200(tmp_path: Path) -> None:
    """Bytes within 2 % and times within 15 % of the measurements."""
    pytest.importorskip("transformers", exc_type=ImportError)
    shape = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32_000}
    config = {"model_type": "llama", "tie_word_embeddings": False, **shape, **heads}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = estimate(str(tmp_path), device_named("H200"), (2, 4096), optimizer="none")
    for level, (mib, ms) in MEASURED.items():
        step = found.uniform[level]
        assert step.peak_bytes / 2**20 == pytest.approx(mib, rel=0.02), level
        assert step.seconds * 1e3 == pytest.approx(ms, rel=0.15), level


def test_levels_are_ordered_and_offload_keeps_no_inputs() -> None:
    """Each level needs no more memory and no less time than the one before."""
    found = estimate(SUBJECT, no_workspace(), (4, 8192), optimizer="adamw").uniform
    assert list(found) == [PLAIN, *_POLICIES, OFFLOADED, HIDDEN]
    steps = list(found.values())[:-1]
    for one, other in itertools.pairwise(steps):
        assert one.peak_bytes >= other.peak_bytes
        assert one.seconds <= other.seconds
    assert steps[0].peak_bytes > 2 * steps[-1].peak_bytes


@pytest.mark.nightly
def test_hidden_copies_save_time_where_the_link_is_fast() -> None:
    """The device holds the values of a block and the next one; a slow link hides nothing."""
    known, steps = no_workspace(), []
    for factor in (0.01, 10, 1000):
        device = replace(known, link=factor * known.link)
        found = estimate(SUBJECT, device, (4, 8192), optimizer="none", dtype=torch.float32)
        steps.append(found.uniform)
    slow, fast, faster = steps
    again = slow["recomputes everything"].seconds
    assert slow[HIDDEN].seconds >= again
    assert slow[PLAIN].seconds <= faster[HIDDEN].seconds < fast[HIDDEN].seconds < again
    for each in steps:
        # Of four blocks, two have their values on the device.
        assert each[OFFLOADED].peak_bytes <= each[HIDDEN].peak_bytes < 0.8 * each[PLAIN].peak_bytes


def test_state_of_the_optimizer_is_counted() -> None:
    """AdamW has two tensors per parameter."""
    plain, trained = (
        estimate(SUBJECT, no_workspace(), (1, 64), optimizer=name) for name in ("none", "adamw")
    )
    assert trained.optimizer_bytes == 2 * trained.gradient_bytes
    assert trained.plain.peak_bytes - plain.plain.peak_bytes == trained.optimizer_bytes


@pytest.mark.nightly
def test_recommended_mixture_fits_and_is_faster_than_checkpointing_all() -> None:
    """Between the peaks of two levels, blocks are divided between both levels."""
    everything = estimate(SUBJECT, no_workspace(), (4, 4096)).uniform
    budget = (everything[PLAIN].peak_bytes + everything["keeps matmuls"].peak_bytes) // 2
    found = estimate(SUBJECT, no_workspace(), (4, 4096), budget_bytes=budget).recommended
    assert found is not None
    assert everything["keeps matmuls"].peak_bytes < found.peak_bytes <= budget
    assert everything[PLAIN].seconds < found.seconds < everything["keeps matmuls"].seconds
    assert sum(count for _, count in found.levels) == 4
    assert len(found.levels) == 2


def test_command_prints_causes_and_recommendation(capsys: Any) -> None:
    """The exit status says whether a plan fits."""
    assert main(["plan", SUBJECT, "--device", "h100", "--tokens", "4x512"]) == 0
    printed = capsys.readouterr().out
    causes = ("parameters", "gradients", "optimizer state", "activations", "logits and loss")
    assert [cause for cause in causes if f"\n  {cause} " not in printed] == []
    assert "recommended: keeps everything: blocks 0 to 3" in printed
    assert "tokens per second" in printed


def test_command_says_what_would_help(capsys: Any) -> None:
    """If nothing fits: the smallest peak, slices, fewer tokens, offload and sharding."""
    arguments = ["plan", SUBJECT, "--device", "H100", "--tokens", "4x8k", "--dtype", "float32"]
    assert main([*arguments, "--memory", "100 MiB"]) == 1
    printed = capsys.readouterr().out
    assert "nothing fits 100.00 MiB: the smallest takes" in printed
    assert "in_slices(16)" in printed
    assert "fewer tokens: about" in printed
    assert "optimizer state in host memory saves" in printed
    assert main([*arguments, "--memory", "40 MiB", "--tokens", "4"]) == 1
    assert "sharding over 2 ranks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (["--device", "H1000"], "Did you mean 'H100'"),
        (["--tokens", "many"], "tokens 'many' do not parse"),
        (["--tokens", "0"], "tokens '0' do not parse"),
        (["--memory", "much"], "size 'much' does not parse"),
    ],
)
def test_wrong_options_are_named(changed: list[str], said: str, capsys: Any) -> None:
    """The message gives the option's value and the accepted values."""
    assert main(["plan", SUBJECT, "--device", "H100", *changed]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("no_such_module:build", "cannot be imported"),
        (SUBJECT.replace(":build", ":missing"), "cannot be imported"),
        (f"{SUBJECT}_wrongly", "Return a tuple of an nn.Module and a batch"),
    ],
)
def test_wrong_models_are_named(model: str, said: str, capsys: Any) -> None:
    """The message says which attribute is missing or which object was returned."""
    assert main(["plan", model, "--device", "H100"]) == 2
    assert said in capsys.readouterr().err


def test_devices_have_sound_numbers() -> None:
    """A kernel's time is the maximum of arithmetic and memory traffic."""
    assert len({device.name for device in DEVICES}) == len(DEVICES)
    device = device_named("H200")
    assert device.seconds(0, 0) == 0
    assert device.seconds(690 * 10**12, 0) == pytest.approx(1)
    assert device.seconds(10, 10**12) > device.seconds(10, 10**11)
    assert device.copy_seconds(55 * 10**9) == pytest.approx(1)


@pytest.mark.nightly
def test_largest_step_fits_and_no_larger_one() -> None:
    """Tokens in whole sequences, with all blocks on one level."""
    budget, length = 150 << 20, 64
    options = {"dtype": torch.float32, "budget_bytes": budget}
    most = estimate(SUBJECT, no_workspace(), (16, length), **options).most_tokens
    for level in (PLAIN, "recomputes everything"):
        sequences = most[level] // length
        peaks = [
            estimate(SUBJECT, no_workspace(), (count, length), **options).uniform[level].peak_bytes
            for count in (sequences, sequences + 1 + sequences // 50)
        ]
        assert peaks[0] <= budget < peaks[1], level


@pytest.mark.nightly
def test_smallest_device_that_fits_is_printed(capsys: Any) -> None:
    """From the table, whichever device was asked for."""
    arguments = ["plan", SUBJECT, "--device", "H200", "--optimizer", "none", "--tokens"]
    found = {}
    for tokens in ("1x512", "2048x16k", "8192x16k"):
        main([*arguments, tokens])
        found[tokens] = capsys.readouterr().out.partition("that fits: ")[2].partition("\n")[0]
    assert found["1x512"] == "RTX-4090, 23.50 GiB"
    memory = {each.name: each.memory_bytes for each in DEVICES}
    larger = found["2048x16k"].partition(",")[0]
    assert memory[larger] > memory["RTX-4090"]
    assert found["8192x16k"] == "none"


@pytest.mark.nightly
def test_model_that_takes_no_fake_tensors_is_built_on_meta(capsys: Any) -> None:
    """Tied weights stay tied."""
    converted = estimate(f"{SUBJECT}_converted", no_workspace(), (4, 512))
    plain = estimate(SUBJECT, no_workspace(), (4, 512))
    assert plain.parameters - converted.parameters == 256 * 128
    assert converted.plain.peak_bytes < plain.plain.peak_bytes
    assert main(["plan", f"{SUBJECT}_converted", "--device", "H100"]) == 0
    assert capsys.readouterr().err == ""


def test_model_that_fails_has_an_exit_status(capsys: Any) -> None:
    """One line instead of a traceback, unless asked for."""
    arguments = ["plan", f"{SUBJECT}_failing", "--device", "H100"]
    assert main(arguments) == 3
    printed = capsys.readouterr().err
    assert printed.startswith(f"sac_policies plan: '{SUBJECT}_failing' fails on tensors without")
    assert printed.count("\n") == 1
    with pytest.raises(Exception, match="_local_scalar_dense"):
        main([*arguments, "--traceback"])
