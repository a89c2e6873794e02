"""The functions that make rules."""

from __future__ import annotations

from ._decisions import Decision
from ._matching import OpEntry, entry_of
from ._policies import Policy, check_policy
from ._rules import (
    RECOMPUTE_ALL,
    Always,
    EveryNth,
    FlopRule,
    NameRule,
    Offloaded,
    OpRule,
    Scoped,
    ShapeRule,
    SizeRule,
)


def save_all() -> Policy:
    """Save the output of every operator."""
    return Always(Decision.SAVE)


def recompute_all() -> Policy:
    """Recompute everything: full checkpointing."""
    return RECOMPUTE_ALL


def save_ops(*ops: OpEntry) -> Policy:
    """Save every output of the named operators.

    Args:
        ops: overloads, packets, names ("aten.mm", "ns::op"), globs or catalogue groups.

    Raises:
        PolicyError: no entry, or a name without wildcard that no operator has.

    Example:
        >>> save_ops("aten.mm", "aten._scaled_dot_product_*").entries
        ('aten.mm', 'aten._scaled_dot_product_*')
    """
    return OpRule(_entries(ops, "save_ops"), Decision.SAVE)


def recompute_ops(*ops: OpEntry) -> Policy:
    """Recompute every output of the named operators, unless an earlier rule decides.

    Example:
        >>> recompute_ops("aten.max").answer.value
        'recompute'
    """
    return OpRule(_entries(ops, "recompute_ops"), Decision.RECOMPUTE)


def save_every_nth(*ops: OpEntry, n: int, phase: int = 0) -> Policy:
    """Save every n-th call of the named operators, counted together from 0 in each forward.

    Args:
        ops: as for `save_ops`.
        n: distance between saved calls; at least 1.
        phase: number of the first saved call; 0 <= phase < n.

    Example:
        >>> save_every_nth("aten.mm", n=2).phase
        0
    """
    return EveryNth(_entries(ops, "save_every_nth"), n, phase)


def save_named(*labels: str, missing_ok: bool = False) -> Policy:
    """Save tensors with one of these names, given by `checkpoint_name`; globs are allowed.

    Args:
        labels: names, or globs over names.
        missing_ok: accept names that no tensor has. Otherwise the first backward raises
            `UnmatchedNameError` for a name that no region of its forward had.

    Example:
        >>> save_named("attn_*").labels
        ('attn_*',)
    """
    return NameRule(labels, Decision.SAVE, missing_ok)


def save_modules(*paths: str, missing_ok: bool = False) -> Policy:
    """Save every output made inside modules whose path matches; arguments as for `scoped`.

    Example:
        >>> save_modules("attn").modules
        ('attn',)
    """
    return Scoped(save_all(), paths, missing_ok)


def scoped(policy: Policy, *paths: str, missing_ok: bool = False) -> Policy:
    """Apply `policy` only inside some modules.

    Args:
        policy: any policy.
        paths: globs over module paths. A glob matches a run of path components: "attn"
            matches inside "blocks.3.attn.out" and inside "attn". Paths start below the module
            that is checkpointed.
        missing_ok: accept paths of no module, as on ranks that hold other parts of a model.
            Otherwise the first backward raises `UnmatchedNameError` for a path that no region
            of its forward had.

    Example:
        >>> scoped(save_ops("aten.mm"), "attn", "blocks.0.*").modules
        ('attn', 'blocks.0.*')
    """
    check_policy(policy, where="scoped")
    return Scoped(policy, paths, missing_ok)


def save_by_bytes(*, at_least: int = 0, at_most: int | None = None) -> Policy:
    """Save outputs of `at_least` to `at_most` bytes.

    Example:
        >>> save_by_bytes(at_most=4096).at_most
        4096
    """
    return SizeRule(at_least, at_most)


def save_by_shape(*shapes: tuple[int | None, ...]) -> Policy:
    """Save outputs of one of these shapes; None matches any size.

    Example:
        >>> save_by_shape((None, 256)).shapes
        ((None, 256),)
    """
    return ShapeRule(tuple(tuple(s) if isinstance(s, list) else s for s in shapes))


def save_by_flops(*, at_least: int) -> Policy:
    """Save outputs of operators that do `at_least` floating point operations.

    Example:
        >>> save_by_flops(at_least=10**9).at_least
        1000000000
    """
    return FlopRule(at_least)


def offload(*what: OpEntry | Policy) -> Policy:
    """Keep results of these operators, or the values that a policy saves, in host memory.

    Args:
        what: operators as for `save_ops`, or one policy.

    Example:
        >>> offload("aten.mm").answer.value
        'offload'
        >>> policy = offload(save_by_bytes(at_least=2**20))
    """
    if len(what) == 1 and isinstance(what[0], Policy):
        return Offloaded(what[0])
    return OpRule(_entries(what, "offload"), Decision.OFFLOAD)


def _entries(ops: tuple[OpEntry | Policy, ...], where: str) -> tuple[str, ...]:
    return tuple(entry_of(each, where=where) for each in ops)
