"""How the output of an autograd node is rebuilt from what the node itself saved.

Rule 1. A rule reads only the node's own saved tensors, and a leaf tensor at one of the node's
        edges (the bias of addmm is saved by nobody, but its AccumulateGrad node knows it).
Rule 2. A rule runs the operator that ran in the forward, on equal bits laid out equally, so its
        result has equal bits and an equal layout. Where the node does not know an argument (the
        eps of layer_norm) the rule continues from saved statistics instead.
Rule 3. `Rule.works` holds Rule 2 against torch's operator, once for each dtype and device,
        before the rule is used there. A rule that fails, or reads an attribute this torch does
        not have, is not used: the value is kept.
Rule 4. autograd saves an operand only where the other one needs a gradient; `needs` lists the
        edges that must be there for all operands to be.
Rule 5. What autograd did not save is found at the node's edges. `through` takes every operand,
        each saved or found there; it too is held against torch's operator before it is used.
Rule 6. What a `guess` gives is used where the value's proof shows that it is right, and where
        that is known without waiting; else `rebuild` is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, TypeVar

import torch

from ..._torch_compat import node_number
from ._calls import Calls, CallsMode

LEAF_NODE = "AccumulateGrad"
"""Name of the node that stands for a leaf."""
Node = Any  # torch.autograd.graph.Node, whose _saved_* attributes have no stubs
Edges = tuple[tuple[Node, int], ...]
"""A node's `next_functions`, which are made anew each time that they are asked for."""
Probe = Callable[[Callable[..., torch.Tensor]], torch.Tensor]
T = TypeVar("T")
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Operand:
    """One tensor that an operator reads.

    Attributes:
        edge: which of the node's edges leads to what made it.
        saved: the node's attribute where autograd saves it; "" where it never does.
        unless: the edge that must carry a gradient for autograd to save it; None where it
            always does.
    """

    edge: int
    saved: str = ""
    unless: int | None = None

    def is_saved(self, edges: Edges) -> bool:
        """Whether a node with these edges has it (Rule 4)."""
        if not self.saved:
            return False
        return self.unless is None or edges[self.unless][0] is not None


class Guess(Protocol):
    """A cheaper way to a node's first output, which may be wrong."""

    def __call__(self, node: Node) -> torch.Tensor | None:
        """Return a fresh tensor that is probably the output; None without a guess."""

    def missed(self, node: Node) -> None:
        """Be told that it was not."""


