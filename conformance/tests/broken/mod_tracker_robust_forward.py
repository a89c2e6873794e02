"""Trackers with a fault in names, forwards, threads or their own life."""

from __future__ import annotations

import sys
import threading
import warnings

from torchparts_conformance.mutants import mutant

from .faults.mod_tracker import at_first_entry, with_hooks, with_names, with_parents, with_tracker

AREA = "mod-tracker"


@mutant(area=AREA, kills={"MT-104"})
def recursion_warns(part):
    """Warns when a module is entered again."""

    def enter(base, self):
        def warn(call, args, kwargs):
            if call.stack.count(call.name) > 1:
                warnings.warn("entered again", stacklevel=2)

        self.subscribe(pre_forward=warn)
        return base.__enter__(self)

    return with_tracker(part, __enter__=enter)


@mutant(area=AREA, kills={"MT-105", "MT-129"})
def roots_share_a_label(part):
    """Names roots by their class alone."""
    return with_names(part, lambda module, name: name and name.partition("#")[0])


@mutant(area=AREA, kills={"MT-106"})
def late_modules_are_named_by_class(part):
    """Names what was added after the first call of its root by its class."""

    def names_below(module, name):
        yield name
        for key, child in vars(module)["_modules"].items():
            yield from names_below(child, f"{name}.{key}")

    def listen(tracker):
        tracker.first = {}

        def note(call, args, kwargs):
            if call.name not in tracker.first:
                tracker.first[call.name] = set(names_below(call.module, call.name))

        tracker.subscribe(pre_forward=note, max_depth=1)

    def get_known_fqn(base, self, mod):
        name = base.get_known_fqn(self, mod)
        known = getattr(self, "first", {}).get((name or "").partition(".")[0])
        return type(mod).__name__ if known and name not in known else name

    return with_tracker(at_first_entry(part, listen), get_known_fqn=get_known_fqn)


@mutant(area=AREA, kills={"MT-112"})
def interrupt_leaves_names(part):
    """Does not clean up after an exception that is not an Exception."""

    def listen(tracker):
        tracker.stuck = set()

        def note(call, args, kwargs, output):
            raised = sys.exc_info()[1]
            if raised is not None and not isinstance(raised, Exception):
                tracker.stuck.add(call.name)

        tracker.subscribe(post_forward=note)

    return with_parents(at_first_entry(part, listen), lambda t, n: n | t.stuck)


@mutant(area=AREA, kills={"MT-114"})
def own_hooks_run_outside(part):
    """Charges a module that has forward hooks of its own to its caller."""

    def change(tracker, names):
        hooked = getattr(tracker.module(tracker.current or ""), "_forward_hooks", None)
        return names - {tracker.current} if hooked and tracker.phase == "forward" else names

    return with_parents(part, change)


@mutant(area=AREA, kills={"MT-115"})
def threads_share_a_set(part):
    """Keeps what every thread last was told in one set for all."""
    lock = threading.Lock()

    def change(tracker, names):
        with lock:
            told = tracker.__dict__.setdefault("told", {})
            told[threading.get_ident()] = names
            return set().union(*told.values())

    return with_parents(part, change)


@mutant(area=AREA, kills={"MT-116", "MT-140"})
def second_entry_counts_twice(part):
    """Tells everything twice when entered twice."""

    def enter(base, self):
        self.entered = getattr(self, "entered", 0) + 1
        return base.__enter__(self)

    def change(tracker, hooks):
        def pre_fw(module, args):
            for _ in range(max(1, getattr(tracker, "entered", 1))):
                hooks[0](module, args)

        return [hooks[0] and pre_fw, *hooks[1:]]

    return with_hooks(with_tracker(part, __enter__=enter), change)


@mutant(area=AREA, kills={"MT-122"})
def modules_are_compared_by_value(part):
    """Keeps names in a dictionary by module, which asks `__hash__` and `__eq__`."""

    def change(tracker, names):
        known = {tracker.module(tracker.current or ""): tracker.current}
        return names | (names & set(known.values()))

    return with_parents(part, change)


@mutant(area=AREA, kills={"MT-123"})
def next_registration_drops_the_last(part):
    """Forgets hooks of kinds that are not given again."""
    kinds = ("pre_fw_hook", "post_fw_hook", "pre_bw_hook", "post_bw_hook")

    def register(base, self, *hooks, **named):
        given = {**dict(zip(kinds, hooks, strict=False)), **named}
        wanted = {kind for kind, hook in given.items() if hook is not None}
        taken = self.__dict__.setdefault("taken", set())
        if not wanted & taken:
            self.clear_user_hooks()
        base.register_user_hooks(self, **given)
        taken |= wanted

    def clear(base, self):
        self.__dict__.setdefault("taken", set()).clear()
        base.clear_user_hooks(self)

    return with_tracker(part, register_user_hooks=register, clear_user_hooks=clear)


