"""Broken ways to fit a model in place, of the area sac-policies; each fails what it declares."""

from __future__ import annotations

import copy
import dataclasses
import functools

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from torchparts_conformance.mutants import mutant, overlay

AREA = "sac-policies"


class _Found:
    """What `fit_` found, with an `undo` of another kind."""

    def __init__(self, found, undo):
        self._found, self.undo = found, undo

    def __getattr__(self, name):
        return getattr(self._found, name)


def _after(part, change):
    """The part whose `fit_`, where it found something, goes on with `change(model, found)`."""

    def fit_(model, batch, budget, **kwargs):
        found = part.fit_(model, batch, budget, **kwargs)
        return change(model, found) if found else found

    return overlay(part, fit_=fit_)


@mutant(area=AREA, kills={"SP-170", "SP-182"})
def fitted_to_a_larger_budget(part):
    """Divides an eighth more than it was given."""

    def fit_(model, batch, budget, **kwargs):
        found = part.fit_(model, batch, budget, **kwargs)
        if found:
            found.undo()
            found = part.fit_(model, batch, found.budget_bytes * 9 // 8, **kwargs)
        return found

    return overlay(part, fit_=fit_)


@mutant(area=AREA, kills={"SP-171", "SP-218"})
def undo_forgets_a_block(part):
    """Leaves the first block that it changed as it is."""

    def change(model, found):
        changed = [module for module in model.modules() if "forward" in vars(module)]

        def undo():
            kept = changed[0].forward
            found.undo()
            changed[0].forward = kept

        return _Found(found, undo)

    return _after(part, change)


@mutant(area=AREA, kills={"SP-171"})
def undo_leaves_a_note(part):
    """Leaves an attribute on each block that was changed."""

    def change(model, found):
        changed = [module for module in model.modules() if "forward" in vars(module)]

        def undo():
            found.undo()
            for module in changed:
                module.was_fitted = True

        return _Found(found, undo)

    return _after(part, change)


@mutant(area=AREA, kills={"SP-172"})
def another_batch_is_refused(part):
    """Raises where an argument has other sizes, there is another one, or autocast is on."""

    def fit_(model, batch, budget, **kwargs):
        found = part.fit_(model, batch, budget, **kwargs)
        if not found:
            return found
        sizes = {name: value.shape for name, value in batch.items()}

        def check(module, args, given):
            now = {name: value.shape for name, value in given.items()}
            if now != sizes or torch.is_autocast_enabled(next(iter(batch.values())).device.type):
                raise RuntimeError("the plan was made for another batch")

        handle = model.register_forward_pre_hook(check, with_kwargs=True)

        def undo():
            found.undo()
            handle.remove()

        return _Found(found, undo)

    return overlay(part, fit_=fit_)


@mutant(area=AREA, kills={"SP-172", "SP-173", "SP-182", "SP-217", "SP-218"})
def a_gradient_is_rounded(part):
    """Gives the head's weight a gradient that differs in its last bits."""

    def change(model, found):
        handle = model.head.weight.register_hook(lambda grad: grad * (1 + 2**-20))

        def undo():
            found.undo()
            handle.remove()
            if not model.head.weight._backward_hooks:
                model.head.weight._backward_hooks = None

        return _Found(found, undo)

    return _after(part, change)


class _Inside(nn.Module):
    """Holds a block, as a wrapper does."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


@mutant(area=AREA, kills={"SP-174", "SP-216"})
def a_block_is_wrapped(part):
    """Puts another module in the place of the first block, until undo."""

    def change(model, found):
        block = model.blocks[0]
        model.blocks[0] = _Inside(block)

        def undo():
            found.undo()
            model.blocks[0] = block

        return _Found(found, undo)

    return _after(part, change)


@mutant(area=AREA, kills={"SP-170", "SP-171", "SP-182", "SP-216", "SP-218"})
def a_copy_is_changed(part):
    """Fits a copy of the model, which nobody trains."""

    def fit_(model, batch, budget, **kwargs):
        with torch.random.fork_rng():
            return part.fit_(copy.deepcopy(model), batch, budget, **kwargs)

    return overlay(part, fit_=fit_)


@mutant(area=AREA, kills={"SP-175", "SP-217"})
def too_small_a_budget_gets_the_least(part):
    """Where nothing fits, does the most that can be done, and calls it found."""

    def fit_(model, batch, budget, **kwargs):
        found = part.fit_(model, batch, budget, **kwargs)
        return found or part.fit_(model, batch, found.smallest_bytes + 4096, **kwargs)

    return overlay(part, fit_=fit_)


@mutant(area=AREA, kills={"SP-175", "SP-217"})
def smallest_is_the_budget(part):
    """Says of a budget that is too small that it is what can be had."""

    def fit_(model, batch, budget, **kwargs):
        found = part.fit_(model, batch, budget, **kwargs)
        return found or dataclasses.replace(found, smallest_bytes=found.budget_bytes)

    return overlay(part, fit_=fit_)


@mutant(area=AREA, kills={"SP-176"})
def fitting_draws_a_number(part):
    """Advances the generator by the steps that were measured."""

    def change(model, found):
        torch.rand(1)
        return found

    return _after(part, change)


@mutant(area=AREA, kills={"SP-176"})
def fitting_clears_gradients(part):
    """Leaves the gradients of what it measured in the place of those that were there."""

    def change(model, found):
        for parameter in model.parameters():
            parameter.grad = None
        return found

    return _after(part, change)


@mutant(area=AREA, kills={"SP-182"})
def kept_bytes_are_taken_for_a_peak(part):
    """Divides a budget of kept bytes as if it were one of the peak."""

    def fit_(model, batch, budget, *, of="peak", **kwargs):
        if isinstance(budget, float):
            return part.fit_(model, batch, budget, **kwargs) or part.fit_(model, batch, "100%")
        return part.fit_(model, batch, budget, of=of, **kwargs)

    return overlay(part, fit_=fit_)


@mutant(area=AREA, kills={"SP-183"})
def second_forward_counts_again(part):
    """Runs the first block that is checkpointed twice, buffers and all."""

    def change(model, found):
        block = next((module for module in model.modules() if "forward" in vars(module)), None)
        if block is not None and any(True for _ in block.buffers()):
            own = functools.partial(type(block).forward, block)
            block.forward = functools.partial(checkpoint, own, use_reentrant=False)
        return found

    return _after(part, change)


@mutant(area=AREA, kills={"SP-217"})
def reentrant_second_forward(part):
    """Runs the last block that is checkpointed as one node of the graph."""

    def change(model, found):
        blocks = [module for module in model.modules() if "forward" in vars(module)]
        if found.of == "kept" and blocks and not list(blocks[-1].buffers()):
            own = functools.partial(type(blocks[-1]).forward, blocks[-1])
            blocks[-1].forward = functools.partial(checkpoint, own, use_reentrant=True)
        return found

    return _after(part, change)


@mutant(area=AREA, kills={"SP-216", "SP-217"})
def second_forward_reads_what_is_there(part):
    """Gives the second forward of a block its input without looking whether it was written to."""

    def rerun(function, x, mask=None):
        values, state = [], torch.get_rng_state()
        count = iter(range(1000))

        def unpack(at):
            if not values:
                with torch.random.fork_rng(), saved_tensors_hooks(values.append, None):
                    torch.set_rng_state(state)
                    function(x, mask)
            return values[at]

        with saved_tensors_hooks(lambda tensor: next(count), unpack):
            return function(x, mask)

    def change(model, found):
        for block in model.modules():
            if "forward" in vars(block) and type(block).__name__ in ("Block", "Rising"):
                own = functools.partial(type(block).forward, block)
                block.forward = functools.partial(rerun, own)
        return found

    return _after(part, change)


@mutant(area=AREA, kills={"SP-216"})
def undo_looks_for_what_it_put_there(part):
    """Leaves everything where another forward is in the place of one of its own."""

    def change(model, found):
        put = {each: vars(each)["forward"] for each in model.modules() if "forward" in vars(each)}

        def undo():
            if all(vars(each).get("forward") is own for each, own in put.items()):
                found.undo()

        return _Found(found, undo)

    return _after(part, change)


def _compiled(model):
    return [each for each in model.modules() if each._compiled_call_impl is not None]


@mutant(area=AREA, kills={"SP-218"})
def compiled_blocks_run_without_their_code(part):
    """Fits what blocks were before they were compiled, until undo."""

    def fit_(model, batch, budget, **kwargs):
        compiled = [(each, each._compiled_call_impl) for each in _compiled(model)]
        for each, _ in compiled:
            each._compiled_call_impl = None
        found = part.fit_(model, batch, budget, **kwargs)

        def undo():
            found.undo()
            for each, call in compiled:
                each._compiled_call_impl = call

        return _Found(found, undo) if found and compiled else found

    return overlay(part, fit_=fit_)


@mutant(area=AREA, kills={"SP-218"})
def undo_leaves_blocks_uncompiled(part):
    """Takes what blocks were compiled to away with the regions."""

    def change(model, found):
        def undo():
            found.undo()
            for each in _compiled(model):
                each._compiled_call_impl = None

        return _Found(found, undo)

    return _after(part, change)
