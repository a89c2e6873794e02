"""The mark that ties a case to the requirements it checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_Case = TypeVar("_Case", bound=Callable[..., Any])


def requirement(*ids: str) -> Callable[[_Case], _Case]:
    """Say which requirements a case checks.

    Args:
        ids: one or more requirement ids, such as `"CW-012"`.
    Raises:
        ValueError: no id was given.
    Example:
        @requirement("CW-012")
        def test_dropout_is_replayed(part, device): ...
    """
    if not ids:
        raise ValueError(
            "torchparts_conformance.requirement: no id given, but a case checks at least one "
            "requirement. Name it, as in @requirement('CW-012')."
        )
    import pytest  # where it is found is not decided yet when this package is imported

    return pytest.mark.requirement(*ids)
