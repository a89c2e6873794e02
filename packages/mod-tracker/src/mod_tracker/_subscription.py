"""A listener's registration, and what becomes of a listener that fails.

Note [Listeners that fail]
Rule 1: an `Exception` of a listener does not reach the model. It is logged, the subscription ends,
        and `Subscription.error` keeps it.
Rule 2: what is not an `Exception`, such as a KeyboardInterrupt, goes through; the tracker is left
        clean.
Rule 3: what a hook of `register_user_hooks` raises goes through, as in torch: it is the user's own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

_log = logging.getLogger("mod_tracker")


class Subscription:
    """A registered listener. Ends with `remove()`, or with the `with` block it is used in.

    Attributes:
        error: what the listener raised, without its traceback, which would keep tensors alive; the
            log has that. None if it did not fail. A listener that fails is not called again.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        self._remove: Callable[[], None] | None = None

    def remove(self) -> None:
        """Stop listening. A second call does nothing."""
        if self._remove is not None:
            self._remove()
            # Only now: after an interrupt a second call must do it.
            self._remove = None

    def starts(self, remove: Callable[[], None]) -> Subscription:
        """Note how the subscription that has just begun is ended."""
        self._remove = remove
        return self

    def guard(self, listener: Callable[..., object]) -> Callable[..., None]:
        """Return `listener` with its errors kept away from the model. See Rules 1 and 2."""

        def call(*args: Any) -> None:
            if self.error is None:
                try:
                    listener(*args)
                except Exception as error:
                    self._fail(error)

        return call

    def _fail(self, error: Exception) -> None:
        _log.error("a listener failed and is not called again", exc_info=error)
        self.error = error.with_traceback(None)
        self.remove()

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()
