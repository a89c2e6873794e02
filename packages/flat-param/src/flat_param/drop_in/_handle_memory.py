"""How a handle's flat parameter becomes a shard, whole, and a shard again.

Rule: `_whole` tells whether the flat parameter holds every element now.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..comm._comm import CommLog, Communicator
from ._flat_parameter import HandleShardingStrategy
from ._handle_shards import HandleShards
from ._handle_views import HandleViews


class HandleMemory(HandleShards, HandleViews):
    """The side of a handle that holds memory and gathers.

    Attributes:
        device: where the whole parameter is used.
        process_group: ranks that share it, or None.
        rank: this one's number.
    """

    device: torch.device
    process_group: dist.ProcessGroup | None
    rank: int
    _sharding_strategy: HandleShardingStrategy
    _offload_params: bool
    _use_orig_params: bool
    _orig_param_dtype: torch.dtype
    _fwd_bwd_param_dtype: torch.dtype
    _originals: Sequence[nn.Parameter]

    @property
    def uses_sharded_strategy(self) -> bool:
        """Whether ranks hold parts rather than the whole."""
        return self._sharding_strategy is not HandleShardingStrategy.NO_SHARD

    @property
    def _shard_is_whole(self) -> bool:
        """Whether `unshard` has nothing to do: one rank, and no cast."""
        if not self.uses_sharded_strategy:
            return True
        return self.world_size == 1 and self._fwd_bwd_param_dtype == self._orig_param_dtype

    @torch.no_grad()
    def shard(self) -> None:
        """Keep only this rank's part of the flat parameter; not a collective."""
        flat = self.flat_param
        if not self.uses_sharded_strategy:
            self._init_shard_metadata(0, 0, flat.numel() - 1)
        else:
            shard, padded = self._get_shard(flat.detach(), self.rank, self.world_size)
            if self.world_size > 1:
                for param in self._originals:
                    param.data = param.new_empty(0)
            flat.data = shard
            start = shard.numel() * self.rank
            self._init_shard_metadata(padded, start, start + shard.numel() - 1)
        self._originals = ()
        self._whole = self._shard_is_whole
        if self._use_orig_params:
            self._use_sharded_views()

    def init_flat_param_attributes(self) -> None:
        """Note the shard, and place it where it belongs; call it after `shard`."""
        shard = self.flat_param.detach()
        if self._offload_params:
            shard = shard.cpu()
            shard = shard if self.device.type == "cpu" else shard.pin_memory()
        self.flat_param._local_shard = shard
        self.flat_param.data = shard

    def needs_unshard(self) -> bool:
        """Whether `unshard` would have to gather, cast or move."""
        return not self._whole

    def pre_unshard(self) -> bool:
        """Whether the shard has to be cast or moved first; `unshard` does it."""
        shard = self.flat_param
        return self.needs_unshard() and (
            shard.dtype != self._fwd_bwd_param_dtype or shard.device != self.device
        )

    @torch.no_grad()
    def unshard(self) -> None:
        """Make the flat parameter whole and the module's attributes views of it.

        Collective where ranks hold parts: every rank of the group calls it. With original
        parameters kept, values that were put in their place since are taken in first.

        Raises:
            ParameterError: an original parameter changed its shape; names it.
        """
        self._writeback_orig_params()
        if self.needs_unshard():
            shard = self.flat_param._local_shard.to(self.device, self._fwd_bwd_param_dtype)
            full = shard.new_empty(shard.numel() * self.world_size)
            Communicator(self.process_group, log=CommLog()).all_gather(full, shard).wait()
            self.flat_param._full_param_padded = full
            numel = self.flat_param._unpadded_unsharded_size.numel()
            self.flat_param.data = full[:numel]
            self._whole = True
        self._use_unsharded_views(as_params=False)

    def post_unshard(self) -> None:
        """Nothing is left to free; kept for the call order of the source."""

    @torch.no_grad()
    def reshard(self, free_unsharded_flat_param: bool) -> None:
        """Go back to the shard; not a collective."""
        flat = self.flat_param
        if self._shard_is_whole:
            return
        flat.data, self._whole = flat._local_shard, False
        if free_unsharded_flat_param:
            vars(flat).pop("_full_param_padded", None)
        if self._use_orig_params:
            self._use_sharded_views()

    def post_reshard(self) -> None:
        """Nothing is left to free; kept for the call order of the source."""

    def is_sharded(self, tensor: Tensor) -> bool:
        """Whether a tensor has the shard's size and not the whole one's; never for NO_SHARD.

        With one rank the two sizes are equal, and `shard` was the last call unless `unshard` was.
        """
        if not self.uses_sharded_strategy or "_sharded_size" not in vars(self.flat_param):
            return False
        return tensor.size() == self.flat_param._sharded_size and "_full_param_padded" not in vars(
            self.flat_param
        )

    def flat_param_to(self, *args: Any, **kwargs: Any) -> None:
        """Move or cast the flat parameter, as `Tensor.to` takes it, and renew the views."""
        self._writeback_orig_params()
        self.flat_param.data = self.flat_param.to(*args, **kwargs)
        if self._whole:
            self._use_unsharded_views(as_params=self._use_orig_params)
        elif self._use_orig_params:
            self._use_sharded_views()
