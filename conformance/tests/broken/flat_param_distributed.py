"""Broken sharding for the area flat-param; each fails exactly what it declares."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchparts_conformance.mutants import mutant, overlay

from .faults.flat_param_distributed import with_sharded

AREA = "flat-param"


def _with_grad(part, read):
    """The part whose parameters give the gradient that `read(owner, param)` gives."""

    def change(module, options):
        for owner in module.modules():
            for param in owner.parameters(recurse=False):
                kind = type(param)
                if kind.__name__ != "Read":
                    grad = property(partial(read, owner), Tensor.grad.__set__)
                    param.__class__ = type("Read", (kind,), {"grad": grad})
        return module

    return with_sharded(part, change)


@mutant(area=AREA, kills={"FP-100"})
def undivided_ranks_train_alone(part):
    """Takes a shard axis of one rank for nothing to do, and sums no gradients."""

    def fully_shard(module, **options):
        mesh = options.get("mesh")
        alone = mesh is not None and mesh.ndim == 2 and mesh.size(1) == 1
        return module if alone else part.fully_shard(module, **options)

    return overlay(part, fully_shard=fully_shard)


@mutant(area=AREA, kills={"FP-101", "FP-233"})
def hybrid_copies_are_not_summed(part):
    """Leaves out the sum over copies: each copy trains on its own half of the batch."""

    def fully_shard(module, **options):
        mesh = options.get("mesh")
        if mesh is not None and mesh.ndim == 2:
            options["mesh"] = DeviceMesh.from_group(mesh.get_group(1), "cpu")
        return part.fully_shard(module, **options)

    return overlay(part, fully_shard=fully_shard)


def _note(owner, args):
    vars(owner)["has_run"] = True


@mutant(area=AREA, kills={"FP-102"})
def other_ranks_use_does_not_count(part):
    """Has no gradient where this rank itself did not run the layer."""

    def grad(owner, param):
        return Tensor.grad.__get__(param) if "has_run" in vars(owner) else None

    inner = _with_grad(part, grad)

    def fully_shard(module, **options):
        for owner in module.modules():
            owner.register_forward_pre_hook(_note)
        return inner.fully_shard(module, **options)

    return overlay(part, fully_shard=fully_shard)


@mutant(area=AREA, kills={"FP-103", "FP-133", "FP-176"})
def gradients_do_not_tell_their_ranks(part):
    """Hands out gradients that nothing shows to be pieces, so that a norm is of one piece."""

    def grad(owner, param):
        piece = Tensor.grad.__get__(param)
        return None if piece is None else piece.detach()

    return _with_grad(part, grad)


@mutant(area=AREA, kills={"FP-110", "FP-131", "FP-170"})
def frozen_units_are_trained(part):
    """Makes everything trainable before it is sharded."""

    def fully_shard(module, **options):
        return part.fully_shard(module.requires_grad_(True), **options)

    return overlay(part, fully_shard=fully_shard)


@mutant(area=AREA, kills={"FP-105", "FP-135"})
def tied_units_are_not_named(part):
    """Says that something is tied, but not what."""

    def fully_shard(module, **options):
        try:
            return part.fully_shard(module, **options)
        except ValueError as error:
            if "tied" not in str(error):
                raise
            raise ValueError("some parameter is tied") from error

    return overlay(part, fully_shard=fully_shard)


@mutant(area=AREA, kills={"FP-135"})
def units_beside_part_their_weight(part):
    """Gives a unit a copy of the weight that the one beside it has sharded."""
    first = {}

    def fully_shard(module, **options):
        for name, param in list(module.named_parameters(recurse=False)):
            if id(param) in first:
                setattr(module, name, nn.Parameter(first[id(param)][1]))
            else:
                first[id(param)] = param, param.detach().clone()
        return part.fully_shard(module, **options)

    return overlay(part, fully_shard=fully_shard)


@mutant(area=AREA, kills={"FP-104", "FP-233"})
def no_sync_sums_all_the_same(part):
    """Sums gradients over ranks inside no_sync too."""

    def change(module, options):
        type(module).no_sync = lambda module: nullcontext()
        return module

    return with_sharded(part, change)


@mutant(area=AREA, kills={"FP-112", "FP-233"})
def plan_forgets_the_second_gather(part):
    """Plans as if parameters were gathered once."""

    def plan_training(units, *, world_size):
        return part.plan_training(units, world_size=world_size, reshard_after_forward=False)

    return overlay(part, plan_training=plan_training)


@mutant(area=AREA, kills={"FP-111", "FP-194"})
def cut_parameters_are_not_marked(part):
    """Forgets that parameters are cut, so that no optimizer is refused."""

    def change(module, options):
        for param in module.parameters():
            vars(param).pop("_flat_param_mark", None)
        return module

    return with_sharded(part, change)


@mutant(area=AREA, kills={"FP-113"})
def differing_models_are_not_named(part):
    """Says that ranks differ, but not in what."""

    def fully_shard(module, **options):
        try:
            return part.fully_shard(module, **options)
        except RuntimeError as error:
            if "on rank 1" in str(error):
                raise RuntimeError("ranks differ") from error
            raise

    return overlay(part, fully_shard=fully_shard)


@mutant(area=AREA, kills={"FP-130", "FP-179", "FP-244", "FP-247"})
def stopped_gradients_are_kept(part):
    """Doubles the gradients of the step after one that was stopped."""

    def change(module, options):
        state = {"runs": False}

        def begin(factor, grad):
            state["runs"] = True
            end = partial(state.update, runs=False)
            torch.autograd.Variable._execution_engine.queue_callback(end)
            return factor * grad

        def after(owner, args, output):
            if output.requires_grad:
                output.register_hook(partial(begin, 2 if state["runs"] else 1))

        module.register_forward_hook(after)
        return module

    return with_sharded(part, change)


@mutant(area=AREA, kills={"FP-131", "FP-170"})
def frozen_weights_are_freed_at_once(part):
    """Empties the frozen parts of the outermost unit when its backward begins."""

    def change(module, options):
        frozen = [param for param in module.parameters() if not param.requires_grad]
        trained = [param for param in module.parameters() if param.requires_grad]
        if len(frozen) == len(trained) == 2:

            def lose(owner, args, output):
                output.register_hook(lambda grad: 0 * grad)

            module.register_forward_hook(lose)
        return module

    return with_sharded(part, change)


@mutant(area=AREA, kills={"FP-132", "FP-175"})
def hooks_of_parameters_are_not_called(part):
    """Forgets hooks as soon as they are registered."""

    def change(module, options):
        for param in module.parameters():
            param.register_post_accumulate_grad_hook = lambda hook: None
        return module

    return with_sharded(part, change)


def _with_comms(part, change):
    """The part with something done to every communicator of what it shards."""

    def each(module, options):
        comms = module._flat_param.comms
        for comm in (comms.gather, comms.reduce, comms.replicate):
            change(comm)
        return module

    return with_sharded(part, each)


@mutant(area=AREA, kills={"FP-134"})
def orders_are_not_compared(part):
    """Counts what a rank has gathered and summed, and forgets of which unit."""
    return _with_comms(part, lambda comm: setattr(comm, "number", 0))


@mutant(area=AREA, kills={"FP-193"})
def waits_are_not_compared(part):
    """Waits for a collective until the group's timeout, whatever the others wait for."""
    return _with_comms(part, lambda comm: setattr(comm, "_look_for_deadlock", lambda pending: None))


@mutant(area=AREA, kills={"FP-194"})
def fused_steps_are_not_seen(part):
    """Takes what was gathered for new as long as torch's version counters stand still."""

    def change(module, options):
        unit = module._flat_param
        unit._current_version = lambda: (0, sum(part.version for part in unit.parts))
        return module

    return with_sharded(part, change)


@mutant(area=AREA, kills={"FP-195"})
def assigned_parameters_are_dropped(part):
    """Takes in what was put in place of a parameter only where a unit is not whole yet."""

    def change(module, options):
        unit = module._flat_param
        take = unit.take_changes
        unit.take_changes = lambda: None if unit.is_unsharded else take()
        return module

    return with_sharded(part, change)
