"""Text that stands for a living object, where only text may go.

The compiler bakes a region's policy into its graph, as a constant. Not every torch takes an
object for one; all take text, and compile again where the text is another.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

_numbers = itertools.count()
_alive: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def handle_of(thing: object) -> str:
    """Make a handle of `thing`, good in this process as long as something holds `thing`."""
    handle = f"{type(thing).__name__} {next(_numbers)}"
    _alive[handle] = thing
    return handle


def behind(handle: str) -> Any:
    """Return what a handle stands for."""
    return _alive[handle]
