"""Helpers for faults of the area mod-tracker: trackers with one difference."""

from __future__ import annotations

from mod_tracker._events import Listener
from torchparts_conformance.mutants import overlay


def with_tracker(part, **methods):
    """The part with a ModTracker that has some methods replaced.

    A replacement gets the replaced class as `base`, and then the method's arguments.
    """
    base = part.ModTracker
    names = {
        name: (
            property(lambda self, f=method: f(base, self))
            if isinstance(getattr(base, name, None), property)
            else lambda self, *args, f=method, **kwargs: f(base, self, *args, **kwargs)
        )
        for name, method in methods.items()
    }
    kind = type("ModTracker", (base,), names)
    globals()["ModTracker"] = kind  # pickle looks it up here
    return overlay(part, ModTracker=kind)


def with_parents(part, change):
    """The part with changed `parents`: `change(tracker, names)`."""
    return with_tracker(part, parents=lambda base, self: change(self, base.parents.fget(self)))


def with_hooks(part, change):
    """The part with changed user hooks: `change(tracker, hooks)` returns the four."""

    def register(base, self, pre_fw=None, post_fw=None, pre_bw=None, post_bw=None, **named):
        given = [
            named.get(f"{kind}_hook", hook)
            for kind, hook in zip(
                ("pre_fw", "post_fw", "pre_bw", "post_bw"),
                (pre_fw, post_fw, pre_bw, post_bw),
                strict=True,
            )
        ]
        base.register_user_hooks(self, *change(self, given))

    return with_tracker(part, register_user_hooks=register)


def with_names(part, change):
    """The part with changed names: `change(module, name)`."""

    def get_known_fqn(base, self, mod):
        return change(mod, base.get_known_fqn(self, mod))

    return with_tracker(part, get_known_fqn=get_known_fqn)


def at_first_entry(part, listen):
    """The part whose trackers call `listen(tracker)` when they are first entered."""

    def enter(base, self):
        if not hasattr(self, "listening"):
            self.listening = True
            listen(self)
        return base.__enter__(self)

    return with_tracker(part, __enter__=enter)


def listen_to(tracker, **callbacks):
    """Listen beside the hooks of a case, which has the only place of each kind."""
    tracker._events.add(Listener(**callbacks))


def following(part):
    """The part whose trackers have `open`: names entered in backward and not left."""

    def listen(tracker):
        tracker.open = set()
        listen_to(
            tracker,
            pre_backward=lambda *_: tracker.open.add(tracker.current),
            post_backward=lambda *_: tracker.open.discard(tracker.current),
        )

    return at_first_entry(part, listen)


def sticking(part, sticks):
    """The part in which some modules stay in `parents` until the end of a backward.

    These are the modules with a call for which `sticks(args, kwargs, output)` is true.
    """

    def listen(tracker):
        tracker.stick, tracker.stuck = set(), set()

        def note(module, args, kwargs, output):
            if sticks(args, kwargs, output):
                tracker.stick.add(tracker.current)

        def enter(module, grads):
            tracker.stuck |= {tracker.current} & tracker.stick

        listen_to(tracker, post_forward=note, pre_backward=enter)

    def change(tracker, names):
        if not tracker.is_bw:
            tracker.stuck = set()
        return names | tracker.stuck

    return with_parents(at_first_entry(part, listen), change)


def skipping_entry(part, skipped):
    """The part without entries in backward for some modules.

    These are the modules for which `skipped(tracker, args, output)` is true at the end of forward.
    """

    def change(tracker, hooks):
        seen = set()

        def post_fw(module, args, output):
            if skipped(tracker, args, output):
                seen.add(id(module))
            hooks[1](module, args, output)

        def pre_bw(module, grads):
            if id(module) not in seen:
                hooks[2](module, grads)

        return [hooks[0], hooks[1] and post_fw, hooks[2] and pre_bw, hooks[3]]

    return with_hooks(part, change)
