"""Text by which compiled code finds a policy.

The compiler stores the policy of a region in its graph as a constant. Every supported torch takes
text as a constant, and compiles again if it differs.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

_numbers = itertools.count()
_alive: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def handle_of(thing: object) -> str:
    """Make a handle of `thing`, valid in this process while `thing` lives."""
    handle = f"{type(thing).__name__} {next(_numbers)}"
    _alive[handle] = thing
    return handle


def behind(handle: str) -> Any:
    """Return the object of a handle."""
    return _alive[handle]
