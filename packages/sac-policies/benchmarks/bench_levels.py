"""What a step takes on each level of `fit_`, beside torch's checkpointing; bytes, no times.

Each block of a model from `tests/integration/` is on one level. Kept bytes are those of a forward;
a peak is the most during a step, without parameters and inputs. `fit_` is given a budget half way
between the smallest peak and the plain one, so that it mixes levels.

    python bench_levels.py --model Llama GPT-2
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from itertools import takewhile

import torch
from bench_models import WAYS, Case, cases, kept_and_peak, model_under
from torch import nn

from sac_policies import fit_
from sac_policies.budget._fit_in_place import _divisions, _Search
from sac_policies.budget._levels import LEVELS
from sac_policies.budget._measure import highest
from sac_policies.budget._step import BACKWARD, Step

MIB = 1 << 20


def loss_of(out: object) -> torch.Tensor:
    """Return the loss of a model's output, as the cases compute it."""
    if getattr(out, "loss", None) is not None:
        return out.loss  # type: ignore[attr-defined]
    for name in ("logits", "sample", "last_hidden_state", "pooler_output"):
        if getattr(out, name, None) is not None:
            return getattr(out, name).pow(2).mean()
    return out.pow(2).mean()  # type: ignore[attr-defined]


def run_step(case: Case, model: nn.Module) -> None:
    """Run forward and backward, and drop the gradients."""
    case.loss(model).backward()
    model.zero_grad()


def levels_of(model: nn.Module, batch: object) -> dict[str, tuple[int, int]]:
    """Return kept bytes and peak of a step on each level of the CPU."""
    step, found = Step(model, batch, loss_of), {}
    with step.trials():
        search = _Search(model, step, next(iter(_divisions(model, step))))
        search.find()
        search._learn()
        for level in range(search._levels):
            intervals = search._intervals(level)
            forward = takewhile(lambda each: each.key != BACKWARD, intervals)
            kept = sum(each.grown for each in forward)
            found[LEVELS[level]] = kept, highest(intervals)
        search.undo()
    return found


def main() -> None:
    """Print a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="*", default=["Llama", "GPT-2", "BERT", "ViT", "Mixtral"])
    parser.add_argument("--factor", type=int, default=4)
    parser.add_argument("--copies", type=int, default=16)
    for case in cases(parser.parse_args()):
        rows = levels_of(model_under(case, None), case.inputs())
        for name, way in (("torch, full", "full"), ("torch, selective", "torch")):
            model = model_under(case, WAYS[way])
            run_step(case, model)
            kept, _ = kept_and_peak(partial(case.loss, model))
            _, peak = kept_and_peak(partial(run_step, case, model))
            rows[name] = kept, peak
        print(f"## {case.name}\n\n| way | kept, MiB | peak, MiB |\n|---|---|---|")
        for name, (kept, peak) in rows.items():
            print(f"| {name} | {kept / MIB:.2f} | {peak / MIB:.2f} |")
        model, began = model_under(case, None), time.monotonic()
        none = fit_(model, case.inputs(), 1, loss=loss_of)
        plain = fit_(model, case.inputs(), 1.0, loss=loss_of).peak_bytes
        budget = (none.smallest_bytes + plain) // 2
        found = fit_(model, case.inputs(), budget, loss=loss_of)
        off = f"{100 * (found.predicted_bytes / found.peak_bytes - 1):+.2f} %"
        print(
            f"\n`fit_`: predicted {off} of measured; {time.monotonic() - began:.1f} s\n", flush=True
        )


if __name__ == "__main__":
    main()
