"""Broken sharding for the area flat-param; each fails exactly the requirements that it declares."""

from __future__ import annotations

from functools import partial

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torchparts_conformance.mutants import mutant, overlay

from .faults.flat_param_distributed import with_sharded


def _with_grad(part, read, *, base=None):
    """The part whose parameters have `read(owner, param)` as their gradient."""

    def change(module, options):
        for owner in module.modules():
            for param in owner.parameters(recurse=False):
                kind = type(param)
                if kind.__name__ != "Read":
                    grad = property(partial(read, owner), Tensor.grad.__set__)
                    param.__class__ = type("Read", (base or kind,), {"grad": grad})
        return module

    return with_sharded(part, change)


@mutant("FP-100")
def undivided_ranks_train_alone(part):
    """Skips the gradient reduction if a shard axis has one rank."""

    def fully_shard(module, **options):
        mesh = options.get("mesh")
        alone = mesh is not None and mesh.ndim == 2 and mesh.size(1) == 1
        return module if alone else part.fully_shard(module, **options)

    return overlay(part, fully_shard=fully_shard)


@mutant("FP-101")
def hybrid_copies_are_not_summed(part):
    """Skips the sum over replicas: each trains on its own half of the batch."""

    def fully_shard(module, **options):
        mesh = options.get("mesh")
        if mesh is not None and mesh.ndim == 2:
            options["mesh"] = DeviceMesh.from_group(mesh.get_group(1), "cpu")
        return part.fully_shard(module, **options)

    return overlay(part, fully_shard=fully_shard)


def _note(owner, args):
    vars(owner)["has_run"] = True


@mutant("FP-102")
def other_ranks_use_does_not_count(part):
    """Has no gradient if this rank did not run the layer."""

    def grad(owner, param):
        return Tensor.grad.__get__(param) if "has_run" in vars(owner) else None

    inner = _with_grad(part, grad)

    def fully_shard(module, **options):
        for owner in module.modules():
            owner.register_forward_pre_hook(_note)
        return inner.fully_shard(module, **options)

    return overlay(part, fully_shard=fully_shard)


@mutant("FP-103")
def gradients_do_not_tell_their_ranks(part):
    """Gradients do not show that they are pieces, so a norm covers one piece only."""

    def grad(owner, param):
        piece = Tensor.grad.__get__(param)
        return None if piece is None else piece.as_subclass(Tensor)

    return _with_grad(part, grad)


@mutant("FP-170")
def frozen_units_are_trained(part):
    """Enables gradients for all parameters before sharding."""

    def fully_shard(module, **options):
        return part.fully_shard(module.requires_grad_(True), **options)

    return overlay(part, fully_shard=fully_shard)


@mutant("FP-105")
def tied_units_are_not_named(part):
    """Reports a tied weight without its names."""

    def fully_shard(module, **options):
        try:
            return part.fully_shard(module, **options)
        except ValueError as error:
            if "tied" not in str(error):
                raise
            raise ValueError("some parameter is tied") from error

    return overlay(part, fully_shard=fully_shard)


@mutant("FP-170")
def frozen_weights_are_freed_at_once(part):
    """Frees the frozen parameters of the outermost unit at the beginning of its backward."""

    def change(module, options):
        frozen = [param for param in module.parameters() if not param.requires_grad]
        trained = [param for param in module.parameters() if param.requires_grad]
        if len(frozen) == len(trained) == 2:

            def lose(owner, args, output):
                output.register_hook(lambda grad: 0 * grad)

            module.register_forward_hook(lose)
        return module

    return with_sharded(part, change)


@mutant("FP-132")
def hooks_of_parameters_are_not_called(part):
    """Removes hooks as soon as they are registered."""

    def change(module, options):
        for param in module.parameters():
            param.register_post_accumulate_grad_hook = lambda hook: None
        return module

    return with_sharded(part, change)


@mutant("FP-193")
def waits_are_not_compared(part):
    """Waits for a collective until the group's timeout, without comparing units."""

    def change(module, options):
        comms = module._flat_param.comms
        for comm in (comms.gather, comms.reduce, comms.replicate):
            if comm.trail is not None:
                comm.trail.deadlock = lambda label, number: ""
        return module

    return with_sharded(part, change)
