"""How the site reads docstrings: `Example:` is code, and classes name no private base.

Its parser calls that section `Examples:`. A base that a package does not export is a matter of its
own files, and would be a name without an entry.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).resolve().parent))
import pages


class ExamplesAsCode(griffe.Extension):
    """Rename the section while the source is read."""

    def on_object(self, *, obj: griffe.Object, **rest: Any) -> None:
        """Called for everything that has a docstring."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(
                r"^(\s*)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE
            )


class PublicBases(griffe.Extension):
    """Leave out bases that the package keeps to itself."""

    def on_class(self, *, cls: griffe.Class, **rest: Any) -> None:
        """Called for every class."""
        package = cls.path.partition(".")[0]
        if package in pages.SOURCES:
            cls.bases = [base for base in cls.bases if not self._is_private(base, package)]

    def _is_private(self, base: Any, package: str) -> bool:
        path = getattr(base, "canonical_path", str(base))
        name = path.rpartition(".")[2]
        return path.startswith(f"{package}.") and name not in pages.public_names(package)
