"""Checkpointed calls with wrong arguments, random numbers, graphs or contexts."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from torchparts_conformance.mutants import mutant

from .faults.ckpt_wrap import INNER, faulty_call, faulty_offload, faulty_options, is_reentrant


def detached(value: Any) -> Any:
    """A detached tensor; other values unchanged."""
    return value.detach() if isinstance(value, torch.Tensor) else value


@mutant("CW-017 CW-038 CW-039")
def random_numbers_are_not_replayed(part):
    """Recomputation draws new random numbers."""

    def change(module, impl, fn, options):
        if fn is None and not options:
            options = {"preserve_rng_state": False}
        return module, impl, fn, options

    return faulty_options(part, change)


@mutant("CW-005 CW-006 CW-007 CW-018 CW-036 CW-037 CW-039 CW-111")
def nothing_is_recomputed(part):
    """The module runs without checkpointing."""

    def change(wrapper, call, args, kwargs):
        return getattr(wrapper, INNER)(*args, **kwargs)

    return faulty_call(part, change)


@mutant("CW-036 CW-037")
def keyword_tensors_are_only_remembered(part):
    """Keyword tensors are bound to the function instead of being saved."""

    def change(wrapper, call, args, kwargs):
        inner = getattr(wrapper, INNER)
        if is_reentrant(wrapper) or "function" in kwargs or not (args and kwargs):
            return call(*args, **kwargs)
        if isinstance(wrapper.checkpoint_fn, functools.partial) or hasattr(
            wrapper.checkpoint_fn, "keywords"
        ):
            return call(*args, **kwargs)
        return wrapper.checkpoint_fn(functools.partial(inner, **kwargs), *args)

    return faulty_call(part, change)


@mutant("CW-038")
def random_numbers_need_a_positional_tensor(part):
    """If all tensors are keywords, recomputation draws new random numbers."""

    def change(wrapper, call, args, kwargs):
        if args or is_reentrant(wrapper):
            return call(*args, **kwargs)
        names = tuple(kwargs)

        def by_position(*values):
            return getattr(wrapper, INNER)(**dict(zip(names, values, strict=True)))

        return checkpoint(
            by_position, *kwargs.values(), use_reentrant=False, preserve_rng_state=False
        )

    return faulty_call(part, change)


@mutant("CW-046")
def torch_func_is_refused(part):
    """Raises for tensors that torch.func differentiates."""

    def change(wrapper, call, args, kwargs):
        if torch.compiler.is_compiling():
            return call(*args, **kwargs)
        if args and "GradTrackingTensor" in repr(args[0]):
            raise RuntimeError("saved tensor hooks are not supported")
        return call(*args, **kwargs)

    return faulty_call(part, change)


@mutant("CW-047")
def offload_copies_on_the_cpu(part):
    """Saved tensors are copied on every device."""

    def change(call, args, kwargs):
        def pack(tensor):
            return torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device
            ).copy_(tensor.detach())

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return call(*args, **kwargs)

    return faulty_offload(part, change)
