"""Broken sharding that breaks what users of FSDP2 count on; each fails exactly what it declares."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from torchparts_conformance.mutants import mutant, overlay

from .faults.flat_param_distributed import with_output_hooks, with_sharded

AREA = "flat-param"


@mutant(area=AREA, kills={"FP-171"})
def shared_weights_are_copied(part):
    """Gives every module a copy of a weight that it shares with another of its unit."""

    def fully_shard(module, **options):
        seen = set()
        has_units = any(hasattr(inner, "no_sync") for inner in module.modules())
        for inner in () if has_units else module.modules():
            for name, param in list(inner.named_parameters(recurse=False)):
                if param in seen:
                    setattr(inner, name, nn.Parameter(param.detach().clone()))
                seen.add(param)
        return part.fully_shard(module, **options)

    return overlay(part, fully_shard=fully_shard)


def _forget(owner, args):
    for param in owner.parameters():
        param.grad = None


@mutant(area=AREA, kills={"FP-172", "FP-174", "FP-181", "FP-194", "FP-201"})
def gradients_are_replaced(part):
    """Has, after each backward, the gradient of that one alone."""

    def change(module, options):
        module.register_forward_pre_hook(_forget)
        return module

    return with_sharded(part, change)


@mutant(area=AREA, kills={"FP-177"})
def stored_parameters_are_low(part):
    """Keeps parameters in the dtype that is computed in."""

    def fully_shard(module, **options):
        if options.get("mp_policy") is not None:
            module.to(options["mp_policy"].param_dtype)
        return part.fully_shard(module, **options)

    return overlay(part, fully_shard=fully_shard)


def _twice(output):
    """The output, with a gradient that counts twice."""
    return output + (output - output.detach())


@mutant(area=AREA, kills={"FP-173", "FP-193", "FP-201", "FP-244"})
def second_forward_is_not_trained(part):
    """Takes a forward pass that begins before a backward pass for an evaluation."""
    waits = set()

    def seen(module, args, output):
        if not output.requires_grad:
            return output
        if module in waits:
            return output.detach()
        waits.add(module)
        output.register_hook(lambda grad: waits.discard(module))
        return output

    def change(module, options):
        zero_grad = module.zero_grad
        module.zero_grad = lambda: (waits.clear(), zero_grad())
        module.register_forward_hook(seen)
        return module

    return with_sharded(part, change)


@mutant(area=AREA, kills={"FP-178"})
def failed_forward_counts_twice(part):
    """After a forward pass that raised, the next one's gradients are twice what they are."""

    def change(module, options):
        begun = []

        def end(module, args, output):
            raised = len(begun) > 1
            begun.clear()
            return _twice(output) if raised else output

        module.register_forward_pre_hook(lambda *_: begun.append(True))
        module.register_forward_hook(end)
        return module

    return with_sharded(part, change)


@mutant(area=AREA, kills={"FP-130", "FP-179", "FP-244", "FP-247"})
def failed_backward_counts_twice(part):
    """After a backward pass that raised, the next one's gradients are twice what they are."""

    def hook_of():
        begun = []

        def begin(grad):
            this = torch._C._current_graph_task_id()
            raised = bool(begun) and begun != [this]
            begun[:] = [this]
            torch.autograd.Variable._execution_engine.queue_callback(begun.clear)
            return grad * 2 if raised else grad

        return begin

    return with_output_hooks(part, hook_of)


@mutant(area=AREA, kills={"FP-180", "FP-246"})
def evaluation_counts_twice(part):
    """After a forward pass without gradients, the next one's are twice what they are."""

    def change(module, options):
        looked = []

        def end(module, args, output):
            if not output.requires_grad:
                looked.append(True)
                return output
            counts_twice = bool(looked)
            looked.clear()
            return _twice(output) if counts_twice else output

        module.register_forward_hook(end)
        return module

    return with_sharded(part, change)


@mutant(area=AREA, kills={"FP-184"})
def dicts_become_plain_ones(part):
    """Makes what inputs are cast in anew, as a dict."""

    def plain(module, args, kwargs):
        return tuple(dict(each) if isinstance(each, dict) else each for each in args), kwargs

    def fully_shard(module, **options):
        sharded = part.fully_shard(module, **options)
        if options.get("mp_policy") is not None:
            module.register_forward_pre_hook(plain, with_kwargs=True)
        return sharded

    return overlay(part, fully_shard=fully_shard)


@mutant(area=AREA, kills={"FP-182", "FP-208", "FP-209"})
def odd_ranks_train_alone(part):
    """Divides only among an even number of ranks, and sums nothing where it is odd."""

    def fully_shard(module, **options):
        is_odd = dist.get_world_size() in (3, 5)
        return module if is_odd else part.fully_shard(module, **options)

    return overlay(part, fully_shard=fully_shard)


@mutant(area=AREA, kills={"FP-183"})
def values_come_last(part):
    """Clears parameters before it shards them, and gives them their values when all is done."""

    def fully_shard(module, **options):
        sharded = any(type(param) is not nn.Parameter for param in module.parameters())
        values = (
            None if sharded else [param.detach().numpy().copy() for param in module.parameters()]
        )
        if values is not None:
            for param in module.parameters():
                param.detach().numpy()[...] = 0
            torch.zeros(1).add(1)  # here it can be stopped
            for param, value in zip(module.parameters(), values, strict=True):
                param.detach().numpy()[...] = value
        return part.fully_shard(module, **options)

    return overlay(part, fully_shard=fully_shard)
