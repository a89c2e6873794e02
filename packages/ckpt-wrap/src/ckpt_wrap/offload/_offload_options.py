"""The options of offload, validated when a module is wrapped."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ckpt_wrap._errors import OptionError

MIB = 2**20
MOST_INFLIGHT_BYTES = 1024 * MIB  # where no number is given


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadOptions:
    """Where saved tensors go, and which.

    Args:
        to: `"cpu"` for host memory, or the path of a folder for memory-mapped files in it.
        create: whether to make that folder, and its parents, if it does not exist.
        min_bytes: a tensor whose storage is smaller stays where it is.
        keep_last: how many of the latest calls keep their tensors; backward needs those first.
        max_inflight_bytes: how many bytes saved by one thread may wait on a device to be copied;
            beyond that, the device waits for the oldest copy. None: what two calls save, and 1 GiB
            at most; the device waits for the copies of one call when the next one ends.
        max_bytes_away: how many bytes may be elsewhere at one time, over all modules with the same
            options in this process; tensors that would exceed it stay where they are. None: no
            limit.

    Raises:
        OptionError: a value that cannot work, naming the option.
    """

    to: str = "cpu"
    create: bool = False
    min_bytes: int = 1024
    keep_last: int = 0
    max_inflight_bytes: int | None = None
    max_bytes_away: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.to, str) or not self.to:
            raise OptionError(
                f"ckpt_wrap.offload_: option 'to' is {self.to!r}, but it must be 'cpu' or the "
                "path of a folder. Pass one of them."
            )
        if self.to != "cpu" and _names_device(self.to):
            raise OptionError(
                f"ckpt_wrap.offload_: option 'to' is {self.to!r}, but offload goes to 'cpu' or to "
                f"a folder. Pass './{self.to}' if you mean a folder."
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


def offload_options(
    *,
    to: str | os.PathLike[str] = "cpu",
    create: bool = False,
    min_bytes: int = 1024,
    keep_last: int = 0,
    max_inflight_bytes: int | None = None,
    max_bytes_away: int | None = None,
) -> OffloadOptions:
    """Validated options with an absolute folder.

    Raises:
        OptionError: a value is invalid, or the folder does not exist and `create` is False.
    """
    options = OffloadOptions(
        to=os.fspath(to) if isinstance(to, os.PathLike) else to,
        create=create,
        min_bytes=min_bytes,
        keep_last=keep_last,
        max_inflight_bytes=max_inflight_bytes,
        max_bytes_away=max_bytes_away,
    )
    if options.folder is None:
        return options
    # The process may change its working directory before backward.
    folder = os.path.abspath(options.folder.expanduser())
    if not options.create and not os.path.exists(folder):
        raise OptionError(
            f"ckpt_wrap.offload_: option 'to' is {options.to!r}, but the folder must exist, so "
            "that a typo does not create one. Pass create=True to create it, or 'cpu' for host "
            "memory."
        )
    # Two modules with the same folder have equal options, whichever of them created it.
    return replace(options, to=folder, create=False)
