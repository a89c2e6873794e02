"""What faults of sharding are made with: every module that was sharded, changed."""

from __future__ import annotations

from torchparts_conformance.mutants import overlay


def with_sharded(part, change):
    """The part with something done to every module that it shards."""

    def fully_shard(module, **options):
        return change(part.fully_shard(module, **options), options)

    return overlay(part, fully_shard=fully_shard)
