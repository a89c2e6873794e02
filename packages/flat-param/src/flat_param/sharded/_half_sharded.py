"""What a module is from the first parameter that `fully_shard` cuts until all is there.

What is cut cannot be put together again on one rank. So a module whose sharding was stopped, by
Ctrl-C or where memory is full, keeps this class and refuses to be used: pieces in the place of
weights would fail somewhere else, or compute something else.
"""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

from torch import nn

from .._errors import StateError

M = TypeVar("M", bound=nn.Module)
_PREFIX = "HalfSharded"


class HalfShardedModule(nn.Module):
    """A module some of whose parameters may be cut. Not to be made by hand."""

    def refuse(self) -> NoReturn:
        """Say what happened and what to do.

        Raises:
            StateError: always.
        """
        raise StateError(
            f"flat_param.fully_shard: {type(self).__name__.removeprefix(_PREFIX)} was only partly "
            "sharded when it was interrupted, but a rank cannot put its pieces back together. "
            "Build the module again on every rank, and shard that."
        )

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to compute with what is there."""
        self.refuse()

    def state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to give what is there."""
        self.refuse()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        self.refuse()


def half_sharded(cls: type[M]) -> type[M]:
    """The class of such a module that was of another class before."""
    return type(f"{_PREFIX}{cls.__name__}", (HalfShardedModule, cls), {})
