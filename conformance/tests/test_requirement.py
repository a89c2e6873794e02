"""The mark that ties a case to what it checks."""

from __future__ import annotations

import pytest

from torchparts_conformance import requirement


def test_requirement_needs_an_id():
    """A case without an id would check nothing that anybody asked for."""
    with pytest.raises(ValueError, match="no id given, but a case checks at least one"):
        requirement()


def test_mark_has_the_ids_that_were_given():
    """In their order, and the case is the function that it was."""

    @requirement("CW-002", "CW-001")
    def case(part):
        return part

    (mark,) = case.pytestmark
    assert (mark.name, mark.args) == ("requirement", ("CW-002", "CW-001"))
    assert case(3) == 3
