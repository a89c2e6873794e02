"""Trackers with faults in names, forwards, threads or nesting."""

from __future__ import annotations

import sys
import threading

from torchparts_conformance.mutants import mutant

from .faults.mod_tracker import with_hooks, with_names, with_parents, with_tracker


@mutant("MT-105")
def roots_share_a_label(part):
    """Names roots by their class only."""
    return with_names(part, lambda module, name: name and name.partition("#")[0])


@mutant("MT-114")
def own_hooks_run_outside(part):
    """Attributes a module with forward hooks to its caller."""

    def change(tracker, names):
        hooked = getattr(tracker.module(tracker.current or ""), "_forward_hooks", None)
        return names - {tracker.current} if hooked and tracker.phase == "forward" else names

    return with_parents(part, change)


@mutant("MT-115")
def threads_share_a_set(part):
    """Shares one set of names between all threads."""
    lock = threading.Lock()

    def change(tracker, names):
        with lock:
            told = tracker.__dict__.setdefault("told", {})
            told[threading.get_ident()] = names
            return set().union(*told.values())

    return with_parents(part, change)


@mutant("MT-116")
def second_entry_counts_twice(part):
    """Has each event twice if entered twice."""

    def enter(base, self):
        self.entered = getattr(self, "entered", 0) + 1
        return base.__enter__(self)

    def change(tracker, hooks):
        def pre_fw(module, args):
            for _ in range(max(1, getattr(tracker, "entered", 1))):
                hooks[0](module, args)

        return [hooks[0] and pre_fw, *hooks[1:]]

    return with_hooks(with_tracker(part, __enter__=enter), change)


@mutant("MT-122")
def modules_are_compared_by_value(part):
    """Stores names in a dictionary by module, which calls `__hash__` and `__eq__`."""

    def change(tracker, names):
        known = {tracker.module(tracker.current or ""): tracker.current}
        return names | (names & set(known.values()))

    return with_parents(part, change)


@mutant("MT-124 MT-402")
def compiled_models_are_unseen(part):
    """Is disabled while code is compiled."""

    def in_compiled():
        frame = sys._getframe()
        while frame is not None:
            if type(frame.f_locals.get("self")).__name__ == "OptimizedModule":
                return True
            frame = frame.f_back
        return False

    def eager(hook):
        return hook and (lambda module, *rest: in_compiled() or hook(module, *rest))

    return with_hooks(part, lambda t, hooks: [*map(eager, hooks[:2]), *hooks[2:]])


@mutant("MT-132")
def fake_tensors_are_unseen(part):
    """Has no events for modules with fake tensors."""

    def is_fake(module):
        weights = [] if module is None else list(module.parameters())
        return any(type(weight.data).__name__ == "FakeTensor" for weight in weights)

    def real(hook):
        return hook and (lambda module, *rest: is_fake(module) or hook(module, *rest))

    return with_hooks(part, lambda t, hooks: [real(hook) for hook in hooks])


@mutant("MT-137")
def first_to_leave_takes_all_with_it(part):
    """Stops every tracker when one is left."""
    entered = []

    def enter(base, self):
        entered.append(self)
        return base.__enter__(self)

    def leave(base, self, *exc):
        others = [tracker for tracker in entered if tracker is not self]
        base.__exit__(self, *exc)
        if self in entered:
            entered.remove(self)
        for tracker in others:
            if tracker in entered:
                entered.remove(tracker)
                base.__exit__(tracker, *exc)

    def guarded(base, self, *exc):
        if self in entered:
            leave(base, self, *exc)

    return with_tracker(part, __enter__=enter, __exit__=guarded)
