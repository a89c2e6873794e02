"""Every exception and warning of the package."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from ._tensors import tensors_in


class SacError(Exception):
    """Base of every error that sac_policies raises."""


class PolicyError(SacError, ValueError):
    """A policy cannot be built, read or combined."""


class UnmatchedNameError(PolicyError):
    """A module path or a tensor name of a policy matches nothing in its regions."""


class DecisionError(SacError, ValueError):
    """A policy returned something that is not a decision.

    Not a TypeError: Python's binary operators would treat it as "not supported" and hide it.
    """


class ConflictError(SacError, ValueError):
    """Two rules make different decisions for one value."""


class EngineError(SacError, RuntimeError):
    """An engine cannot follow a decision, or cannot run here."""


class RecomputeError(SacError, RuntimeError):
    """Recomputation runs other operators than forward."""


class MutationError(SacError, RuntimeError):
    """A saved value was changed in place outside its region."""


class BudgetError(SacError, ValueError):
    """A budget or a trace cannot be read."""


class SlicesError(SacError, ValueError):
    """A function cannot be run in slices."""


class UnmatchedEntryWarning(UserWarning):
    """An entry of a policy matched no operator of its first region."""


def shown(value: object, most: int = 80) -> str:
    """Format a value for a message: its repr, cut to `most` characters.

    Tensors are formatted without values: these are long, and reading them waits for the device.

    Example:
        >>> shown("x" * 100, 9)
        "'xxxx..."
        >>> import torch
        >>> shown({"x": torch.ones(2, 3)})
        '<dict with a tensor of shape (2, 3)>'
    """
    try:
        tensors = tensors_in(dict(value) if isinstance(value, Mapping) else value)
        if tensors:
            shape = f"of shape {tuple(tensors[0].shape)}"
            what = shape if value is tensors[0] else f"with a tensor {shape}"
            return f"<{type(value).__name__} {what}>"
        text = repr(value[: most + 1] if isinstance(value, (str, bytes)) else value)
    except Exception:  # a repr that raises must not hide the actual error
        text = f"<{type(value).__name__}>"
    return f"{text[: most - 4]}..." if len(text) > most else text


def did_you_mean(given: str, known: Iterable[str] | Mapping[str, str], *, otherwise: str) -> str:
    """Suggest the known names closest to a misspelt one; `otherwise` if none is close.

    A mapping gives each name as it is suggested.

    Example:
        >>> did_you_mean("attn_otu", ["attn_out", "mlp"], otherwise="")
        "Did you mean 'attn_out'?"
    """
    names = known if isinstance(known, Mapping) else {each: each for each in known}
    close = difflib.get_close_matches(given, sorted(names), n=3, cutoff=0.5)
    return (
        f"Did you mean {' or '.join(repr(names[each]) for each in close)}?" if close else otherwise
    )