@dataclass(frozen=True)
class Rule:
    """How one kind of node is replayed.

    Attributes:
        node: name of the autograd node.
        op: the operator a policy is asked about.
        rebuild: from the node, and from the leaf where there is `leaf`, to its first output, a
            fresh tensor; None where the node saves too little.
        probes: each makes such an output from `make(*shape)`, which makes leaf tensors.
        needs: edges of the node that must carry a gradient (Rule 4).
        leaf: the edge whose leaf tensor `rebuild` reads, None without one (Rule 1).
        absent: tells from the node that the forward was given no such leaf.
        results: how many of its own results the node has saved, after all that it reads, when its
            first output is saved.
        keeps_result: the node saves its first output for itself, after all that it reads.
        through: from the node and its operands to its first output, a fresh tensor (Rule 5).
        operands: what `through` takes, in order; None where it is all of the node's edges, and
            nothing that the node saved is read.
        edge_probes: as `probes`, for `through`.
        unfit: says of a node what keeps the rule from rebuilding its output; "" where nothing does.
        runs: operators that `through` runs besides `op`: a policy that saves one of them saves
            the output.
        guess: does probably what `rebuild` does, at less cost (Rule 6).
    """

    node: str
    op: Any
    rebuild: Callable[..., torch.Tensor] | None
    probes: tuple[Probe, ...] = ()
    needs: tuple[int, ...] = ()
    leaf: int | None = None
    absent: Callable[[Node], bool] | None = None
    results: int = 0
    keeps_result: bool = False
    through: Callable[..., torch.Tensor] | None = None
    operands: tuple[Operand, ...] | None = ()
    edge_probes: tuple[Probe, ...] = ()
    unfit: Callable[[Node], str] | None = None
    runs: tuple[Any, ...] = ()
    guess: Guess | None = None

    @property
    def simple(self) -> bool:
        """Whether every node of this kind is ready."""
        any_node = not self.needs and self.leaf is None and self.unfit is None
        return any_node and self.rebuild is not None

    def run(self, node: Node, leaf: torch.Tensor | None) -> torch.Tensor:
        """Rebuild the node's first output, with this for its leaf."""
        assert self.rebuild is not None
        return self.rebuild(node) if self.leaf is None else self.rebuild(node, leaf)

    def operands_of(self, node: Node) -> tuple[Operand, ...]:
        """What `through` takes for this node."""
        return each_of(len(node.next_functions)) if self.operands is None else self.operands

    def at_edges(self, node: Node) -> list[tuple[int, tuple[Node, int]]]:
        """Which operands of `through`, by position, this node did not save, and their edges."""
        edges = node.next_functions
        operands = each_of(len(edges)) if self.operands is None else self.operands
        found = []
        for at, each in enumerate(operands):
            unless = each.unless
            if not each.saved or (unless is not None and edges[unless][0] is None):
                found.append((at, edges[each.edge] if each.edge < len(edges) else (None, 0)))
        return found

    def leaf_of(self, node: Node) -> torch.Tensor | None:
        """Return the leaf that `rebuild` reads and autograd did not save."""
        return None if self.leaf is None else leaf_at(node, self.leaf)

    def ready(self, node: Node) -> bool:
        """Whether this node saved all that `rebuild` reads."""
        if self.rebuild is None or (self.unfit is not None and self.unfit(node)):
            return False
        if self.needs:
            edges = node.next_functions
            for at in self.needs:
                if edges[at][0] is None:
                    return False
        return self.leaf is None or self._leaf_ready(node)

    def _leaf_ready(self, node: Node) -> bool:
        absent = self.absent is not None and self.absent(node)
        return absent or leaf_at(node, self.leaf) is not None

    def works(self, dtype: torch.dtype, device: str) -> bool:
        """Whether the rule gives torch's own bits for this dtype on this device (Rule 3)."""
        return not self.why_off(dtype, device)

    def works_through(self, dtype: torch.dtype, device: str) -> bool:
        """The same for `through`."""
        return self.through is not None and not _why_off(self, dtype, device, True)

    def why_off(self, dtype: torch.dtype, device: str) -> str:
        """Say what the rule did in place of giving torch's bits; "" where it gives them."""
        return _why_off(self, dtype, device, False)

    def why_off_through(self, dtype: torch.dtype, device: str) -> str:
        """The same for `through`."""
        return _why_off(self, dtype, device, True)


@cache
def each_of(count: int) -> tuple[Operand, ...]:
    """One operand for each of so many edges."""
    return tuple(map(Operand, range(count)))


@cache
def _why_off(rule: Rule, dtype: torch.dtype, device: str, through: bool) -> str:
    tried = alone(lambda: _tried(rule, dtype, device, through))
    return "could not be tried" if tried is None else tried


def alone(run: Callable[[], T]) -> T | None:
    """Run in a thread of its own, which has no dispatch modes, hooks, autocast or no_grad.

    Returns:
        What `run` returns; None where it raises.
    """
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(run()))
    thread.start()
    thread.join()
    return found[0] if found else None


def ramp(dtype: torch.dtype, device: str | torch.device) -> Callable[..., torch.Tensor]:
    """Make what makes leaves of a shape, with values that are spread evenly in no way."""

    def make(*shape: int) -> torch.Tensor:
        numel = torch.Size(shape).numel()
        spread = torch.arange(numel, dtype=torch.float64).mul_(0.7).add_(0.3).sin_().mul_(1.7)
        return spread.reshape(shape).to(device, dtype).requires_grad_()

    return make


def _tried(rule: Rule, dtype: torch.dtype, device: str, through: bool) -> str:
    make = ramp(dtype, device)
    for probe in rule.edge_probes if through else rule.probes:
        seen = Calls()
        try:
            with CallsMode(seen):
                made = probe(make)
            if type(made.grad_fn).__name__ != rule.node:
                return f"has a probe that {type(made.grad_fn).__name__} makes, not {rule.node}"
            if not made.numel():
                return "has a probe without elements"
            if not (through or rule.ready(made.grad_fn)):
                return "does not find what it reads"
        except Exception as error:  # a user's, or this operator on this dtype is another here
            return f"has a probe that raises {_line(error)}"
        if reason := _judged(rule, made, through, seen):
            return reason
    return ""


