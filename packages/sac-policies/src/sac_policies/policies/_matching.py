"""How an entry of a policy names operators.

An entry is one of: an overload "aten.mm.default"; a packet "aten.mm", for all its overloads;
either with "::" after the namespace; a glob "aten._scaled_dot_product_*"; a group of the
catalogue "@matmuls". Operators given as objects become their names, so policies stay frozen,
picklable and the same on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from fnmatch import translate
from functools import lru_cache
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from .._errors import PolicyError, did_you_mean, shown
from .._frames import user_line
from .._torch_compat import registered_operators
from ._catalogue import CATALOGUE, Group, group_named
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
    if isinstance(given, (OpOverload, OpOverloadPacket, HigherOrderOperator)):
        return str(given)
    if not (isinstance(given, str) and given):
        hint = "Write for example 'aten.mm'."
        if isinstance(given, (list, tuple, set)):
            hint = f"Pass entries as separate arguments: {where}(*entries)."
        elif callable(given):
            hint = _hint_for_word(getattr(given, "__name__", ""))
        raise PolicyError(
            f"sac_policies.{where}: entry {shown(given)} is a {type(given).__name__}, but an "
            f"operator is named by text or given as an object like torch.ops.aten.mm. {hint}"
        )
    text = given.replace("::", ".").removeprefix("torch.ops.")
    if text.startswith("@"):
        return group_named(text, where=where).entry
    if not _GLOB & set(text):
        if not re.fullmatch(r"\w+(\.\w+)*", text):
            raise PolicyError(
                f"sac_policies.{where}: entry {shown(given)} is not a name, but operators have "
                "letters and digits, with dots in between. Write for example 'aten.mm'."
            )
        _check_exists(text, where)
    return text


@lru_cache(maxsize=4096)
def is_named(entries: tuple[str, ...], op: Operator) -> bool:
    """Whether one of the entries names an operator.

    Example:
        >>> is_named(("aten.mm", "aten.sin*"), torch.ops.aten.mm.default)
        True
    """
    return any(map(_pattern(entries), names_of(op)))


def unmatched_entries(entries: tuple[str, ...], ops: Iterable[Operator]) -> tuple[str, ...]:
    """Return all entries if none names one of `ops`.

    Lists are often written for several models and devices, so one matching entry is enough.

    Example:
        >>> unmatched_entries(("aten.mm", "aten.s*"), [torch.ops.aten.sin.default])
        ()
    """
    return () if any(is_named(entries, op) for op in ops) else entries


@lru_cache(maxsize=256)
def _pattern(entries: tuple[str, ...]) -> Callable[[str], Any]:
    names = (
        name
        for entry in entries
        for name in (group_named(entry).names if entry.startswith("@") else (entry,))
    )
    return re.compile("|".join(map(translate, names))).match


def names_of(op: Operator) -> tuple[str, str]:
    """Return an operator's overload name and packet name."""
    full = str(op)
    return full, full.rpartition(".")[0] if isinstance(op, OpOverload) else full


def _check_exists(text: str, where: str) -> None:
    namespace, _, rest = text.partition(".")
    packet, _, overload = rest.partition(".")
    if not rest and (_is_higher_order(text) or any(text in group.names for group in CATALOGUE)):
        return
    found = _packet(namespace, packet)
    if found is not None and (not overload or overload in found.overloads()):
        return
    # Listing every operator takes milliseconds, so this is done only for names that are not found.
    known = _names_in(namespace) if rest else []
    if rest and not known and namespace != "aten":
        return  # a library that is not imported yet; an unmatched entry warns when it runs
    if found is not None:
        known = [f"{namespace}.{packet}.{each}" for each in found.overloads()]
    hint = (
        did_you_mean(text, known, otherwise="List them with torch.ops, or write a glob.")
        if rest
        else _hint_for_word(text)
    )
    raise PolicyError(
        f"sac_policies.{where}: operator {shown(text)} is not registered (at {user_line()}), but "
        f"an entry without wildcards names one operator. {hint}"
    )


def _packet(namespace: str, name: str) -> Any:
    try:
        found = getattr(getattr(torch.ops, namespace), name, None) if name else None
    except RuntimeError:  # torch raises for names that C++ does not allow
        return None
    # A namespace is a module and has other attributes too.
    return found if isinstance(found, OpOverloadPacket) else None


def _is_higher_order(name: str) -> bool:
    return isinstance(getattr(torch.ops.higher_order, name, None), HigherOrderOperator)


def _hint_for_word(text: str) -> str:
    """Suggest entries for a word without a namespace: "aten.mm" for "mm"."""
    words = {name.partition(".")[2]: name for name in _names_in("aten")}
    words |= {name: name for group in CATALOGUE for name in group.names if "." not in name}
    words |= {group.entry[1:]: group.entry for group in CATALOGUE}
    otherwise = "Operators are written with their namespace, for example 'aten.mm'."
    return did_you_mean(text, words, otherwise=otherwise)


def _names_in(namespace: str) -> list[str]:
    prefix = f"{namespace}::"
    found = (name for name in registered_operators() if name.startswith(prefix))
    return sorted({f"{namespace}.{name[len(prefix) :].split('.')[0]}" for name in found})
