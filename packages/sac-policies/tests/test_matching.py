"""Entries name operators in several spellings; unknown names are refused."""

from __future__ import annotations

import re

import pytest
import torch

from sac_policies import MATMULS, PolicyError, save_ops
from sac_policies.policies import _matching
from sac_policies.policies._matching import entry_of, is_named, unmatched_entries

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("aten.addm", r"Did you mean .*'aten\.addmm'"),
        ("aten.mmm", r"Did you mean 'aten\.mm'"),
        ("aten.add.Tenor", r"Did you mean 'aten\.add\.Tensor'"),
        ("mm", r"Did you mean 'aten\.mm'"),
        ("addm", r"Did you mean .*'aten\.addmm'"),
        ("flex_atention", "Did you mean 'flex_attention'"),
        ("matmuls", r"Did you mean '@matmuls'"),
        ("atention", r"Did you mean '@attention'"),
        ("zzzzqqqq", r"written with their namespace, for example 'aten\.mm'\."),
        ("aten", "Did you mean 'aten.atan'"),
        ("aten.mm.out.more", "Did you mean 'aten.mm.out'"),
        ("aten.name", "Did you mean"),  # an attribute of the namespace, not an operator
        ("aten.__dict__", "Did you mean"),
        ("aten.__name__.x", "Did you mean"),
    ],
)
def test_unknown_name_is_refused_with_a_suggestion(given, said):
    """Operators, overloads, words and groups; the error names the user's line."""
    line = rf"operator '{re.escape(given)}' is not registered \(at .*test_matching\.py:\d+ in test_"
    with pytest.raises(PolicyError, match=rf"{line}.*{said}"):
        save_ops(given)


def test_operators_of_a_library_not_yet_imported_are_accepted():
    """A policy may be built before the library that registers its operators."""
    assert save_ops("not_imported_yet.kernel").entries == ("not_imported_yet.kernel",)


@pytest.mark.parametrize(
    ("given", "entry"),
    [
        ("aten::mm", "aten.mm"),
        ("torch.ops.aten.mm", "aten.mm"),
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
        *(
            (entry, "is not a name, but operators have letters and digits")
            for entry in ("aten.mm(", "aten.mm.", ".mm", "aten..mm", ".")
        ),
        (torch.mm, r"given as an object like .* Did you mean 'aten\.mm'"),
        ("@nothing", r"group '@nothing' is unknown"),
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


def test_namespace_that_is_no_name_of_cxx_is_taken_for_not_imported():
    """Torch cannot look up such a packet; the entry remains, and warns if it never matches."""
    assert entry_of("other.1", where="here") == "other.1"


def test_registered_operators_are_listed_only_for_names_that_are_none(monkeypatch):
    """Policies are made often, for example in each step; listing all operators of torch is slow."""
    listed = []

    def listing():
        listed.append(True)
        return ["aten::mm"]

    monkeypatch.setattr(_matching, "registered_operators", listing)
    save_ops("aten.mm", "aten.add.Tensor", "aten::sin", "aten.s*", "@matmuls")
    assert not listed
    with pytest.raises(PolicyError, match=r"Did you mean 'aten\.mm'"):
        save_ops("aten.mmm")
    assert listed
