"""Entries name operators in several spellings; unknown names are refused."""

from __future__ import annotations

import re

import pytest
import torch

from sac_policies import MATMULS, PolicyError, save_ops
from sac_policies.policies._matching import (
    entry_of,
    is_named,
    names_of,
    unmatched_entries,
)

aten = torch.ops.aten


def test_misspelt_operator_gets_close_matches():
    """The error lists existing names."""
    with pytest.raises(PolicyError, match=r"'aten\.addm' is not registered.*'aten\.addmm'"):
        save_ops("aten.addm")


def test_misspelt_overload_gets_close_matches():
    """The error lists the overloads of the packet."""
    with pytest.raises(PolicyError, match=r"'aten\.add\.Tenor'.*'aten\.add\.Tensor'"):
        save_ops("aten.add.Tenor")


@pytest.mark.parametrize(
    ("given", "close"),
    [("mm", r"'aten\.mm'"), ("flex_atention", "'flex_attention'"), ("aten.mmm", r"'aten\.mm'")],
)
def test_operator_without_namespace_gets_close_matches(given, close):
    """The error recommends the operator in aten and names the user's line."""
    with pytest.raises(PolicyError, match=rf"\(at .*test_matching\.py:\d+ in test_.*{close}"):
        save_ops(given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("matmuls", r"Did you mean '@matmuls'"),
        ("atention", r"Did you mean '@attention'"),
        ("addm", r"Did you mean .*'aten\.addmm'"),
        ("zzzzqqqq", r"written with their namespace, for example 'aten\.mm'\."),
    ],
)
def test_unknown_word_is_refused_with_a_suggestion(given, said):
    """An imported library cannot define a word without a namespace."""
    with pytest.raises(PolicyError, match=rf"operator '{given}' is not registered.*{said}"):
        save_ops(given)


def test_operators_of_a_library_not_yet_imported_are_accepted():
    """A policy may be built before the library that registers its operators."""
    assert save_ops("not_imported_yet.kernel").entries == ("not_imported_yet.kernel",)


@pytest.mark.parametrize(
    ("given", "entry"),
    [
        ("aten::mm", "aten.mm"),
        ("aten.mm.default", "aten.mm.default"),
        (aten.mm, "aten.mm"),
        (aten.mm.default, "aten.mm.default"),
        ("@matmuls", "@matmuls"),
        (MATMULS, "@matmuls"),
        (torch.ops.higher_order.cond, "cond"),
        ("cond", "cond"),
        ("aten.no_such_thing_*", "aten.no_such_thing_*"),
        ("aten.[ab]mm", "aten.[ab]mm"),
    ],
    ids=str,
)
def test_entry_becomes_text(given, entry):
    """Objects become names, so that policies are equal on all ranks; globs are unchanged."""
    assert entry_of(given, where="here") == entry


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("aten mm", r"sac_policies\.here: entry 'aten mm' is not a name"),
        ("aten.mm(", "is not a name, but operators have letters and digits"),
        (torch.mm, r"given as an object like .* Did you mean 'aten\.mm'"),
        ("@nothing", r"group '@nothing' is unknown"),
        ("aten", "operator 'aten' is not registered"),
        ("aten.mm.out.more", "is not registered"),
    ],
    ids=str,
)
def test_what_names_no_operator_is_refused(given, said):
    """The error names the caller, the rule and a valid spelling."""
    with pytest.raises(PolicyError, match=said):
        entry_of(given, where="here")


@pytest.mark.parametrize(
    ("entries", "op", "found"),
    [
        (("aten.add",), aten.add.Tensor, True),
        (("aten.add.Tensor",), aten.add.Tensor, True),
        (("aten.add.Scalar",), aten.add.Tensor, False),
        (("aten.ad",), aten.add.Tensor, False),
        (("aten.ad?",), aten.add.Tensor, True),
        (("*.Tensor",), aten.add.Tensor, True),
        (("add*",), aten.add.Tensor, False),
        (("aten.sin", "aten.m[mv]"), aten.mm.default, True),
        (("@matmuls",), aten.mm.default, True),
        (("@matmuls",), aten.sin.default, False),
        (("cond",), torch.ops.higher_order.cond, True),
    ],
    ids=str,
)
def test_operator_is_matched_whole_by_overload_or_packet(entries, op, found):
    """A glob must also match the whole name."""
    assert is_named(entries, op) is found


def test_entries_are_unmatched_only_together():
    """Lists are written for several models; a group matches if one of its members does."""
    ran = [aten.mm.default, aten.sin.default]
    for entries in (("aten.bmm", "aten.s*"), ("aten.bmm", "@matmuls")):
        assert unmatched_entries(entries, ran) == ()
    assert unmatched_entries(("aten.c*", "@attention"), ran) == ("aten.c*", "@attention")


def test_overload_has_two_names_and_what_has_none_one():
    """A higher-order operator has no overloads, so it has one name."""
    assert names_of(aten.add.Tensor) == ("aten.add.Tensor", "aten.add")
    assert names_of(torch.ops.higher_order.cond) == ("cond", "cond")


def test_namespace_that_is_no_name_of_cxx_is_taken_for_not_imported():
    """Torch cannot look up such a packet; the entry remains, and warns if it never matches."""
    assert entry_of("other.1", where="here") == "other.1"


@pytest.mark.parametrize("entry", ["aten.name", "aten.__dict__", "aten.__name__.x"])
def test_attribute_of_a_namespace_is_no_operator(entry):
    """torch.ops.aten has ordinary module attributes; they have no overloads."""
    with pytest.raises(PolicyError, match=f"operator '{re.escape(entry)}' is not registered"):
        save_ops(entry)


@pytest.mark.parametrize("entry", ["aten.mm.", ".mm", "aten..mm", "."])
def test_dots_stand_between_names_only(entry):
    """An entry with other dots never names an operator."""
    with pytest.raises(PolicyError, match=r"is not a name, but operators have letters and"):
        save_ops(entry)
