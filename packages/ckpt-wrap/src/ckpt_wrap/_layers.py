"""Checkpoint the modules of a model that a rule selects, or its repeated blocks.

A model's blocks are the entries of an `nn.ModuleList`, `nn.ModuleDict` or `nn.Sequential` that have
submodules; at least two must have the same class. In an `nn.ModuleList` that has two such blocks,
blocks of other classes count as well. Of nested lists the outermost counts, unless its entries grow
with the depth of the model: these are stages, and the lists inside them count. Lists of experts do
not count, since each token runs only some of them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from ckpt_wrap._checkpoint_fn import make_checkpoint_fn
from ckpt_wrap._errors import (
    ModuleError,
    OptionError,
    PolicyError,
    has_forward,
    require_module,
)
from ckpt_wrap._in_place import become, require_changeable, set_name, warn_of_own_switch
from ckpt_wrap._offload import Offload
from ckpt_wrap._options import CheckpointOptions, OffloadOptions
from ckpt_wrap._wrapper import ActivationWrapper, is_wrapper

Rule = Callable[[str, nn.Module], bool | Mapping[str, Any] | None]
Selected = list[tuple[str, nn.Module, Mapping[str, Any]]]
_STAGES_GROW = 3.0  # the largest entry has that many times the parameters of the smallest


def checkpoint_layers_(
    model: nn.Module,
    rule: Rule | None = None,
    *,
    every: int = 1,
    offload: bool | str | os.PathLike[str] = False,
    **options: Any,
) -> tuple[str, ...]:
    """Checkpoint the repeated blocks of a model in place, or the modules that a rule selects.

    Each of them becomes a region, as by `checkpoint_`. Look at the returned names: a model with
    an unusual layout needs a rule. If one module cannot be checkpointed, none is changed.

    Args:
        model: the model whose layers are checkpointed; it is not checkpointed itself.
        rule: called as `rule(name, module)` for each module below the model. It returns True,
            False, or options of `checkpoint_` for this module. None: the repeated blocks are found.
        every: checkpoint every n-th of the blocks, starting with the first of each list, or every
            n-th of the modules that the rule selects.
        offload: also offload the inputs of these modules: True for host memory, or the path of an
            existing folder. Tensors of the CPU are only moved to a folder.
        **options: options of `checkpoint_` for every module; those of the rule are added to them.

    Returns:
        The names of the modules, in the order of the model.

    Raises:
        ModuleError: not an `nn.Module`, one without repeated blocks, or one of the modules cannot
            be changed.
        OptionError: an option has a wrong value.
        PolicyError: the rule is not a function, or selects nothing.
        OffloadError: the folder of `offload` cannot be written to.

    Warns:
        UserWarning: the model has checkpointing of its own switched on.

    Example:
        >>> block = lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        >>> model = nn.Sequential(nn.Linear(2, 4), *[block() for _ in range(4)])
        >>> checkpoint_layers_(model, every=2)
        ('1', '3')
    """
    require_module(model, "checkpoint_layers_")
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise OptionError(
            f"ckpt_wrap.checkpoint_layers_: option 'every' is {every!r}, but it must be an int of "
            "at least 1. Pass 1 for all blocks, 2 for every second."
        )
    selected = _found(model, every) if rule is None else _selected_by(rule, model)[::every]
    changes = []
    for name, module, own in selected:
        require_changeable(module, "checkpoint_layers_", name)
        chosen = CheckpointOptions("checkpoint_layers_", **{**options, **own})
        change: dict[str, Any] = {"checkpoint": make_checkpoint_fn(chosen)}
        if offload:
            to = "cpu" if offload is True else offload
            change["offload"] = Offload(OffloadOptions("checkpoint_layers_", to=to))
        changes.append((module, name, change))
    warn_of_own_switch(model, "checkpoint_layers_")
    for module, name, change in changes:
        become(module, **change)
        set_name(module, name)
    return tuple(name for name, _, _ in selected)


def _selected_by(rule: Rule, model: nn.Module) -> Selected:
    if not callable(rule) or isinstance(rule, type):
        raise PolicyError(
            f"ckpt_wrap.checkpoint_layers_: rule is {rule!r}, but it must be a function of a name "
            "and a module, such as lambda name, module: isinstance(module, Block)."
        )
    selected: Selected = []
    for name, module in model.named_modules():
        if module is model or is_wrapper(module) or isinstance(module, ActivationWrapper):
            continue
        chosen = rule(name, module)
        if isinstance(chosen, Mapping):
            selected.append((name, module, chosen))
        elif chosen:
            selected.append((name, module, {}))
    if not selected:
        found = dict.fromkeys(type(module).__name__ for module in model.modules())
        raise PolicyError(
            f"ckpt_wrap.checkpoint_layers_: the rule selects no module of {type(model).__name__}, "
            f"but it must select at least one. Classes of its modules: {', '.join(found)}."
        )
    return selected


def _found(model: nn.Module, every: int) -> Selected:
    selected: Selected = [
        (name, block, {}) for blocks in find_layers(model) for name, block in blocks[::every]
    ]
    if not selected:
        remedy = (
            "Make blocks of consecutive layers, each an nn.Sequential"
            if isinstance(model, nn.Sequential)
            else "Pass a rule that selects its blocks, such as lambda name, module: "
            "isinstance(module, Block)"
        )
        raise ModuleError(
            f"ckpt_wrap.checkpoint_layers_: model {type(model).__name__} has no nn.ModuleList, "
            f"nn.ModuleDict or nn.Sequential with two blocks of one class. {remedy}."
        )
    return selected


Blocks = list[tuple[str, nn.Module]]


def find_layers(model: nn.Module, prefix: str = "") -> list[Blocks]:
    """Yield lists of repeated blocks, each with the names and modules of its blocks."""
    groups = _groups(model, prefix)
    if groups and not _are_stages(groups):
        return groups
    inner = []
    for name, child in model.named_children():
        if "expert" not in name:
            inner += find_layers(child, f"{prefix}.{name}" if prefix else name)
    return inner or groups


def _groups(container: nn.Module, prefix: str) -> list[Blocks]:
    """Return the repeated blocks of a list by class; those of an `nn.ModuleList` as one group."""
    if not isinstance(container, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        return []
    blocks = [
        (f"{prefix}.{name}" if prefix else name, block)
        for name, block in container.named_children()
        if has_forward(block) and any(True for _ in block.children()) and _count_elements(block)
    ]
    count = Counter(type(block) for _, block in blocks)
    if isinstance(container, nn.ModuleList) and max(count.values(), default=0) > 1:
        return [blocks]
    return [
        [(name, block) for name, block in blocks if type(block) is kind]
        for kind, number in count.items()
        if number > 1
    ]


def _are_stages(groups: list[Blocks]) -> bool:
    for group in groups:
        sizes = [_count_elements(block) for _, block in group]
        if max(sizes) > _STAGES_GROW * min(sizes) and all(find_layers(b) for _, b in group):
            return True
    return False


def _count_elements(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if not is_lazy(p))
