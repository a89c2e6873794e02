"""Lets go of destroyed process groups before the interpreter ends.

Note [Threads of gloo]
    A thread of gloo lets go of a collective's tensors a moment after the collective is over, and
    needs the interpreter's lock for it. Where the interpreter ends in that moment, the process
    ends in SIGABRT ("terminate called without an active exception") with all its work done. The
    threads end with their group, which `destroy_process_group` lets go; yet a group lives on in
    what was sharded over it, and the default one in torch.distributed.nn.functional, which every
    optimizer imports, as the default of arguments.

Nothing is let go of where the default group was not destroyed: torch says so itself, and others'
collectives may still run.
"""

from __future__ import annotations

import atexit
from functools import cache
from weakref import WeakKeyDictionary

import torch.distributed as dist

from .._torch_compat import drop_default_group_arguments

_holders: WeakKeyDictionary[object, str] = WeakKeyDictionary()


def dropped_at_exit(holder: object, attribute: str) -> None:
    """Note that `holder.attribute` is a process group. Not a collective."""
    _watch_exit()
    _holders[holder] = attribute


@cache
def _watch_exit() -> None:
    atexit.register(_drop_groups)


def _drop_groups() -> None:
    if dist.is_initialized():
        return
    for holder, attribute in list(_holders.items()):
        setattr(holder, attribute, None)
    drop_default_group_arguments()
