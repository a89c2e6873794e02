"""Scenes in one process without a group: ckpt-wrap, mod-tracker, sac-policies."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ckpt_wrap
import mod_tracker
import sac_policies
from stress.interrupts import Scene, scenario
from stress.models import backward, differ, gradients, inputs, stack
from stress.trials import Scenario


def _step(model: nn.Module, *, rows: int = 4, folder: Path | None = None, **changes: Any) -> Scene:
    """A step of a model whose gradients are those of the plain stack."""
    x = inputs(rows=rows)
    expected = gradients(stack(), inputs(rows=rows))

    def wrong() -> str:
        why = differ(gradients(model, x), expected)
        return why or (_left_in(folder, model) if folder is not None else "")

    return Scene(lambda: backward(model, x), wrong, **changes)


def _left_in(folder: Path, model: nn.Module) -> str:
    if ckpt_wrap.offload_stats(model).bytes_away:
        gc.collect()  # a graph that was stopped may be a circle
    left = [each.name for each in folder.iterdir()]
    if left:
        return f"files are left: {', '.join(left)}"
    away = ckpt_wrap.offload_stats(model).bytes_away
    return f"{away} bytes are left" if away else ""


def _in_place(folder: Path) -> Scene:
    model = stack()
    for block in model.blocks:
        ckpt_wrap.checkpoint_(block)
    return _step(model)


def _nested(folder: Path, **options: Any) -> Scene:
    model = stack()
    for at, block in enumerate(model.blocks):
        model.blocks[at] = ckpt_wrap.checkpoint_wrapper(block, **options)
    return _step(model)


def _host(folder: Path) -> Scene:
    model = stack()
    for block in model.blocks:
        ckpt_wrap.offload_(block, to="cpu", min_bytes=1)
    return _step(model)


def _to_folder(folder: Path, *, checkpointed: bool = False) -> Scene:
    model, away = stack(), folder / "away"
    away.mkdir()
    for block in model.blocks:
        if checkpointed:
            ckpt_wrap.checkpoint_(block)
        ckpt_wrap.offload_(block, to=str(away), min_bytes=1)
    return _step(model, folder=away)


def _apply(folder: Path) -> Scene:
    """Apply and undo; after an interrupt some blocks are wrapped, and `unwrap` undoes that, too."""
    model = stack()

    def act() -> None:
        ckpt_wrap.checkpoint_layers_(model)
        ckpt_wrap.unwrap(model)

    return Scene(act, _step(model).wrong, lambda: ckpt_wrap.unwrap(model))


def _step_after(model: nn.Module, act: Callable[[], object]) -> Scene:
    step = _step(model)
    return Scene(act, step.wrong)


@contextmanager
def _left_twice(tracker: mod_tracker.ModTracker) -> Iterator[None]:
    """An interrupt at the beginning of `__exit__` skips it; a user exits again."""
    try:
        with tracker:
            yield
    finally:
        tracker.__exit__(None, None, None)


def _listening() -> AbstractContextManager[None]:
    tracker = mod_tracker.ModTracker()
    tracker.register_user_hooks(pre_fw_hook=lambda *_: None)
    tracker.register_user_hooks(post_bw_hook=lambda *_: None)
    return _left_twice(tracker)


def _tracked(folder: Path, *, entered: Callable[[], AbstractContextManager[Any]]) -> Scene:
    model = stack()
    ckpt_wrap.checkpoint_(model.blocks[0])
    x = inputs()

    def act() -> None:
        with entered():
            backward(model, x)

    return _step_after(model, act)


def _selective(folder: Path, *, policy: sac_policies.Policy) -> Scene:
    model = stack()
    for block in model.blocks:
        forward = block.forward
        block.forward = functools.partial(  # type: ignore[method-assign]
            sac_policies.checkpoint, forward, policy=policy
        )
    return _step(model)


def _planned(folder: Path) -> Scene:
    """Profile, solve and report, and then run the plan."""
    model, x = stack(), inputs()

    def act() -> None:
        trace = sac_policies.profile(model, x)
        plan = sac_policies.solve(trace, "50%")
        sac_policies.report(model, x, policy=plan)

    return _step_after(model, act)


def _search(model: nn.Module, x: Tensor, act: Callable[[], object]) -> Scene:
    """A search that must not change the model, its gradients or the random state."""
    backward(model, x)
    held = [each.grad for each in model.parameters()]
    copies = [each.grad.clone() for each in model.parameters()]  # type: ignore[union-attr]
    before = {path: set(vars(module)) for path, module in model.named_modules()}
    step = _step(model, rows=len(x))

    def settle() -> None:
        model.train()
        torch.manual_seed(5)
        for param, grad, copy in zip(model.parameters(), held, copies, strict=True):
            param.grad = grad
            grad.copy_(copy)  # type: ignore[union-attr]

    def wrong() -> str:
        drawn = torch.rand(1)
        torch.manual_seed(5)
        if not torch.equal(drawn, torch.rand(1)):
            return "the random state has moved"
        found = [each.grad for each in model.parameters()]
        if any(each is not grad for each, grad in zip(found, held, strict=True)):
            return "gradients are other objects"
        for path, module in model.named_modules():
            if more := set(vars(module)) ^ before[path]:
                return f"{path or 'the model'} has attributes changed: {', '.join(more)}"
        return differ(found, list(copies)) or step.wrong()

    return Scene(act, wrong, settle)


def _fitted_in_place(folder: Path) -> Scene:
    """Its blocks are checkpointed if it returns, and not otherwise."""
    model, x = stack(), inputs(rows=256)  # enough rows for activations to dominate memory

    def act() -> None:
        found = sac_policies.fit_(model, (x,), "80%")
        if isinstance(found, sac_policies.budget.Infeasible):
            raise AssertionError(str(found))
        try:
            found.undo()
        finally:  # after an interrupt, a user undoes it again
            found.undo()

    return _search(model, x, act)


_MATMULS = sac_policies.save_ops("aten.addmm")
_REPORTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "flops": mod_tracker.profile_flops,
    "time": mod_tracker.profile_time,
    "memory": mod_tracker.profile_memory,
    "watch": mod_tracker.watch_memory,
    "trace": mod_tracker.trace,
    "ranges": functools.partial(mod_tracker.trace, ranges="record_function"),
}


def scenarios() -> list[Scenario]:
    ckpt: dict[str, Callable[[Path], Scene]] = {
        "in-place": _in_place,
        "nested": _nested,
        "host": _host,
        "folder": _to_folder,
        "folder-checkpointed": functools.partial(_to_folder, checkpointed=True),
        "apply": _apply,
    }
    entered = {
        "listening": _listening,
        **_REPORTS,
    }
    tracker = {name: functools.partial(_tracked, entered=how) for name, how in entered.items()}
    some = functools.partial(_selective, policy=_MATMULS)
    away = sac_policies.offload(_MATMULS)
    sac: dict[str, Callable[[Path], Scene]] = {
        "matmuls": some,
        "offload": functools.partial(_selective, policy=away),
        "plan": _planned,
        "fit-in-place": _fitted_in_place,
    }
    return [
        scenario(f"{part}/{name}", package, make)
        for part, package, scenes in (
            ("ckpt", "ckpt_wrap", ckpt),
            ("tracker", "mod_tracker", tracker),
            ("sac", "sac_policies", sac),
        )
        for name, make in scenes.items()
    ]
