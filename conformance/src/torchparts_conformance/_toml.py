"""TOML from the standard library, or from tomli where Python 3.10 has none."""

from __future__ import annotations

import importlib
import sys
from typing import Any

_toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")


def parse(text: str) -> dict[str, Any]:
    """Parse a TOML document.

    Raises:
        ValueError: it is not TOML.
    """
    parsed: dict[str, Any] = _toml.loads(text)
    return parsed