@mutant(area=AREA, kills={"MT-124", "MT-402"})
def compiled_models_are_unseen(part):
    """Is switched off where code is compiled."""

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


@mutant(area=AREA, kills={"MT-125"})
def trackers_cannot_be_pickled(part):
    """Holds what cannot be pickled."""

    def refuse(base, self):
        raise TypeError("cannot pickle a tracker")

    return with_tracker(part, __reduce__=refuse)


@mutant(area=AREA, kills={"MT-126"})
def refused_registration_leaves_a_hook(part):
    """Registers kind after kind, up to the one that is taken."""

    def register(base, self, *hooks, **named):
        kinds = ("pre_fw_hook", "post_fw_hook", "pre_bw_hook", "post_bw_hook")
        given = {**dict(zip(kinds, hooks, strict=False)), **named}
        for kind in kinds:
            base.register_user_hooks(self, **{kind: given.get(kind)})

    return with_tracker(part, register_user_hooks=register)


def root(name):
    """Return the label of the root."""
    return name.partition(".")[0]


def _renaming(part, when):
    """The part that names a running module by the way to it, if `when(name, way)`."""

    def get_known_fqn(base, self, mod):
        name, path = base.get_known_fqn(self, mod), self.called_as
        return path if name and path and name == self.current and when(name, path) else name

    return with_tracker(part, get_known_fqn=get_known_fqn)


@mutant(area=AREA, kills={"MT-127"})
def root_renames_its_parts(part):
    """Names a root anew when it is called as a part of another."""
    return _renaming(part, lambda name, path: "." not in name and "." in path)


@mutant(area=AREA, kills={"MT-128"})
def moving_renames(part):
    """Names a part by the last root it was called in."""
    return _renaming(part, lambda name, path: "." in name and root(name) != root(path))


@mutant(area=AREA, kills={"MT-129"})
def modules_in_lists_share_a_name(part):
    """Names a module by its class if it is in no tree but called by another module."""

    def listen(tracker):
        tracker.strays = set()

        def note(call, args, kwargs):
            if "." not in call.name and call.depth > 1:
                tracker.strays.add(call.name)

        tracker.subscribe(pre_forward=note)

    def get_known_fqn(base, self, mod):
        name = base.get_known_fqn(self, mod)
        return type(mod).__name__ if name in getattr(self, "strays", ()) else name

    return with_tracker(at_first_entry(part, listen), get_known_fqn=get_known_fqn)


@mutant(area=AREA, kills={"MT-132"})
def fake_tensors_are_unseen(part):
    """Tells nothing of modules that run on fake tensors."""

    def is_fake(module):
        weights = [] if module is None else list(module.parameters())
        return any(type(weight.data).__name__ == "FakeTensor" for weight in weights)

    def real(hook):
        return hook and (lambda module, *rest: is_fake(module) or hook(module, *rest))

    return with_hooks(part, lambda t, hooks: [real(hook) for hook in hooks])


@mutant(area=AREA, kills={"MT-135"})
def clearing_does_nothing(part):
    """Goes on calling a hook that was cleared."""

    def register(base, self, pre_fw_hook=None, *hooks, **named):
        self.last = pre_fw_hook
        base.register_user_hooks(self, pre_fw_hook, *hooks, **named)

    def clear(base, self):
        base.clear_user_hooks(self)
        hook = self.last
        if hook is not None:
            self.subscribe(pre_forward=lambda call, args, kwargs: hook(call.module, args))

    return with_tracker(part, register_user_hooks=register, clear_user_hooks=clear)


@mutant(area=AREA, kills={"MT-136"})
def last_path_wins(part):
    """Names a shared module by the last way to it."""
    return _renaming(part, lambda name, path: "." in name and root(name) == root(path))


@mutant(area=AREA, kills={"MT-137", "MT-140"})
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


@mutant(area=AREA, kills={"MT-116", "MT-140"})
def entered_again_is_deaf(part):
    """Tells nothing once it was entered a second time."""

    def enter(base, self):
        self.times = getattr(self, "times", 0) + 1
        return base.__enter__(self)

    def register(base, self, pre_fw_hook=None, *rest, **others):
        def told(*event):
            if getattr(self, "times", 0) < 2:
                pre_fw_hook(*event)

        base.register_user_hooks(self, pre_fw_hook and told, *rest, **others)

    return with_tracker(part, __enter__=enter, register_user_hooks=register)
