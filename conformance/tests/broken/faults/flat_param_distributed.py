"""Helpers for faults of sharding: a change to every sharded module."""

from __future__ import annotations

from torchparts_conformance.mutants import overlay


def with_sharded(part, change):
    """The part with a change to every module that it shards."""

    def fully_shard(module, **options):
        return change(part.fully_shard(module, **options), options)

    return overlay(part, fully_shard=fully_shard)


def with_output_hooks(part, hook_of):
    """The part whose module outputs have a gradient hook, `hook_of()` for each module."""

    def change(module, options):
        hook = hook_of()

        def hook_output(owner, args, output):
            if output.requires_grad:
                output.register_hook(hook)

        module.register_forward_hook(hook_output)
        return module

    return with_sharded(part, change)
