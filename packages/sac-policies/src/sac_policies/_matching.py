"""Torch: how an entry of a policy names operators.

An entry is one of: an overload "aten.mm.default"; a packet "aten.mm", for all its overloads;
either with "::" after the namespace; a glob "aten._scaled_dot_product_*"; a group of the
catalogue "@matmuls". Operators given as objects become their names, so policies stay frozen,
picklable and the same on every rank.
"""

from __future__ import annotations

import difflib
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import torch

from ._catalogue import CATALOGUE, Group, group_named
from ._errors import PolicyError, did_you_mean
from ._frames import user_line
from ._torch_compat import registered_operators
from ._views import Operator

OpEntry = str | Group | Operator
"""What users may write for operators: a name, a glob, an operator, a packet or a group."""

_GLOB = frozenset("*?[")


def entry_of(given: OpEntry, *, where: str) -> str:
    """Return the text form of one entry.

    Raises:
        PolicyError: not an entry, or a name that no registered operator has.
    """
    if isinstance(given, Group):
        return given.entry
    if isinstance(given, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(given)
    if isinstance(given, torch._ops.HigherOrderOperator):
        return given.name()
    if not (isinstance(given, str) and given):
        raise PolicyError(
            f"sac_policies.{where}: entry {given!r} is a {type(given).__name__}, but operators "
            "are named by text or given as torch.ops objects. Write for example 'aten.mm'."
        )
    text = given.replace("::", ".")
    if text.startswith("@"):
        return group_named(text, where=where).entry
    if not _GLOB & set(text):
        _check_exists(text, where)
    return text


@cache
def matches(entry: str, op: Operator) -> bool:
    """Whether `entry` names `op`.

    Example:
        >>> matches("aten.mm", torch.ops.aten.mm.default)
        True
    """
    if entry.startswith("@"):
        return any(matches(each, op) for each in group_named(entry, where="matches").names)
    full = name_of(op)
    packet = full.rpartition(".")[0] if isinstance(op, torch._ops.OpOverload) else full
    return any(
        fnmatchcase(name, entry) if _GLOB & set(entry) else name == entry for name in (full, packet)
    )


def matches_any(entries: tuple[str, ...], op: Operator) -> bool:
    """Whether one of `entries` names `op`."""
    return any(matches(entry, op) for entry in entries)


def name_of(op: Operator) -> str:
    """Name an operator as policies and plans do: "aten.mm.default"."""
    return op.name() if isinstance(op, torch._ops.HigherOrderOperator) else str(op)


def _check_exists(text: str, where: str) -> None:
    namespace, _, rest = text.partition(".")
    packet, _, overload = rest.partition(".")
    if not rest and _is_higher_order(text):
        return
    known = _names_in(namespace) if rest else _bare_names(text)
    if not known and namespace != "aten":
        return  # a library that is not imported yet; an unmatched entry warns when it runs
    found = _packet(namespace, packet)
    if found is not None and (not overload or overload in found.overloads()):
        return
    names = known if found is None else [f"{namespace}.{packet}.{o}" for o in found.overloads()]
    full = text if rest else f"aten.{text}"
    hint = did_you_mean(full, names, otherwise="List them with torch.ops, or write a glob.")
    raise PolicyError(
        f"sac_policies.{where}: operator {text!r} is not registered (at {user_line()}), but an "
        f"entry without wildcards names one operator. {hint}"
    )


def _packet(namespace: str, name: str) -> Any:
    return getattr(getattr(torch.ops, namespace), name, None) if name else None


def _is_higher_order(name: str) -> bool:
    return isinstance(getattr(torch.ops.higher_order, name, None), torch._ops.HigherOrderOperator)


def _bare_names(text: str) -> list[str]:
    """Names that one without a namespace may stand for: "mm" for "aten.mm"."""
    bare = [name for group in CATALOGUE for name in group.names if "." not in name]
    close = difflib.get_close_matches(text, bare, cutoff=0.8)
    return [*close, *({f"aten.{text}"} & set(_names_in("aten")))]


def _names_in(namespace: str) -> list[str]:
    prefix = f"{namespace}::"
    found = (name for name in registered_operators() if name.startswith(prefix))
    return sorted({f"{namespace}.{name[len(prefix) :].split('.')[0]}" for name in found})
