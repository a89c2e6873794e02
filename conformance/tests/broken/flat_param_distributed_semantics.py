"""Broken sharding in less usual steps; each fails exactly the requirements that it declares."""

from __future__ import annotations

import torch
from torch import nn

from torchparts_conformance.mutants import mutant, overlay

from .faults.flat_param_distributed import with_output_hooks, with_sharded


@mutant("FP-171")
def shared_weights_are_copied(part):
    """Gives each module a separate copy of a shared weight."""

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


@mutant("FP-172 FP-174 FP-181")
def gradients_are_replaced(part):
    """After each backward, has only that backward's gradient."""

    def change(module, options):
        module.register_forward_pre_hook(_forget)
        return module

    return with_sharded(part, change)


@mutant("FP-177")
def stored_parameters_are_low(part):
    """Stores parameters in the compute dtype."""

    def fully_shard(module, **options):
        if options.get("mp_policy") is not None:
            module.to(options["mp_policy"].param_dtype)
        return part.fully_shard(module, **options)

    return overlay(part, fully_shard=fully_shard)


def _twice(output):
    """The output, with a doubled gradient."""
    return output + (output - output.detach())


@mutant("FP-173")
def second_forward_is_not_trained(part):
    """Handles a forward before the previous backward as an evaluation."""
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


@mutant("FP-130")
def failed_backward_counts_twice(part):
    """After a backward that raised, doubles the gradients of the next one."""

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


@mutant("FP-180 FP-246")
def evaluation_counts_twice(part):
    """After a forward without gradients, doubles the gradients of the next step."""

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
