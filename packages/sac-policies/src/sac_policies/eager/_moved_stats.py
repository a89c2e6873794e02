"""What offloaded values have moved so far in this process, and how much host memory they may take.

Threads and finalizers count too, so no count is read, and written back after a call.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from .._errors import PolicyError, shown


@dataclass(frozen=True, slots=True)
class OffloadStats:
    """Counts since the process began, over all devices; take differences.

    Args:
        copies_out: values that left for host memory.
        bytes_out: their bytes.
        copies_in: values that were brought back.
        bytes_in: their bytes.
        late: of those copied back, how many had not been requested before they were read: backward
            stalls for such a copy, however short it is.
        kept: values that a policy offloads and that stayed because host memory was at its limit.
        bytes_away: bytes in host memory now.
    """

    copies_out: int = 0
    bytes_out: int = 0
    copies_in: int = 0
    bytes_in: int = 0
    late: int = 0
    kept: int = 0
    bytes_away: int = 0


class Counters:
    """Counts in the making, and the limit.

    Attributes:
        bytes_unread: of `bytes_in`, what nobody has read.
    """

    def __init__(self) -> None:
        self.copies_out = self.bytes_out = self.copies_in = self.bytes_in = 0
        self.bytes_unread = 0
        self.late = self.kept = 0
        self.limit: int | None = None
        self._away: dict[int, int] = {}  # bytes by the number that a value left under
        self._numbers = itertools.count()

    def out(self, nbytes: int) -> int:
        """Count a value that leaves; return its number."""
        number = next(self._numbers)
        self._away[number] = nbytes
        self.copies_out += 1
        self.bytes_out += nbytes
        return number

    def gone(self, number: int) -> None:
        """Forget the value that left under this number."""
        self._away.pop(number, None)

    def has_room(self, nbytes: int) -> bool:
        """Tell whether host memory may take that many bytes more; count it where it may not."""
        if self.limit is None or self.bytes_away + nbytes <= self.limit:
            return True
        self.kept += 1
        return False

    @property
    def bytes_away(self) -> int:
        """Bytes in host memory now."""
        return sum(list(self._away.values()))


counters = Counters()


def offload_stats() -> OffloadStats:
    """Return how much offloading by policies has moved so far, in this process.

    Values passed to saved-tensor hooks around a region belong to the hooks, and are not counted.

    Example:
        >>> offload_stats().bytes_away
        0
    """
    return OffloadStats(**{name: getattr(counters, name) for name in OffloadStats.__slots__})


def limit_offload(max_bytes: int | None) -> None:
    """Limit the host memory for offloaded values in this process; values beyond it stay.

    A value that would exceed the limit is kept on its device, as `save` does, until backward has
    read others and there is room again.

    Args:
        max_bytes: of all values that are away at one time; None for no limit.

    Raises:
        PolicyError: `max_bytes` is neither None nor an int of at least 0.

    Example:
        >>> limit_offload(8 * 2**30)
        >>> limit_offload(None)
    """
    is_count = isinstance(max_bytes, int) and not isinstance(max_bytes, bool) and max_bytes >= 0
    if not (max_bytes is None or is_count):
        raise PolicyError(
            f"sac_policies.limit_offload: max_bytes {shown(max_bytes)} is not a number of bytes, "
            "but it must be an int of at least 0, or None. Pass such a number."
        )
    counters.limit = max_bytes
