"""The options of offload, validated when a module is wrapped."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from ckpt_wrap._errors import OptionError

MIB = 2**20
MOST_INFLIGHT_BYTES = 1024 * MIB  # where no number is given


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadOptions:
    """Where saved tensors go, and which; see `offload_`.

    Raises:
        OptionError: a value is invalid, or the folder does not exist and `create` is False.
    """

    to: str | os.PathLike[str] = "cpu"
    create: bool = False
    min_bytes: int = 1024
    keep_last: int = 0
    max_inflight_bytes: int | None = None
    max_bytes_away: int | None = None

    def __post_init__(self) -> None:
        to = os.fspath(self.to) if isinstance(self.to, os.PathLike) else self.to
        if not isinstance(to, str) or not to:
            raise OptionError(
                f"ckpt_wrap.offload_: option 'to' is {self.to!r}, but it must be 'cpu' or the "
                "path of a folder. Pass one of them."
            )
        if to != "cpu" and _names_device(to):
            raise OptionError(
                f"ckpt_wrap.offload_: option 'to' is {to!r}, but offload goes to 'cpu' or to a "
                f"folder. Pass './{to}' if you mean a folder."
            )
        if not isinstance(self.create, bool):
            raise OptionError(
                f"ckpt_wrap.offload_: option 'create' is {self.create!r}, but it must be a bool. "
                "Pass True or False."
            )
        for name in ("min_bytes", "keep_last", "max_inflight_bytes", "max_bytes_away"):
            value = getattr(self, name)
            if value is None and name.startswith("max_"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise OptionError(
                    f"ckpt_wrap.offload_: option {name!r} is {value!r}, but it must be an int "
                    "of at least 0. Pass such a number."
                )
        if to != "cpu":
            # The process may change its working directory before backward.
            folder = os.path.abspath(os.path.expanduser(to))
            if not self.create and not os.path.exists(folder):
                raise OptionError(
                    f"ckpt_wrap.offload_: option 'to' is {to!r}, but the folder must exist, so "
                    "that a typo does not create one. Pass create=True to create it, or 'cpu' for "
                    "host memory."
                )
            to = folder
        # Two modules with the same folder have equal options, whichever of them created it.
        object.__setattr__(self, "to", to)
        object.__setattr__(self, "create", False)

    @property
    def folder(self) -> Path | None:
        """The folder to use, or None for host memory."""
        return None if self.to == "cpu" else Path(self.to)


def _names_device(text: str) -> bool:
    try:
        torch.device(text)
    except RuntimeError:
        return False
    return True
