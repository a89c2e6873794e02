"""Entries name operators in several spellings; names that no operator has are refused."""

from __future__ import annotations

import pytest

from sac_policies import PolicyError, save_ops


def test_misspelt_operator_gets_close_matches():
    """A typo is answered with names that exist."""
    with pytest.raises(PolicyError, match=r"'aten\.addm' is not registered.*'aten\.addmm'"):
        save_ops("aten.addm")


def test_misspelt_overload_gets_close_matches():
    """A wrong overload is answered with those of the packet."""
    with pytest.raises(PolicyError, match=r"'aten\.add\.Tenor'.*'aten\.add\.Tensor'"):
        save_ops("aten.add.Tenor")


@pytest.mark.parametrize(
    ("given", "close"),
    [("mm", r"'aten\.mm'"), ("flex_atention", "'flex_attention'"), ("aten.mmm", r"'aten\.mm'")],
)
def test_operator_without_namespace_gets_close_matches(given, close):
    """A forgotten namespace is answered with the operator in aten; the line is the user's."""
    with pytest.raises(PolicyError, match=rf"\(at .*test_matching\.py:\d+ in test_.*{close}"):
        save_ops(given)


def test_operators_of_a_library_not_yet_imported_are_accepted():
    """A policy may be built before the library that registers its operators."""
    assert save_ops("not_imported_yet.kernel").entries == ("not_imported_yet.kernel",)
