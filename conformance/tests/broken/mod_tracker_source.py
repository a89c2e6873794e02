"""Trackers that break the source's behaviour; each fails exactly what it declares."""

from __future__ import annotations

from torch import nn

from torchparts_conformance.mutants import mutant

from .faults.mod_tracker import (
    at_first_entry,
    listen_to,
    with_hooks,
    with_names,
    with_parents,
    with_tracker,
)


def _without_parts_of_dicts(tracker, names):
    def in_dict(name):
        return isinstance(tracker.module(name.rpartition(".")[0]), nn.ModuleDict)

    return {name for name in names if not in_dict(name)}


@mutant("MT-001")
def innermost_is_missing_in_forward(part):
    """Leaves modules of a ModuleDict out of `parents`."""
    return with_parents(part, lambda t, n: n if t.is_bw else _without_parts_of_dicts(t, n))


@mutant("MT-002")
def innermost_is_missing_in_backward(part):
    """Leaves modules of a ModuleDict out of `parents` in backward."""
    return with_parents(part, lambda t, n: _without_parts_of_dicts(t, n) if t.is_bw else n)


@mutant("MT-003")
def only_the_first_iteration_is_seen(part):
    """Has no events for a root that is called again."""
    return with_parents(part, lambda t, n: {"Global"} if t.iteration else n)


@mutant("MT-004 MT-005 MT-007 MT-009 MT-010 MT-102 MT-109 MT-133")
def direction_is_turned_around(part):
    """Reports backward in forward."""
    return with_tracker(part, is_bw=lambda base, self: not base.is_bw.fget(self))


@mutant("MT-005")
def backward_never_ends(part):
    """Reports backward after a backward has ended."""

    def listen(tracker):
        listen_to(tracker, post_backward=lambda *_: setattr(tracker, "had_one", True))

    def is_bw(base, self):
        stuck = getattr(self, "had_one", False) and self.phase == "outside"
        return stuck or base.is_bw.fget(self)

    return with_tracker(at_first_entry(part, listen), is_bw=is_bw)


@mutant("MT-006")
def inputs_close_inside_out(part):
    """In backward, leaves a module only after all modules inside it."""

    def change(tracker, hooks):
        opened, held = [], []

        def pre_bw(module, grads):
            opened.append(module)
            hooks[2](module, grads)

        def contains(module):
            inside = [] if module is None else list(module.children())
            return any(other is part for other in opened for part in inside)

        def post_bw(module, grads):
            if contains(module):
                held.append((module, grads))
                return
            opened[:] = [other for other in opened if other is not module]
            hooks[3](module, grads)
            while held and not contains(held[-1][0]):
                post_bw(*held.pop())

        return [*hooks[:2], hooks[2] and pre_bw, hooks[3] and post_bw]

    return with_hooks(part, change)


@mutant("MT-007")
def name_is_not_among_the_parents_in_backward_hooks(part):
    """Removes the module from `parents` before its last hook."""

    def change(tracker, hooks):
        def post_bw(module, grads):
            tracker.hidden = True
            try:
                hooks[3](module, grads)
            finally:
                tracker.hidden = False

        return [*hooks[:3], hooks[3] and post_bw]

    changed = with_hooks(part, change)
    return with_parents(changed, lambda t, n: {"Global"} if getattr(t, "hidden", False) else n)


@mutant("MT-008")
def second_hook_replaces_the_first(part):
    """Accepts every registration."""

    def register(base, self, *hooks, **named):
        try:
            base.register_user_hooks(self, *hooks, **named)
        except AssertionError:
            self.clear_user_hooks()
            base.register_user_hooks(self, *hooks, **named)

    return with_tracker(part, register_user_hooks=register)


@mutant("MT-009")
def hooks_of_dead_modules_are_dropped(part):
    """Calls no hook for a freed module."""

    def alive(hook):
        return hook and (lambda module, grads: module is not None and hook(module, grads))

    return with_hooks(part, lambda t, hooks: [*hooks[:2], alive(hooks[2]), alive(hooks[3])])


@mutant("MT-010 MT-011")
def recompute_is_silent(part):
    """Calls no forward hook in recomputation."""

    def change(tracker, hooks):
        def forward_only(hook):
            return hook and (lambda *args: tracker.is_bw or hook(*args))

        return [forward_only(hooks[0]), forward_only(hooks[1]), *hooks[2:]]

    return with_hooks(part, change)


@mutant("MT-011 MT-118")
def closing_events_are_lost(part):
    """Leaves no module at the end of a backward."""
    return with_hooks(
        part,
        lambda t, hooks: [
            *hooks[:3],
            hooks[3] and (lambda module, grads: grads and hooks[3](module, grads)),
        ],
    )


@mutant("MT-012")
def strangers_have_names(part):
    """Returns a name for every module."""
    return with_names(part, lambda module, name: name or type(module).__name__)


@mutant("MT-010 MT-011 MT-111")
def failed_forward_leaves_an_event(part):
    """Has one more exit after a failed forward."""

    def change(tracker, hooks):
        failed = []

        def post_fw(module, args, output):
            if output is None:
                failed.append(module)
            hooks[1](module, args, output)

        def post_bw(module, grads):
            hooks[3](module, grads)
            while failed:
                hooks[3](failed.pop(), ())

        return [hooks[0], hooks[1] and post_fw, hooks[2], hooks[3] and post_bw]

    return with_hooks(part, change)
