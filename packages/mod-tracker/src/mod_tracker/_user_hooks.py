"""The drop-in interface's four hooks, one of each kind, as listeners.

They get what torch's hooks get: the module, not its call, and no keyword arguments. What they
raise goes to whoever called the module or the backward, as with torch. See Note [Listeners that
fail].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ._errors import HookSlotError
from ._listeners import Callbacks

Hook = Callable[..., object]

KINDS = {
    "pre_fw_hook": "pre_hook",
    "post_fw_hook": "post_hook",
    "pre_bw_hook": "pre_backward",
    "post_bw_hook": "post_backward",
}
"""Each hook, and the event it listens to."""


class UserHooks:
    """The four places for hooks.

    Args:
        listen: registers callbacks, and returns the function that takes them out.
    """

    def __init__(self, listen: Callable[[Callbacks], Callable[[], None]]) -> None:
        self._listen = listen
        self._taken: dict[str, Callable[[], None]] = {}

    def register(self, hooks: Sequence[Hook | None]) -> None:
        """Register the hooks that are given, in the order of `KINDS`; all of them or none.

        Raises:
            HookSlotError: a place is taken.
        """
        given = {kind: hook for kind, hook in zip(KINDS, hooks, strict=True) if hook is not None}
        for kind in given:
            if kind in self._taken:
                raise HookSlotError(
                    f"mod_tracker.register_user_hooks: Only one {kind} can be registered at a "
                    "time Clear the existing hook by calling ``clear_user_hooks`` before "
                    "registering a new one"
                )
        if given:
            callbacks = Callbacks(**{KINDS[kind]: hook for kind, hook in given.items()})
            remove = self._listen(callbacks)
            self._taken |= dict.fromkeys(given, remove)

    def clear(self) -> None:
        """Take all hooks out."""
        for remove in set(self._taken.values()):
            remove()
        self._taken = {}
