"""Find the repeated blocks of a model, and record calls of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from .._errors import BudgetError
from .._torch_compat import backward_id
from .._torch_compat._module_calls import around_calls, is_compiled, original

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def repeating(model: nn.Module) -> tuple[tuple[str, nn.Module], ...]:
    """Return the modules that repeat, outermost first, with their paths.

    A module repeats if a container has several modules of its class. Other modules of that class
    count wherever they are. Modules without children do not count. Of a container of blocks, the
    blocks count. If no container has several modules of one class, children of any parent may
    count; else the model is one region.

    Example:
        >>> block = lambda: nn.TransformerEncoderLayer(8, 2)
        >>> [path for path, _ in repeating(nn.Sequential(nn.Linear(8, 8), block(), block()))]
        ['1', '2']
    """
    found = tuple(_below("", model, _CONTAINERS)) or tuple(_below("", model, nn.Module))
    kinds = {kind_of(module) for _, module in found}
    several = tuple(_outermost("", model, lambda module: kind_of(module) in kinds))
    return several or (("", model),)


def inside(regions: Sequence[tuple[str, nn.Module]]) -> tuple[tuple[str, nn.Module], ...]:
    """Return the blocks of lists inside regions, such as stages; () if no region has a list.

    A region without such blocks stays; so does a compiled region, in which Python calls no modules.

    Example:
        >>> stage = nn.Module()
        >>> stage.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2) for _ in range(2))
        >>> [path for path, _ in inside([("stages.0", stage)])]
        ['stages.0.blocks.0', 'stages.0.blocks.1']
    """
    called = {path: module for path, module in regions if not is_compiled(module)}
    blocks = [each for one in called.items() for each in _below(*one, _CONTAINERS)]
    kinds = {kind_of(block) for _, block in blocks}
    found: list[tuple[str, nn.Module]] = []
    for path, module in regions:
        wanted = _outermost(path, module, lambda each: kind_of(each) in kinds)
        found += (tuple(wanted) if path in called else ()) or [(path, module)]
    return tuple(found) if kinds else ()


def kind_of(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module, or of the module inside its compiled wrapper.

    Example:
        >>> kind_of(nn.Linear(2, 2)).__name__
        'Linear'
    """
    return type(original(module))


def called_again(model: nn.Module, calls: Calls) -> tuple[tuple[str, nn.Module], ...]:
    """Return the outermost modules with children that a step calls more than once, by path."""
    return tuple(
        _outermost("", model, lambda module: _is_block(module) and calls.times[module] > 1)
    )


def check_compiled(model: nn.Module, regions: Sequence[tuple[str, nn.Module]]) -> None:
    """Raise a `BudgetError` for regions inside compiled code, where Python does not call them."""
    for path, _ in regions:
        names = path.split(".") if path else []
        for count in range(len(names)):
            above = ".".join(names[:count])
            module = model.get_submodule(above)
            if is_compiled(module):
                what = f"module {above!r}" if above else "the model"
                raise BudgetError(
                    f"sac_policies.fit_: {what} ({kind_of(module).__name__}) is compiled "
                    "as a whole, but blocks are checkpointed one by one, where Python calls them. "
                    "Compile it after fit_, or compile each of its blocks instead: block.compile()."
                )


def _outermost(
    path: str, module: nn.Module, wanted: Callable[[nn.Module], bool]
) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        below = f"{path}.{name}" if path else name
        if wanted(child):
            yield below, child
        else:
            yield from _outermost(below, child, wanted)


def _below(path: str, module: nn.Module, parents: Any) -> Iterator[tuple[str, nn.Module]]:
    children = list(module.named_children())
    counts = Counter(
        kind_of(child) for _, child in children if isinstance(module, parents) and _is_block(child)
    )
    for name, child in children:
        below = f"{path}.{name}" if path else name
        if counts[kind_of(child)] > 1:
            yield below, child
        else:
            yield from _below(below, child, parents)


def _is_block(module: nn.Module) -> bool:
    module = original(module)
    children = list(module.children())
    if isinstance(module, nn.Sequential):  # a block of layers, or a stage of blocks
        return bool(children) and not any(map(_is_block, children))
    return bool(children) and not isinstance(module, _CONTAINERS)


class Calls:
    """Records the modules that a step calls from Python, as a context.

    Attributes:
        times: number of calls in forward, by module, in the order in which modules begin.
        recomputed: modules that are called in backward, by other code.
    """

    def __init__(self, model: nn.Module) -> None:
        self.times: Counter[nn.Module] = Counter()
        self.recomputed: dict[nn.Module, None] = {}
        self._modules = [*dict.fromkeys((model, *_called_from_python(model)))]

    def __enter__(self) -> Calls:
        self._around = around_calls(self._modules, self._begin)
        self._around.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._around.__exit__(*error)

    def ran(self, regions: Iterable[tuple[str, nn.Module]]) -> list[str]:
        """Return the paths of the regions that the step called, in order."""
        first = {module: at for at, module in enumerate(self.times)}
        found: list[tuple[int, str]] = []
        for path, region in regions:
            # A segment is not called; its children are.
            parts = [region] if region in self._modules else [*region.children()]
            began = [first[each] for each in parts if each in first]
            if began:
                found.append((min(began), path))
        return [path for _, path in sorted(found)]

    def _begin(self, number: int, *_: Any) -> None:
        if backward_id() >= 0:
            self.recomputed[self._modules[number]] = None
        else:
            self.times[self._modules[number]] += 1


def _called_from_python(module: nn.Module) -> Iterator[nn.Module]:
    if is_compiled(module) or isinstance(module, torch.jit.ScriptModule):
        return
    for child in module.children():
        yield child
        yield from _called_from_python(child)
