"""The parts, each with the lines of code that a user writes."""

from __future__ import annotations

import copy
import functools
import math
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from _checks import kept_bytes
from _models import Case, calls_of, without_cache
from _reports import REPORTS, names_of_calls, torchs_counter
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import ckpt_wrap
import flat_param
import sac_policies

COPIES = 8
"""How often a case's own batch is repeated: weights should not outweigh what is kept."""

KEPT = "save_ops(MATMULS, ATTENTION, CONVOLUTIONS)"


class DiffersError(Exception):
    """Two values differ: which, and by how much relative to the largest expected value."""

    def __init__(self, where: str, by: float = math.inf) -> None:
        super().__init__(where, by)
        self.where, self.by = where, by

    def told(self) -> dict[str, Any]:
        """Format as a result."""
        return {"outcome": "differs", "where": self.where, "by": self.by}


@dataclass(frozen=True)
class Part:
    """Code for each block or for the whole model, and the comparison with plain."""

    name: str
    package: str
    code: str
    each_block: bool = True
    judge: str = "step"


REGION = "checkpoint_(block, checkpoint_fn=checkpoint, policy={})"


SOLVED = """
traced = profile(block, *args, unit="flops", **kwargs)
plan = solve(traced, "50%")
plan = plan or solve(traced, plan.smallest_bytes)
checkpoint_(block, checkpoint_fn=checkpoint, policy=plan)
"""
FITTED = """
found = fit_(model, batch, "80%")
found = found or fit_(model, batch, found.smallest_bytes)
"""
NESTED = """
apply_activation_checkpointing(
    model, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=lambda m: m in blocks
)
"""
REPORTED = "\n".join(f"with {make.__name__}() as report: ..." for make in REPORTS.values())
TORCH_FULL = "apply_checkpoint(block)"
TORCH_SELECTIVE = "apply_checkpoint(block, context_fn=selective(POLICY))"
PLAIN = Part("plain", "torch", "", each_block=False)
# Torch's ways; recomputation may advance batch norm statistics twice.
TORCH = [
    Part("torch, nothing kept", "torch", TORCH_FULL),
    Part("torch, products kept", "torch", TORCH_SELECTIVE),
]
PARTS = [
    Part("in place", "ckpt-wrap", "checkpoint_(block)"),
    Part("nested", "ckpt-wrap", NESTED.strip(), each_block=False),
    Part("offload", "ckpt-wrap", "offload_(block, to=folder, min_bytes=1)"),
    Part("nothing kept", "sac-policies", REGION.format("recompute_all()")),
    Part("products kept", "sac-policies", REGION.format(KEPT)),
    Part("solve", "sac-policies", SOLVED.strip()),
    Part("fit_", "sac-policies", FITTED.strip(), each_block=False),
    Part("names", "mod-tracker", "with ModTracker() as tracker: ...", False, "names"),
    Part("reports", "mod-tracker", REPORTED, False, "reports"),
    Part("flatten", "flat-param", "flatten(model)", False, "trained"),
]
BY_NAME = {part.name: part for part in (PLAIN, *TORCH, *PARTS)}


def apply_checkpoint(block: nn.Module, **options: Any) -> None:
    """Run a block's forward in torch's checkpoint."""
    block.forward = functools.partial(  # type: ignore[method-assign]
        torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False, **options
    )


def selective(ops: set[str]) -> Any:
    """Make torch's contexts that save these operators and recompute all others."""

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = str(op.overloadpacket) in ops
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


KEPT_OPS = {
    *("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten._grouped_mm"),
    *("aten._scaled_dot_product_flash_attention_for_cpu", "aten.convolution"),
}
"""The operators of `KEPT` that the models here run on a CPU."""


def enlarged(case: Case, shift: int = 0) -> Case:
    """Return the same model with a repeated batch; with other values if `shift` is not 0."""

    def larger(value: Tensor) -> Tensor:
        moved = value.roll(shift, -1)
        return moved.repeat(COPIES, *[1] * (value.dim() - 1))

    return replace(case, inputs=lambda: tree_map_only(Tensor, larger, case.inputs()))


def tie(model: nn.Module) -> int:
    """Tie a language model's embeddings if they have one size; return the number of tied names."""
    last = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if last is not None and last.weight.shape == model.get_input_embeddings().weight.shape:
        last.weight = model.get_input_embeddings().weight
    once = len(list(model.named_parameters()))
    return len(list(model.named_parameters(remove_duplicate=False))) - once


