"""The errors of this package, all derived from `ModTrackerError`."""

from __future__ import annotations


class ModTrackerError(Exception):
    """Base of all errors of mod_tracker."""


class HookSlotError(ModTrackerError, AssertionError, ValueError):
    """`register_user_hooks` accepts one hook of each kind."""


class OptionError(ModTrackerError, ValueError):
    """An argument is not accepted."""


class StateError(ModTrackerError, RuntimeError):
    """The operation is not possible in the current state."""


class MissingExtraError(ModTrackerError, RuntimeError):
    """An optional dependency is not installed."""


class UnknownNameError(ModTrackerError, KeyError):
    """No module has this name; the message names similar ones."""

    def __str__(self) -> str:  # `KeyError` would put the message in quotes
        return str(self.args[0]) if self.args else ""


def check_int(function: str, name: str, value: object, least: int, *, or_none: str = "") -> None:
    """Raise an `OptionError` unless a value is an int of at least `least`, or None if allowed."""
    if or_none and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        none = f", or None for {or_none}" if or_none else ""
        raise OptionError(
            f"mod_tracker.{function}: {name} must be an int of at least {least}{none}; "
            f"got {value!r}."
        )


def check_callable(function: str, name: str, value: object, what: str) -> None:
    """Raise an `OptionError` unless a value can be called."""
    if not callable(value):
        raise OptionError(
            f"mod_tracker.{function}: {name} must be {what}; got {value!r}. Pass the function "
            "itself, without calling it."
        )
