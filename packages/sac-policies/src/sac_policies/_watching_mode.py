"""A dispatch mode that observes a function without changing how it runs."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class WatchingMode(TorchDispatchMode):
    """Observes eager operators; a compiled callable counts as one operator, or none.

    torch.compile permanently skips code that it first meets inside any other mode: a function that
    was once profiled would never be compiled.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compile as if the mode were not there."""
        return True