def apply(part: Part, case: Case, model: nn.Module, folder: str) -> dict[str, Any]:
    """Run the code of a part on a model; return its names."""
    found = case.blocks_of(model)
    packages = (ckpt_wrap, flat_param, sac_policies)
    names: dict[str, Any] = {name: getattr(p, name) for p in packages for name in p.__all__}
    names |= {"model": model, "blocks": set(found.values()), "folder": folder}
    names |= {"batch": case.inputs(), "apply_checkpoint": apply_checkpoint}
    names |= {"selective": selective, "POLICY": KEPT_OPS}
    code = part.code
    if "profile(" in code:
        calls = calls_of(case, model)
        found = {name: block for name, block in found.items() if name in calls}
    for name, block in found.items() if part.each_block else [("", model)]:
        names["block"] = block
        if "profile(" in code:
            _, names["args"], names["kwargs"] = calls[name]
        exec(code, names)
    return names


def compare(pairs: Iterable[tuple[str, Tensor | None, Tensor | None]]) -> None:
    """Raise for the pair that differs most, unless all are bit-identical."""
    worst: DiffersError | None = None
    for what, ours, theirs in pairs:
        if ours is None and theirs is None:
            continue
        if ours is None or theirs is None:
            raise DiffersError(f"{what} (None in one of the two)")
        if torch.equal(ours, theirs):
            continue
        by = float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max())
        if worst is None or not by <= worst.by:  # NaN is the worst
            worst = DiffersError(what, by)
    if worst is not None:
        raise worst


def same_names(what: str, ours: Iterable[str], theirs: Iterable[str]) -> None:
    """Raise unless the names are the same, in the same order."""
    if list(ours) != list(theirs):
        raise DiffersError(f"names of {what}")


def same_step(case: Case, ours: nn.Module, theirs: nn.Module) -> None:
    """Compare loss, then gradients, then state of one forward and backward of both."""
    losses = []
    for model in (ours, theirs):
        model.zero_grad()
        losses.append(case.loss(model))
        losses[-1].backward()
    compare([("the loss", *losses)])
    found, right = dict(ours.named_parameters()), dict(theirs.named_parameters())
    same_names("parameters", found, right)
    compare((f"gradient of {name}", found[name].grad, right[name].grad) for name in right)
    same_state(ours, theirs)


def same_state(ours: nn.Module, theirs: nn.Module) -> None:
    """Compare parameters and buffers of both by name."""
    found, right = ours.state_dict(), theirs.state_dict()
    same_names("the state dict", found, right)
    compare((f"{name} in the state dict", found[name], right[name]) for name in right)


def step(part: Part, case: Case, model: nn.Module, plain: nn.Module) -> dict[str, Any]:
    """Compare two steps with the plain model's, and return the kept bytes of a third one."""
    with tempfile.TemporaryDirectory() as folder:
        found = apply(part, case, model, folder).get("found")
        if isinstance(found, sac_policies.budget.Infeasible):
            return {"outcome": "does not fit", "error": f"{found}".partition("\n")[0]}
        model.load_state_dict(plain.state_dict())  # some parts run forwards to inspect a model
        told = {"outcome": "equal"}
        try:
            for _ in range(2):
                same_step(case, model, plain)
        except DiffersError as error:
            told = error.told()
        model.zero_grad()
        return {**told, "kept_bytes": kept_bytes(lambda: case.loss(model))}


def names(part: Part, case: Case, model: nn.Module, plain: nn.Module) -> dict[str, Any]:
    """The tracker's names equal those of forward hooks, in order."""
    seen, expected = names_of_calls(case, model)
    if seen != expected:
        raise DiffersError("the order of names")
    return {"seen": len(seen)}


def reports(part: Part, case: Case, model: nn.Module, plain: nn.Module) -> dict[str, Any]:
    """Results are bit-identical inside each report, and FLOPs equal torch's count."""
    for make in REPORTS.values():
        with make() as report:
            case.loss(model).backward()
        model.zero_grad()
        model.load_state_dict(plain.state_dict())
        with make():
            same_step(case, model, plain)
        if hasattr(report, "by_operator"):
            total = report.total
    with torchs_counter() as counter:
        case.loss(plain).backward()
    if total != counter.get_total_flops():
        raise DiffersError("FLOPs", total / counter.get_total_flops() - 1)
    return {}


def trained(part: Part, case: Case, model: nn.Module, plain: nn.Module) -> dict[str, Any]:
    """Tie, flatten and train three steps of AdamW; compare with plain training."""
    tied, _ = tie(model), tie(plain)
    apply(part, case, model, "")
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, plain)]
    for _ in range(3):
        same_step(case, model, plain)
        for optimizer in optimizers:
            optimizer.step()
    same_state(model, plain)
    if tie(model) != tied:
        raise DiffersError("names that are tied")
    return {"tied": tied}


def twins(case: Case) -> tuple[nn.Module, nn.Module]:
    """Return a model to change and a plain copy, both without key and value caches."""
    (plain,) = without_cache(case.build())
    return copy.deepcopy(plain), plain
