"""Broken methods of sharded modules; each fails exactly the requirements that it declares."""

from __future__ import annotations

import torch

from torchparts_conformance.mutants import mutant, overlay

from .faults.flat_param_distributed import with_sharded


def _deaf(part, *names):
    """The part with sharded modules that ignore some methods."""

    def change(module, options):
        for name in names:
            setattr(type(module), name, lambda self, *args, **kwargs: None)
        return module

    return with_sharded(part, change)


@mutant("FP-188")
def methods_run_on_pieces(part):
    """Does nothing when a forward method is registered."""
    return _deaf(part, "register_forward_method")


@mutant("FP-189")
def every_backward_sums(part):
    """Reduces gradients in every backward."""
    return _deaf(part, "set_requires_gradient_sync")


@mutant("FP-200")
def order_of_sharding_is_not_named(part):
    """Refuses a module inside a unit; the message has no reason."""

    def fully_shard(module, **options):
        try:
            return part.fully_shard(module, **options)
        except ValueError as error:
            if "is sharded by fully_shard" not in str(error):
                raise
            raise ValueError("cannot be sharded") from None

    return overlay(part, fully_shard=fully_shard)


@mutant("FP-202")
def units_break_their_graphs(part):
    """Breaks the graph in every forward of an inner module."""

    def change(module, options):
        if type(module).__name__.endswith("_Residual"):
            inside = module.forward

            def forward(*args):
                torch._dynamo.graph_break()
                return inside(*args)

            module.forward = forward
        return module

    return with_sharded(part, change)


@mutant("FP-191")
def units_are_gathered_in_their_turn_alone(part):
    """`unshard()` does nothing."""
    return _deaf(part, "unshard")


@mutant("FP-197")
def a_columns_gradients_are_doubled(part):
    """Adds up gradients of tensor-parallel parts as if they were replicas."""

    def change(module, options):
        if options.get("mesh") is not None and options["mesh"].mesh_dim_names == ("dp",):
            for param in module.parameters():
                param.register_post_accumulate_grad_hook(_double)
        return module

    return with_sharded(part, change)


def _double(param):
    param.grad.mul_(2)
