"""A handle's parts per rank, and what lies in them."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from ._flat_parameter import FlatParameter, FlatParamShardMetadata, ShardParamInfo
from ._handle_places import shard_part


class HandleShards:
    """The side of a handle that knows which elements each rank holds.

    Attributes:
        flat_param: whole or sharded.
    """

    flat_param: FlatParameter

    def _init_shard_metadata(self, padded: int, start: int, end: int) -> None:
        flat = self.flat_param
        flat._sharded_size = flat.size()
        flat._shard_numel_padded = padded
        flat._shard_param_infos = self._get_shard_metadata(start, end)

    def _get_shard_metadata(
        self, unsharded_start_idx: int, unsharded_end_idx: int
    ) -> tuple[ShardParamInfo, ...]:
        """What `[start, end]` of the unsharded flat parameter holds; both ends included."""
        return tuple(
            shard_part(first, stop - 1, unsharded_start_idx, unsharded_end_idx)
            for first, stop in self.flat_param._layout.ranges
        )

    def shard_metadata(self) -> FlatParamShardMetadata:
        """What this rank's shard holds, parameters without a part left out."""
        flat = self.flat_param
        held = [index for index, info in enumerate(flat._shard_param_infos) if info.in_shard]
        parts = [flat._shard_param_infos[index] for index in held]
        return FlatParamShardMetadata(
            [flat._fqns[index] for index in held],
            [flat._shapes[index] for index in held],
            [flat._strides[index] for index in held],
            [flat._contiguities[index] for index in held],
            [flat._numels[index] for index in held],
            [(part.intra_param_start_idx, part.intra_param_end_idx) for part in parts],
        )

    def _get_flat_param_offsets(self) -> list[tuple[int, int]]:
        """`(first, last)` of every stretch, padding included."""
        ends = [0]
        for numel in self.flat_param._numels_with_padding:
            ends.append(ends[-1] + numel)
        return [(start, stop - 1) for start, stop in pairwise(ends)]

    @staticmethod
    def _get_unpadded_shard(tensor: Tensor, rank: int, world_size: int) -> tuple[Tensor, int]:
        """This rank's part of a flat tensor, a view, and how many elements it lacks."""
        flat = tensor.reshape(-1)
        size = -(-flat.numel() // world_size)
        part = flat[size * rank : size * (rank + 1)]
        return part, size - part.numel()

    @staticmethod
    def _get_shard(tensor: Tensor, rank: int, world_size: int) -> tuple[Tensor, int]:
        """This rank's part, zero-padded to equal length; a copy where it is not the whole."""
        part, lacking = HandleShards._get_unpadded_shard(tensor, rank, world_size)
        if world_size == 1:
            return part, 0
        return torch.nn.functional.pad(part, (0, lacking)) if lacking else part.clone(), lacking

    @staticmethod
    def _get_sharded_size(tensor: Tensor, rank: int, world_size: int) -> torch.Size:
        """The size of a rank's part, padding included."""
        return torch.Size([-(-tensor.numel() // world_size)])

    @property
    def _fqns_in_shard(self) -> list[str]:
        flat = self.flat_param
        infos = zip(flat._fqns, flat._shard_param_infos, strict=True)
        return [fqn for fqn, info in infos if info.in_shard]
