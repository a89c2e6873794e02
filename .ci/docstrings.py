"""Let the site show `Example:` in docstrings as code, which its parser calls `Examples:`."""

from __future__ import annotations

import re
from typing import Any

import griffe


class ExamplesAsCode(griffe.Extension):
    """Rename the section while the source is read."""

    def on_object(self, *, obj: griffe.Object, **rest: Any) -> None:
        """Called for everything that has a docstring."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(
                r"^(\s*)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE
            )
