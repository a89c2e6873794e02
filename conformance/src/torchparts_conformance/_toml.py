"""TOML from the standard library, or from tomli where Python 3.10 has none."""

from __future__ import annotations

import importlib
import sys
from typing import Any

_PARSER = "tomllib" if sys.version_info >= (3, 11) else "tomli"


def parse(text: str) -> dict[str, Any]:
    """Parse a TOML document.

    Raises:
        ValueError: it is not TOML.
    """
    parsed: dict[str, Any] = importlib.import_module(_PARSER).loads(text)
    return parsed
