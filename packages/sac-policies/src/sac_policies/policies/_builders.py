"""The functions that make rules, with their arguments checked."""

from __future__ import annotations

from .._errors import PolicyError, shown
from ._checked import MAX_ENTRIES, is_count, text_problem
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
    is_size,
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
        PolicyError: no entry, more than 4,096, one of more than 1,000 characters, or a name
            without wildcard that no operator has.

    Example:
        >>> save_ops("aten.mm", "aten._scaled_dot_product_*").entries
        ('aten.mm', 'aten._scaled_dot_product_*')
    """
    return OpRule(_entries(ops, "save_ops"), Decision.SAVE)


def recompute_ops(*ops: OpEntry) -> Policy:
    """Recompute every output of the named operators, if it is the first rule to decide.

    Example:
        >>> recompute_ops("aten.max").answer.value
        'recompute'
    """
    return OpRule(_entries(ops, "recompute_ops"), Decision.RECOMPUTE)


def save_every_nth(*ops: OpEntry, n: int, phase: int = 0) -> Policy:
    """Save one call in `n` of the named operators, counted together from 0 in each forward.

    Args:
        ops: as for `save_ops`.
        n: distance between saved calls, calls; at least 1.
        phase: number of the first saved call; 0 <= phase < n.

    Example:
        >>> save_every_nth("aten.mm", n=2).phase
        0
    """
    if not (is_count(n) and is_count(phase) and phase < n):
        raise PolicyError(
            f"sac_policies.save_every_nth: n {shown(n)} and phase {shown(phase)} pick no call, but "
            "0 <= phase < n in whole numbers is needed. Use n=2 for the first of every two."
        )
    return EveryNth(_entries(ops, "save_every_nth"), n, phase)


def save_named(*labels: str, missing_ok: bool = False) -> Policy:
    """Save tensors to which `name` gave one of these names; globs are allowed.

    Args:
        labels: names, or globs over names.
        missing_ok: accept names that no tensor is given. Otherwise the first backward raises
            `UnmatchedNameError` for a name that no region of its forward had.

    Example:
        >>> save_named("attn_*").labels
        ('attn_*',)
    """
    return NameRule(_texts(labels, "save_named", "name"), Decision.SAVE, missing_ok)


def save_modules(*paths: str, missing_ok: bool = False) -> Policy:
    """Save every output made inside modules whose path matches; arguments as for `scoped`.

    Example:
        >>> save_modules("attn").modules
        ('attn',)
    """
    return Scoped(save_all(), _texts(paths, "save_modules", "module path"), missing_ok)


def scoped(policy: Policy, *paths: str, missing_ok: bool = False) -> Policy:
    """Ask `policy` only inside some modules.

    Args:
        policy: any policy.
        paths: globs over module paths. A glob matches a run of path components: "attn"
            matches inside "blocks.3.attn.out" as inside "attn". Paths start below the module
            that is checkpointed.
        missing_ok: accept paths of no module, as where ranks hold other parts of a model.
            Otherwise the first backward raises `UnmatchedNameError` for a path that no region
            of its forward had.

    Example:
        >>> scoped(save_ops("aten.mm"), "attn", "blocks.0.*").modules
        ('attn', 'blocks.0.*')
    """
    check_policy(policy, where="scoped")
    return Scoped(policy, _texts(paths, "scoped", "module path"), missing_ok)


def save_by_bytes(*, at_least: int = 0, at_most: int | None = None) -> Policy:
    """Save outputs of `at_least` to `at_most` bytes.

    Example:
        >>> save_by_bytes(at_most=4096).at_most
        4096
    """
    most = at_least if at_most is None else at_most
    if not (is_count(at_least) and is_count(most) and at_least <= most):
        raise PolicyError(
            f"sac_policies.save_by_bytes: bounds {shown(at_least)} to {shown(at_most)} bytes hold "
            "no size, "
            "but 0 <= at_least <= at_most in whole bytes is needed. Swap or drop one of them, or "
            "write parse_size('1 MiB')."
        )
    return SizeRule(at_least, at_most)


def save_by_shape(*shapes: tuple[int | None, ...]) -> Policy:
    """Save outputs of one of these shapes; None stands for any size.

    Example:
        >>> save_by_shape((None, 256)).shapes
        ((None, 256),)
    """
    for shape in _some(shapes, "save_by_shape", "shape"):
        if not (isinstance(shape, (tuple, list)) and all(map(is_size, shape))):
            raise PolicyError(
                f"sac_policies.save_by_shape: shape {shown(shape)} is not a shape, but a shape is "
                "a tuple of whole numbers and None. Write for example (None, 256)."
            )
    return ShapeRule(tuple(tuple(shape) for shape in shapes))


def save_by_flops(*, at_least: int) -> Policy:
    """Save outputs of operators that do `at_least` floating point operations.

    Example:
        >>> save_by_flops(at_least=10**9).at_least
        1000000000
    """
    if not is_count(at_least):
        raise PolicyError(
            f"sac_policies.save_by_flops: at_least {shown(at_least)} is not a count, but "
            "operators count in whole numbers from 0. Use 1 for every operator that has a known "
            "count."
        )
    return FlopRule(at_least)


def offload(*what: OpEntry | Policy) -> Policy:
    """Keep in host memory what these operators return, or what a policy would save.

    Example:
        >>> offload("aten.mm") == offload(save_ops("aten.mm"))
        True
    """
    if len(what) == 1 and isinstance(what[0], Policy):
        return Offloaded(what[0])
    return Offloaded(OpRule(_entries(what, "offload"), Decision.SAVE))


def _entries(ops: tuple[OpEntry | Policy, ...], where: str) -> tuple[str, ...]:
    return tuple(entry_of(each, where=where) for each in _some(ops, where, "operator"))


def _texts(given: tuple[str, ...], where: str, what: str) -> tuple[str, ...]:
    if problem := text_problem(_some(given, where, what), what):
        raise PolicyError(
            f"sac_policies.{where}: {problem}. Give several one after the other, not as a list."
        )
    return given


def _some(given: tuple, where: str, what: str) -> tuple:
    if not given:
        raise PolicyError(
            f"sac_policies.{where}: no {what} is given, but at least one is needed. "
            "Use recompute_all() to keep nothing."
        )
    if len(given) > MAX_ENTRIES:
        raise PolicyError(
            f"sac_policies.{where}: {len(given)} times a {what} is given, but {MAX_ENTRIES} are "
            "the most. Write a glob, or a function as policy."
        )
    return given
