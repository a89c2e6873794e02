"""Find the repeated blocks of a model, and checkpoint them.

A model's blocks are the entries of an `nn.ModuleList` or `nn.Sequential` of which at least two have
the same class, and submodules. Of nested lists the outermost counts, unless its entries grow with
the depth of the model: these are stages, and the lists inside them count. Lists of experts are no
blocks: each token runs only some of them.
"""

from __future__ import annotations

import os
from collections import Counter

from torch import nn

from ckpt_wrap._errors import (
    ModuleError,
    OptionError,
    explain_arguments,
    has_forward,
    require_module,
)
from ckpt_wrap._in_place import warn_of_own_switch
from ckpt_wrap._plan import Plan, count_elements, make_step

Blocks = list[tuple[str, nn.Module]]
_STAGES_GROW = 3.0  # the largest entry has so many times the parameters of the smallest


@explain_arguments
def checkpoint_layers_(
    model: nn.Module, every: int = 1, offload: bool | str | os.PathLike[str] = False
) -> Plan:
    """Find the repeated blocks of a model and checkpoint them in place.

    Args:
        model: for example a transformer: its decoder layers are found and checkpointed.
        every: checkpoint every n-th block of each list, starting with the first.
        offload: also offload the inputs of these blocks: True for host memory, or the path of an
            existing folder. Tensors of the CPU are only moved to a folder.

    Returns:
        The plan that was applied: print it to see which blocks were found.

    Raises:
        ModuleError: not an `nn.Module`, or one without repeated blocks.
        OptionError: `every` is not an int of at least 1, or `offload` is not one of the above.

    Example:
        >>> block = lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        >>> model = nn.Sequential(nn.Linear(2, 4), *[block() for _ in range(4)])
        >>> print(checkpoint_layers_(model, every=2))
        action      modules  class       count  parameters  options
        checkpoint  1, 3     Sequential      2          40
    """
    require_module(model, "checkpoint_layers_")
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise OptionError(
            f"ckpt_wrap.checkpoint_layers_: option 'every' is {every!r}, but it must be an int of "
            "at least 1. Pass 1 for all blocks, 2 for every second."
        )
    if not isinstance(offload, (bool, str, os.PathLike)):
        raise OptionError(
            f"ckpt_wrap.checkpoint_layers_: option 'offload' is {offload!r}, but it must be a bool "
            "or a folder. Pass True for host memory."
        )
    found = [blocks[::every] for blocks in find_layers(model)]
    if not found:
        raise ModuleError(
            f"ckpt_wrap.checkpoint_layers_: model {type(model).__name__} has no nn.ModuleList or "
            "nn.Sequential with two blocks of one class. Call checkpoint_ on its blocks."
        )
    steps = [make_step(n, block, "checkpoint", {}) for blocks in found for n, block in blocks]
    if offload:
        options = {"to": "cpu" if offload is True else offload}
        steps += [
            make_step(n, block, "offload", options) for blocks in found for n, block in blocks
        ]
    warn_of_own_switch(model, "checkpoint_layers_")
    plan = Plan(tuple(steps))
    plan.apply(model)
    return plan


def find_layers(model: nn.Module, prefix: str = "") -> list[Blocks]:
    """Lists of repeated blocks, each with the names and modules of its blocks."""
    groups = _groups(model, prefix)
    if groups and not _are_stages(groups):
        return groups
    inner = []
    for name, child in model.named_children():
        if "expert" not in name:
            inner += find_layers(child, f"{prefix}.{name}" if prefix else name)
    return inner or groups


def _groups(container: nn.Module, prefix: str) -> list[Blocks]:
    """The entries of a list by class, where a class is repeated."""
    if not isinstance(container, (nn.ModuleList, nn.Sequential)):
        return []
    blocks = [
        (f"{prefix}.{name}" if prefix else name, block)
        for name, block in container.named_children()
        if has_forward(block) and any(True for _ in block.children()) and count_elements(block)
    ]
    count = Counter(type(block) for _, block in blocks)
    return [
        [(name, block) for name, block in blocks if type(block) is kind]
        for kind, number in count.items()
        if number > 1
    ]


def _are_stages(groups: list[Blocks]) -> bool:
    for group in groups:
        sizes = [count_elements(block) for _, block in group]
        if max(sizes) > _STAGES_GROW * min(sizes) and all(find_layers(b) for _, b in group):
            return True
    return False
