"""The errors this package raises.

A message begins with `ckpt_wrap.<function>: `, and says how to go on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.utils.checkpoint import CheckpointError

from ckpt_wrap._where import Where


class CkptWrapError(Exception):
    """Base class of every error raised by this package."""


class ModuleError(CkptWrapError, TypeError):
    """The argument is not a module, or not one that can be checkpointed or offloaded."""


class OptionError(CkptWrapError, ValueError):
    """An option is unknown, has a wrong value or contradicts another option."""


class PolicyError(CkptWrapError, ValueError):
    """A policy selects nothing, or is not a policy."""


class RecomputeError(CkptWrapError, CheckpointError):
    """Recomputing a module in backward did not repeat what its forward did.

    Also a `torch.utils.checkpoint.CheckpointError`, hence a `RuntimeError`.
    """


class OffloadError(CkptWrapError, RuntimeError):
    """A tensor could not be moved to host memory or disk, or was changed after it was moved."""


@contextlib.contextmanager
def about(what: str) -> Iterator[None]:
    """Have errors raised inside say what they were about."""
    try:
        yield
    except CkptWrapError as error:
        raise type(error)(f"{error} This was for {what}.") from error


def is_in_place_error(error: RuntimeError) -> bool:
    """Whether it is autograd's error about a saved tensor that was changed in place."""
    return "inplace operation" in str(error) and not isinstance(error, RecomputeError)


def changed_input_message(where: Where) -> str:
    """Message about an input that was modified since forward."""
    return (
        f"ckpt_wrap.{where.made_by}: an input of module {where} has been modified by an inplace "
        "operation since the forward, but recomputation needs it as it was. "
        "Change a clone of it, or change it after backward."
    )
