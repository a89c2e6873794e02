"""Keep a unit's full parameters between forward and backward, sharded over a smaller group.

Each rank of the group keeps one part of the unsharded parameters, so backward gathers them within
the group, for instance inside one machine. If a parameter changed after forward on any rank,
backward gathers from the shards.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..comm._comm import Communicator, Pending
from ._sharded_params import ShardedParams, alloc_storage, as_bytes


class KeptParts:
    """One rank's part of a unit's unsharded parameters.

    Args:
        parts: the unit's segments, whole now.
        comm: the group.
        version: of the parameters when they were gathered.
    """

    def __init__(
        self,
        parts: Sequence[ShardedParams],
        comm: Communicator,
        version: tuple[int, bool] | None,
    ) -> None:
        self.version = version
        self._comm = comm
        self._kept = {part: _own_part(part.full, comm) for part in parts if not part.aliased}

    @property
    def nbytes(self) -> int:
        """Bytes held until backward."""
        return sum(tensor.nbytes for tensor in self._kept.values())

    def start_gather(self, part: ShardedParams) -> Pending | None:
        """Begin to fill a segment's full buffer from every part in the group. Collective."""
        kept = self._kept.get(part)
        if kept is None:
            return None
        full = part.full
        alloc_storage(full)
        numel = kept.numel() * self._comm.world_size
        staged = full if full.numel() == numel else full.new_empty(numel)
        pending = self._comm.all_gather(as_bytes(staged), as_bytes(kept))
        return pending.then(lambda: _unstage(full, staged, kept))


def _own_part(full: Tensor, comm: Communicator) -> Tensor:
    size = -(-full.numel() // comm.world_size)
    kept = full.new_zeros(size)
    own = full.detach()[comm.rank * size : (comm.rank + 1) * size]
    kept[: own.numel()].copy_(own)
    return kept


def _unstage(full: Tensor, staged: Tensor, kept: Tensor) -> None:
    """End a gather; the argument `kept` keeps the source alive until then."""
    if staged is not full:
        full.copy_(staged[: full.numel()])