def _judged(rule: Rule, made: torch.Tensor, through: bool, seen: Calls) -> str:
    """Say what the rule did in place of rebuilding this output; "" where it did that."""
    rebuilt, raised = None, ""
    read: list[torch.Tensor] = []
    before: list[torch.Tensor] = []
    try:
        read = _saved_tensors(made.grad_fn)
        before = [each.detach().clone() for each in read]
        with torch.no_grad():
            rebuilt = _rebuilt(rule, made.grad_fn, through, seen)
    except Exception as error:  # whatever a user's rule raises, or the attribute is another here
        raised = f"raises {_line(error)}"
    if any(not same_bits(now, then) for now, then in zip(read, before, strict=True)):
        return "writes to what it reads, which backward needs as it was"
    return raised or _difference(rebuilt, made)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _saved_tensors(node: Node) -> list[torch.Tensor]:
    """What a node saved."""
    found: list[Any] = []
    kind: Any = type(node)
    for name in _saved_by(kind):
        own = name == "_raw_saved_tensors"  # of a user's function
        value = getattr(node, "saved_tensors" if own else name.replace("_raw", "", 1))
        found.extend(value if type(value) is tuple else (value,))
    return [each for each in found if each is not None]


def _difference(rebuilt: Any, made: torch.Tensor) -> str:
    """Say in what a rebuilt output is not the one that was made; "" where it is."""
    if not isinstance(rebuilt, torch.Tensor):
        return f"gives a {type(rebuilt).__name__}, not a tensor"
    for what, found, wanted in (
        ("dtype", rebuilt.dtype, made.dtype),
        ("shape", tuple(rebuilt.shape), tuple(made.shape)),
        ("strides", rebuilt.stride(), made.stride()),
    ):
        if found != wanted:
            return f"gives {what} {found}, not {wanted}"
    if not same_bits(rebuilt, made):
        other = int((_bits(rebuilt) != _bits(made)).sum())
        return f"gives other bits in {other} of {made.numel()} elements"
    return ""


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype are the same: a zero with a sign is another."""
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.view(_WORDS.get(tensor.element_size(), tensor.dtype))


def _rebuilt(rule: Rule, node: Node, through: bool, seen: Calls) -> torch.Tensor:
    if not through:
        return rule.run(node, rule.leaf_of(node))
    assert rule.through is not None
    edges = node.next_functions
    operands = [
        getattr(node, each.saved) if each.is_saved(edges) else _probed(node, at, each.edge, seen)
        for at, each in enumerate(rule.operands_of(node))
    ]
    return rule.through(node, *operands)


def _probed(node: Node, at: int, edge: int, seen: Calls) -> Any:
    """An operand that a probe's node did not save: a leaf, or what the probe gave."""
    constant = seen.operand(node, node_number(node), at)
    return leaf_at(node, edge) if constant is None else constant.read(constant.given)


def output_facts(node: Node, output: int = 0) -> Any:
    """Return what a node knows of an output: its `shape`, `dtype` and `device`; None if nothing.

    Where torch does not tell, what autograd did not save is kept.
    """
    facts = getattr(node, "_input_metadata", None)  # they are inputs of the backward
    return None if facts is None or output >= len(facts) else facts[output]


def is_unhooked(node: Node) -> bool:
    """Whether a node saved all that it did without saved-tensor hooks, as it does numbers.

    Where torch does not tell, products with a number are kept.
    """
    kind: Any = type(node)
    for name in _saved_by(kind):
        found = getattr(node, name)
        for saved in found if type(found) is tuple else (found,):  # of a function, all it saved
            if getattr(saved, "unpack_hook", saved) is not None:
                return False
    return True


@cache
def _saved_by(kind: Any) -> tuple[str, ...]:
    """The attributes that hold what nodes of a kind save of tensors."""
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def leaf_at(node: Node, edge: int | None) -> Any:
    """Return the leaf tensor whose gradient goes along an edge, None where there is none."""
    function: Any = None if edge is None else node.next_functions[edge][0]
    return function.variable if is_leaf_node(function) else None


def is_leaf_node(node: Node) -> bool:
    """Whether a node stands for a leaf, which is its `variable`."""
    return type(node).__name__ == LEAF_NODE
