"""Find the repeated blocks of a model, and record their operators in a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from .._errors import BudgetError
from .._torch_compat._module_calls import around_calls, is_compiled, original
from .._watching_mode import WatchingMode
from ..policies._decisions import Decision
from ._levels import COSTLY

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


def called_again(model: nn.Module, run: Callable[[], object]) -> tuple[tuple[str, nn.Module], ...]:
    """Return the outermost modules with children that one step calls more than once, by path."""
    calls: Counter[nn.Module] = Counter()
    blocks = list(filter(_is_block, model.modules()))

    def count(number: int, *_: Any) -> None:
        calls[blocks[number]] += 1

    with around_calls(blocks, count):
        run()
    return tuple(_outermost("", model, lambda module: calls[module] > 1))


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


class Operators(WatchingMode):
    """Records the costly operators of each region, and the order in which regions begin.

    Attributes:
        of: by path, the costly operators that ran there.
    """

    def __init__(self, regions: Sequence[tuple[str, nn.Module]]) -> None:
        super().__init__()
        self.of: dict[str, dict[Any, None]] = {}
        self._inside: list[str] = []
        self._paths = [path for path, _ in regions]
        self._around = around_calls([module for _, module in regions], self._begin, self._end)

    def __enter__(self) -> Operators:
        self._around.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._around.__exit__(*error)

    def _begin(self, number: int, *_: Any) -> None:
        self.of.setdefault(self._paths[number], {})
        self._inside.append(self._paths[number])

    def _end(self, *_: Any) -> None:
        self._inside.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._inside and COSTLY.constant(func) is Decision.SAVE:
            self.of[self._inside[-1]][func] = None
        return func(*args, **(kwargs or {}))
