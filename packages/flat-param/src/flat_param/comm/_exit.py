"""Drop references to destroyed process groups before the interpreter ends.

Note [Threads of gloo]
    A gloo thread releases a collective's tensors shortly after the collective, and needs the GIL
    for it. If the interpreter ends at that moment, the process ends in SIGABRT ("terminate called
    without an active exception"). The threads end with their group, which `destroy_process_group`
    drops; but sharded modules still reference it, and torch.distributed.nn.functional has the
    default group as the default of arguments.

Nothing is dropped if the default group was not destroyed: torch warns of that, and collectives may
still run.
"""

from __future__ import annotations

import atexit
from weakref import WeakKeyDictionary

import torch.distributed as dist

from .._torch_compat import drop_default_group_arguments

_holders: WeakKeyDictionary[object, str] = WeakKeyDictionary()


def dropped_at_exit(holder: object, attribute: str) -> None:
    """Register that `holder.attribute` is a process group. Not a collective."""
    _holders[holder] = attribute


@atexit.register
def _drop_groups() -> None:
    if dist.is_initialized():
        return
    for holder, attribute in list(_holders.items()):
        setattr(holder, attribute, None)
    drop_default_group_arguments()
