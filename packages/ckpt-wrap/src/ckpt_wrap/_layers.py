"""Find the repeated blocks of a model, and checkpoint them.

A model's blocks are the entries of an `nn.ModuleList` or `nn.Sequential` of which at least two have
the same class, and submodules of their own. Of nested lists the outermost counts, unless its
entries grow with the depth of the model: these are stages, and the lists inside them count. Lists
of experts are no blocks: each token runs only some of them.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from dataclasses import dataclass

from torch import nn

from ckpt_wrap._apply import count_elements
from ckpt_wrap._errors import ModuleError, OptionError
from ckpt_wrap._where import has_forward
from ckpt_wrap.checkpointing._options import require_module
from ckpt_wrap.modules._in_place import checkpoint_, offload_, tell_name
from ckpt_wrap.modules._subclass import require_changeable
from ckpt_wrap.modules._switches import warn_of_own_switch

_STAGES_GROW = 3.0  # the largest entry has so many times the parameters of the smallest


@dataclass(frozen=True, slots=True)
class LayerList:
    """One list of repeated blocks.

    Args:
        name: of the list, in the model.
        class_name: of the blocks.
        blocks: how many there are.
        checkpointed: names of those that are checkpointed.
    """

    name: str
    class_name: str
    blocks: int
    checkpointed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Layers:
    """The blocks that `checkpoint_layers_` has found; prints as a table.

    Args:
        lists: one for each list of blocks and class, in the order of the model.
        every: the n-th blocks that are checkpointed.
        offload: whether the inputs of the blocks are offloaded.
    """

    lists: tuple[LayerList, ...]
    every: int
    offload: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all checkpointed blocks."""
        return tuple(name for found in self.lists for name in found.checkpointed)

    def __str__(self) -> str:
        rows = [
            (found.name or "(model)", found.class_name, f"{len(found.checkpointed)}/{found.blocks}")
            for found in self.lists
        ]
        rows.insert(0, ("list", "class", "checkpointed"))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        return "\n".join([*lines, "inputs are offloaded"] if self.offload else lines)


def checkpoint_layers_(
    model: nn.Module, every: int = 1, offload: bool | str | os.PathLike[str] = False
) -> Layers:
    """Find the repeated blocks of a model and checkpoint them in place.

    Args:
        model: for example a transformer: its decoder layers are found and checkpointed.
        every: checkpoint every n-th block of each list, starting with the first.
        offload: also offload the inputs of these blocks: True for host memory, or the path of an
            existing folder. Tensors of the CPU are only moved to a folder.

    Returns:
        Which blocks were found; print it to see them.

    Raises:
        ModuleError: not an `nn.Module`, or one without repeated blocks.
        OptionError: `every` is not an int of at least 1, or `offload` is not one of the above.

    Example:
        >>> block = lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        >>> model = nn.Sequential(nn.Linear(2, 4), *[block() for _ in range(4)])
        >>> print(checkpoint_layers_(model, every=2))
        list     class       checkpointed
        (model)  Sequential  2/4
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
    found = find_layers(model)
    if not found:
        raise ModuleError(
            f"ckpt_wrap.checkpoint_layers_: model {type(model).__name__} has no nn.ModuleList or "
            "nn.Sequential with two blocks of one class. Call checkpoint_ on its blocks."
        )
    chosen = [blocks[::every] for _, blocks in found]
    for blocks in chosen:
        for name, block in blocks:
            require_changeable(block, "checkpoint_layers_", name)
    warn_of_own_switch(model, "checkpoint_layers_")
    with warnings.catch_warnings():
        # The blocks are known; a switch of the model was warned of above.
        warnings.filterwarnings("ignore", message="ckpt_wrap.checkpoint_: module")
        for _, block in (pair for blocks in chosen for pair in blocks):
            checkpoint_(block)
    for blocks in chosen:
        for name, block in blocks:
            if offload:
                offload_(block, to="cpu" if offload is True else offload)
            tell_name(block, name)
    lists = [
        LayerList(name, type(blocks[0][1]).__name__, len(blocks), tuple(n for n, _ in some))
        for (name, blocks), some in zip(found, chosen, strict=True)
    ]
    return Layers(tuple(lists), every, bool(offload))


Blocks = list[tuple[str, nn.Module]]


def find_layers(model: nn.Module, prefix: str = "") -> list[tuple[str, Blocks]]:
    """Lists of repeated blocks by name, each with the names and modules of its blocks."""
    groups = _groups(model, prefix)
    if groups and not _are_stages(groups):
        return [(prefix, group) for group in groups]
    inner = []
    for name, child in model.named_children():
        if "expert" not in name:
            inner += find_layers(child, f"{prefix}.{name}" if prefix else name)
    return inner or [(prefix, group) for group in groups]


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
