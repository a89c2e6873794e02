"""A dispatch mode that watches a function run, and changes nothing of how it does."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class WatchingMode(TorchDispatchMode):
    """Watches what runs eagerly; a compiled callable is one operator, or none.

    torch.compile passes by code that it first meets inside any other mode, and for good: a
    function that was once profiled would never be compiled any more.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compile as if the mode were not there."""
        return True
