"""Trackers with wrong events, gradients or state in backward."""

from __future__ import annotations

from dataclasses import is_dataclass

import torch

from torchparts_conformance.mutants import mutant

from .faults.mod_tracker import (
    at_first_entry,
    following,
    listen_to,
    skipping_entry,
    sticking,
    with_hooks,
    with_parents,
    with_tracker,
)


@mutant("MT-101")
def recompute_counts_for_whoever_asked(part):
    """In recomputation, adds the modules whose backward started it."""
    return with_parents(following(part), lambda t, n: n | t.open if t.phase == "recompute" else n)


@mutant("MT-101 MT-102")
def what_was_recomputed_is_lost(part):
    """In recomputation and its backward, has only the caller of the checkpoint."""

    def listen(tracker):
        tracker.again = set()

        def note(module, args, kwargs):
            if tracker.phase == "recompute":
                tracker.again.add(tracker.current)

        listen_to(tracker, pre_forward=note)

    return with_parents(at_first_entry(part, listen), lambda t, n: n - t.again if t.is_bw else n)


@mutant("MT-103")
def leaves_without_entries(part):
    """Has no entries for modules that recomputation built."""
    return skipping_entry(part, lambda tracker, args, output: tracker.is_bw)


@mutant("MT-107")
def keyword_inputs_stay_open(part):
    """Keeps modules with keyword inputs only in `parents` until the end."""
    return sticking(part, lambda args, kwargs, output: kwargs and not args)


@mutant("MT-108")
def dataclass_outputs_are_not_entered(part):
    """Does not find outputs in a dataclass."""
    return skipping_entry(part, lambda tracker, args, output: is_dataclass(output))


@mutant("MT-109")
def identities_stay_open(part):
    """Never leaves a module that returned its input."""
    return sticking(part, lambda args, kwargs, output: any(value is output for value in args))


@mutant("MT-113")
def failed_backward_leaves_names(part):
    """Clears names only when modules are left, which a failed backward does not do."""
    return with_parents(following(part), lambda t, n: n | t.open if t.phase == "outside" else n)


@mutant("MT-117 MT-121")
def grad_of_a_leaf_is_refused(part):
    """Uses a hook on leaf inputs that torch.autograd.grad refuses."""

    def change(tracker, hooks):
        def pre_fw(module, args):
            leaves = [value for value in args if getattr(value, "is_leaf", False)]
            if torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves):
                wanted = [leaf for leaf in leaves if leaf.requires_grad]
                torch.autograd.graph.register_multi_grad_hook(wanted, lambda grads: None)
            hooks[0](module, args)

        return [hooks[0] and pre_fw, *hooks[1:]]

    return with_hooks(part, change)


@mutant("MT-118")
def only_one_backward_is_told(part):
    """Has exits only in the first backward of a graph."""

    def change(tracker, hooks):
        left = set()

        def pre_fw(module, args):
            left.clear()
            hooks[0](module, args)

        def post_bw(module, grads):
            if grads or id(module) not in left:
                hooks[3](module, grads)
            left.add(id(module))

        return [hooks[0] and pre_fw, *hooks[1:3], hooks[3] and post_bw]

    return with_hooks(part, change)


@mutant("MT-119")
def what_gets_no_gradient_stays_open(part):
    """Leaves only modules whose inputs got a gradient."""
    return with_hooks(
        part,
        lambda t, hooks: [
            *hooks[:3],
            hooks[3] and (lambda m, g: (g and g[0] is None) or hooks[3](m, g)),
        ],
    )


@mutant("MT-103 MT-120")
def inference_is_remembered(part):
    """Has an exit for every forward without gradients."""

    def change(tracker, hooks):
        seen = []

        def pre_fw(module, args):
            if not torch.is_grad_enabled():
                seen.append(module)
            hooks[0](module, args)

        def post_bw(module, grads):
            hooks[3](module, grads)
            while seen:
                hooks[3](seen.pop(), ())

        return [hooks[0] and pre_fw, *hooks[1:3], hooks[3] and post_bw]

    return with_hooks(part, change)


@mutant("MT-131")
def outputs_are_touched(part):
    """Changes a root's result slightly."""

    def change(tracker, hooks):
        def post_fw(module, args, output):
            if len(tracker.parents) == 2 and isinstance(output, torch.Tensor):
                output.data.add_(1e-3)
            hooks[1](module, args, output)

        return [hooks[0], hooks[1] and post_fw, *hooks[2:]]

    return with_hooks(part, change)


@mutant("MT-133")
def attribution_ends_with_the_block(part):
    """Attributes nothing after the block."""

    def leave(base, self, *exc):
        self.gone = True
        return base.__exit__(self, *exc)

    return with_parents(
        with_tracker(part, __exit__=leave),
        lambda t, n: {"Global"} if getattr(t, "gone", False) else n,
    )
