"""The options of torch's checkpoint: which there are, what they say, which go with a policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ._errors import shown
from ._torch_compat import debug_enabled

# What torch's checkpoint takes for itself; the rest goes to the function.
_OPTIONS = ("use_reentrant", "preserve_rng_state", "determinism_check", "early_stop", "debug")
CHECKS = ("default", "none")


def split(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Part keyword arguments of the function from options of torch's checkpoint."""
    if not kwargs:
        return {}, {}
    own = {name: value for name, value in kwargs.items() if name not in _OPTIONS}
    return own, {name: value for name, value in kwargs.items() if name in _OPTIONS}


def debugs(kwargs: Mapping[str, Any]) -> bool:
    """Whether to debug: torch's setting overrides the option, as it does for torch."""
    setting = debug_enabled()
    return bool(kwargs.get("debug")) if setting is None else setting


def compares(kwargs: Mapping[str, Any]) -> bool:
    """Whether what is made again is held against what it was."""
    return not kwargs or kwargs.get("determinism_check") != "none"


def refused_option(kwargs: Mapping[str, Any], checks: tuple[str, ...] = CHECKS) -> str:
    """Say which option is refused, and why; "" where none is.

    Args:
        kwargs: options of torch's checkpoint; others are not looked at.
        checks: what `determinism_check` may be.
    """
    if kwargs.get("use_reentrant"):
        return (
            "use_reentrant True goes with a policy, but reentrant checkpointing knows no "
            "policies. Leave it out."
        )
    check = kwargs.get("determinism_check", "default")
    if not (isinstance(check, str) and check in checks):
        return (
            f"determinism_check {shown(check)} is unknown, but it must be one of {checks}. "
            "Leave it out: what is made again is then held against what it was."
        )
    if "context_fn" in kwargs:
        return "context_fn is given beside policy, but both decide the same. Give one of them."
    return ""
