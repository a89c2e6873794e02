"""The mark that ties a case to what it checks."""

from __future__ import annotations

import pytest

from torchparts_conformance import requirement


def test_requirement_needs_an_id():
    """A case without an id would check nothing that anybody asked for."""
    with pytest.raises(ValueError, match="no id given, but a case checks at least one"):
        requirement()
