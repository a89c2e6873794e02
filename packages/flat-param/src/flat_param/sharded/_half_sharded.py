"""The class of a module while `fully_shard` works on it.

One rank cannot put pieces back together. A module whose sharding was stopped, by Ctrl-C or out of
memory, keeps this class and raises an error on every use.
"""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

from torch import nn

from .._errors import StateError

M = TypeVar("M", bound=nn.Module)
_PREFIX = "HalfSharded"


class HalfShardedModule(nn.Module):
    """A module of which some parameters may be pieces."""

    def refuse(self) -> NoReturn:
        """Raise an error that says what happened and what to do.

        Raises:
            StateError: always.
        """
        raise StateError(
            f"flat_param.fully_shard: {type(self).__name__.removeprefix(_PREFIX)} was only partly "
            "sharded when it was interrupted, but a rank cannot put its pieces back together. "
            "Build the module again on every rank, and shard that."
        )

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise an error."""
        self.refuse()

    def state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise an error."""
        self.refuse()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        self.refuse()


def half_sharded(cls: type[M]) -> type[M]:
    """Return this class for a module of another class."""
    return type(f"{_PREFIX}{cls.__name__}", (HalfShardedModule, cls), {})
