"""Compare FLOP counters with a count by hand, for a training step of ten models.

    python packages/mod-tracker/benchmarks/compare_counters.py

Needs transformers, and torchtitan and DeepSpeed for their columns. A cell is the counter's result
divided by the count by hand of `tests/test_utilization.py`. torchtitan's formula gives FLOPs per
token from parameters and sizes. DeepSpeed counts the forward; a step is three times that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mod_tracker import profile_flops

TESTS = Path(__file__).parent.parent / "tests"


def loss_of(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    """Run a forward."""
    out = model(**inputs)
    return out if isinstance(out, torch.Tensor) else out.loss


def ours(model: nn.Module, inputs: dict[str, Any]) -> int:
    """Return `model_flops`, which leaves out recomputation."""
    with profile_flops(model) as report:
        loss_of(model, inputs).backward()
    return report.model_flops


def torchs(model: nn.Module, inputs: dict[str, Any]) -> int:
    """Return the count of torch's FlopCounterMode, forward and backward."""
    with FlopCounterMode(display=False) as mode:
        loss_of(model, inputs).backward()
    return mode.get_total_flops()


def deepspeeds(model: nn.Module, inputs: dict[str, Any]) -> int:
    """Return three times DeepSpeed's count of the forward."""
    FlopsProfiler = import_module("deepspeed.profiling.flops_profiler").FlopsProfiler
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    loss_of(model, inputs)
    flops = profiler.get_total_flops()
    profiler.end_profile()
    return 3 * flops


class _AsTitan(nn.Module):
    """A transformers model with the names and children that torchtitan's functions read."""

    NAMES = (
        (".mlp.experts.", ".moe.routed_experts."),
        (".mlp.gate.", ".moe.router."),
        ("embed_tokens", "tok_embeddings"),
    )

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        body = getattr(model, model.base_model_prefix)
        self.model = model
        self._children = [*body.children(), *(c for c in model.children() if c is not body)]

    def children(self) -> list[nn.Module]:
        """Yield the parts of the body and the head."""
        return self._children

    def named_parameters(self, *args: Any, **options: Any) -> Any:
        """Yield parameters; those of mixtures of experts under torchtitan's names."""
        for name, parameter in self.model.named_parameters():
            for old, new in self.NAMES:
                name = name.replace(old, new)
            yield name, parameter


def titans(model: nn.Module, inputs: dict[str, Any]) -> int | None:
    """Return torchtitan's formula times the tokens; None for models that it does not support."""
    config, ids = getattr(model, "config", None), inputs.get("input_ids")
    if config is None or ids is None:
        return None
    utils = import_module("torchtitan.models.utils")
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    tied, like = config.tie_word_embeddings, _AsTitan(model)
    if experts:
        router = SimpleNamespace(top_k=config.num_experts_per_tok)
        moe = SimpleNamespace(router=router, num_experts=experts)
        layers = [SimpleNamespace(moe=moe, attention=True)] * config.num_hidden_layers
        sizes = SimpleNamespace(layers=layers, enable_weight_tying=tied)
        found = utils.get_moe_model_nparams_and_flops(sizes, like, heads, 2 * width, ids.shape[1])
    else:
        found = utils.get_dense_model_nparams_and_flops(
            like, config.num_hidden_layers, heads, 2 * width, ids.shape[1], tied
        )
    return found[1] * ids.numel()


COUNTERS: dict[str, Callable[[nn.Module, dict[str, Any]], int | None]] = {
    "mod-tracker": ours,
    "torch": torchs,
    "torchtitan": titans,
    "DeepSpeed": deepspeeds,
}


def cell(counter: Callable[..., int | None], make: Callable[[], Any], by_hand: int) -> str:
    """Return a counter's result divided by the count by hand, as text."""
    torch.manual_seed(0)
    model, inputs, _ = make()
    try:
        found = counter(model.train(), inputs)
    except ModuleNotFoundError as error:
        return f"no {error.name}"
    except Exception as error:
        return f"raises {type(error).__name__}"
    return "-" if found is None else f"{found / by_hand:.3f}"


def main() -> None:
    """Print the table."""
    sys.path.insert(0, str(TESTS))
    utilization = import_module("test_utilization")
    print("|", " | ".join(["model", "by hand", *COUNTERS]), "|")
    print("|---" * (2 + len(COUNTERS)) + "|")
    for make in utilization.MODELS:
        by_hand = 3 * make()[2] - (utilization.PIXELS if make is utilization.vit else 0)
        cells = [cell(counter, make, by_hand) for counter in COUNTERS.values()]
        print("|", " | ".join([make.__name__, f"{by_hand:,}", *cells]), "|", flush=True)


if __name__ == "__main__":
    main()
