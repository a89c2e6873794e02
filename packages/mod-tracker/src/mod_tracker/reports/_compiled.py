"""What a report says of modules that ran compiled: nothing inside them is seen apart."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from torch import nn

from .._attribution import BACKWARD, RECOMPUTE, Attribution
from .._compile_backend import GraphOperator, SeenGraph
from .._record import Path
from .._torch_compat import ModuleStack, is_compiled
from ._flop_counter import Counts, FlopCounter

SHOWN = 3
"""Names that are written out."""


def compiled_modules(attribution: Attribution) -> list[str]:
    """Return the names of modules that were called and are compiled, in the order of their calls.

    Those inside them that ran by themselves, after a graph break for example, are seen as ever.
    """
    found: dict[str, None] = {}
    for state in list(attribution.states):
        for path in state.walk():
            called = None if path.guard is None else path.guard()
            if called is not None and path.name and is_compiled(called):
                found[path.name] = None
    return list(found)


class GraphFlops:
    """Gives what a compiled graph has counted to the modules that its operators come from.

    Rule 1: that is done where what ran has the FLOPs of the compiler's graph in sum, and every
            module that the graph names is inside the one that ran. Else all of it is of that one.
    Rule 2: operators of the forward in the graph of a backward run again: a recompute.

    Attributes:
        apart: names of the modules inside which others were told apart.
        whole: names of those in which a graph was not.
    """

    def __init__(self, counter: FlopCounter, attribution: Attribution) -> None:
        self.apart: set[str] = set()
        self.whole: set[str] = set()
        self._counter, self._attribution = counter, attribution
        self._amounts: dict[SeenGraph, list[_Amount] | None] = {}
        self._shares: dict[tuple[SeenGraph, Path], list[_Share] | None] = {}

    def run(self, graph: SeenGraph, run: Callable[[], Any]) -> Any:
        """Run a graph, and count it."""
        counter = self._counter
        if not counter.counts_here():
            return run()
        outer, counted = counter.counts, Counts()
        counter.counts = counted
        try:
            return run()
        finally:
            counter.counts = outer
            outer.add(self._divided(graph, counted))

    @property
    def all_apart(self) -> set[str]:
        """Names of the modules inside which others were told apart in every graph."""
        return self.apart - self.whole

    def notes(self) -> tuple[str, ...]:
        """Return what a report has to say of them."""
        if not self.all_apart:
            return ()
        names = _shown(sorted(self.all_apart))
        return (f"FLOPs inside compiled modules are by the compiler's graph: {names}",)

    def _divided(self, graph: SeenGraph, counted: Counts) -> Counts:
        call, phase = self._attribution.locate()
        path = call[0]
        if (graph, path) not in self._shares:
            self._shares[graph, path] = self._shares_of(graph, path)
        shares = self._shares[graph, path]
        if shares is None or sum(share.amount for share in shares) != counted.total:
            self.whole.add(path.name)
            return counted
        self.apart.add(path.name)
        divided = Counts()
        divided.total, divided.uncounted = counted.total, counted.uncounted
        for share in shares:
            again = share.of_forward and phase == BACKWARD
            divided.amounts[share.path, RECOMPUTE if again else phase, share.name] += share.amount
        return divided

    def _shares_of(self, graph: SeenGraph, path: Path) -> list[_Share] | None:
        if graph not in self._amounts:
            self._amounts[graph] = self._amounts_of(graph)
        amounts, base = self._amounts[graph], path.module()
        if amounts is None or base is None:
            return None
        inside = {id(module): module for module in base.modules()}
        shares = []
        for amount in amounts:
            below = self._below(path, inside, amount.of.modules)
            if below is None:
                return None
            name = str(amount.of.operator)
            shares.append(_Share(below, amount.of.of_forward, name, amount.amount))
        return shares

    def _amounts_of(self, graph: SeenGraph) -> list[_Amount] | None:
        if graph.operators is None:
            return None
        found = []
        for of in graph.operators:
            formula = self._counter.formulas.get(of.operator)
            try:
                amount = (
                    0 if formula is None else int(formula(*of.args, **of.kwargs, out_val=of.out))
                )
            except Exception:  # of a formula of anybody's
                return None
            if amount:
                found.append(_Amount(of, amount))
        return found

    def _below(self, path: Path, inside: dict[int, nn.Module], modules: ModuleStack) -> Path | None:
        state = self._attribution.state() or self._attribution.open_state()
        base = path.module()
        for key, name, kind in modules:
            module = inside.get(key)
            if module is None:  # code that several modules share was compiled for the first of them
                module = _submodule(base, name.partition("].")[2])
            if module is None or type(module) is not kind:
                return None
            if module is not base:
                known = path.children.get(id(module))
                path = known or self._attribution.add_path(state, (path, 0, None), module)
        return path


def _none(*args: Any, **kwargs: Any) -> int:
    return 0


def _submodule(base: nn.Module, name: str) -> nn.Module | None:
    try:
        return base.get_submodule(name)
    except AttributeError:
        return None


class _Amount(NamedTuple):
    of: GraphOperator
    amount: int


class _Share(NamedTuple):
    path: Path
    of_forward: bool
    name: str
    amount: int


def compiled_notes(
    attribution: Attribution, *, bytes_missing: bool = False, apart: Collection[str] = ()
) -> tuple[str, ...]:
    """Return what a report has to say of them.

    Args:
        attribution: where the report looked.
        bytes_missing: the report is of memory, and of what compiled code allocates only the
            operators that it calls are seen.
        apart: names of those inside which modules were told apart.
    """
    names = [name for name in compiled_modules(attribution) if name not in apart]
    if not names:
        return ()
    missing = "; bytes that compiled code allocates itself are missing" if bytes_missing else ""
    return (
        f"compiled, and seen as a whole: {_shown(names)}; what runs inside is charged to it"
        f"{missing}. Compile parts one by one, part.compile(), to see each, or measure without "
        "compiling",
    )


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
