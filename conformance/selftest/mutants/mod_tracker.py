"""Broken implementations of the area mod-tracker; each fails exactly what it declares."""

from __future__ import annotations

import sys
import threading
import warnings

import torch
from torch import nn

from torchparts_conformance.mutants import mutant, overlay

AREA = "mod-tracker"


def _tracker(part, **methods):
    """The part with a ModTracker some of whose methods are replaced.

    A replaced method gets the class it replaces as `base`, and then what the method gets.
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
    return overlay(part, ModTracker=type("ModTracker", (base,), names))


def _parents(part, change):
    """The part whose `parents` are changed: `change(tracker, names)`."""
    return _tracker(part, parents=lambda base, self: change(self, base.parents.fget(self)))


def _hooks(part, change):
    """The part whose user hooks are changed: `change(tracker, hooks)` gives the four."""

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

    return _tracker(part, register_user_hooks=register)


def _name(part, change):
    """The part whose names are changed: `change(module, name)`."""

    def get_known_fqn(base, self, mod):
        return change(mod, base.get_known_fqn(self, mod))

    return _tracker(part, get_known_fqn=get_known_fqn)


@mutant(area=AREA, kills={"MT-001"})
def innermost_is_missing_in_forward(part):
    """Leaves the module out of `parents` that sits in a container."""
    return _parents(part, lambda t, n: n if t.is_bw else {x for x in n if ".nest" not in x})


@mutant(area=AREA, kills={"MT-002"})
def innermost_is_missing_in_backward(part):
    """Leaves the module out of `parents` in backward that sits in a container."""
    return _parents(part, lambda t, n: {x for x in n if ".nest" not in x} if t.is_bw else n)


@mutant(area=AREA, kills={"MT-003"})
def only_the_first_iteration_is_seen(part):
    """Says nothing more about a root that is called again."""
    return _parents(part, lambda t, n: {"Global"} if "Nested" in n and t.iteration else n)


@mutant(
    area=AREA,
    kills={
        "MT-004",
        "MT-005",
        "MT-007",
        "MT-009",
        "MT-010",
        "MT-102",
        "MT-109",
        "MT-133",
        "MT-134",
    },
)
def direction_is_turned_around(part):
    """Says backward in forward."""
    return _tracker(part, is_bw=lambda base, self: not base.is_bw.fget(self))


@mutant(area=AREA, kills={"MT-005"})
def backward_never_ends(part):
    """Stays in backward after a model was called."""

    def enter(base, self):
        self.subscribe(post_forward=lambda *_: setattr(self, "called", True), include="Linear")
        return base.__enter__(self)

    def is_bw(base, self):
        stuck = getattr(self, "called", False) and self.phase == "outside"
        return stuck or base.is_bw.fget(self)

    return _tracker(part, is_bw=is_bw, __enter__=enter)


@mutant(area=AREA, kills={"MT-006"})
def inputs_close_inside_out(part):
    """Closes the inner module first where an input is shared."""

    def change(tracker, hooks):
        held = []

        def post_bw(module, grads):
            if module is not None and type(module).__name__ == "Bar":
                held.append((module, grads))
                return
            hooks[3](module, grads)
            while held:
                hooks[3](*held.pop())

        return [*hooks[:3], hooks[3] and post_bw]

    return _hooks(part, change)


@mutant(area=AREA, kills={"MT-007"})
def name_is_not_among_the_parents_in_backward_hooks(part):
    """Takes the module out of `parents` before its last hook."""

    def change(tracker, hooks):
        def post_bw(module, grads):
            tracker.hidden = True
            try:
                hooks[3](module, grads)
            finally:
                tracker.hidden = False

        return [*hooks[:3], hooks[3] and post_bw]

    changed = _hooks(part, change)
    return _parents(changed, lambda t, n: {"Global"} if getattr(t, "hidden", False) else n)


@mutant(area=AREA, kills={"MT-008", "MT-126"})
def second_hook_replaces_the_first(part):
    """Takes every registration."""

    def register(base, self, *hooks, **named):
        try:
            base.register_user_hooks(self, *hooks, **named)
        except AssertionError:
            self.clear_user_hooks()
            base.register_user_hooks(self, *hooks, **named)

    return _tracker(part, register_user_hooks=register)


@mutant(area=AREA, kills={"MT-009"})
def hooks_of_dead_modules_are_dropped(part):
    """Calls no hook for a module that is gone."""

    def alive(hook):
        return hook and (lambda module, grads: module is not None and hook(module, grads))

    return _hooks(part, lambda t, hooks: [*hooks[:2], alive(hooks[2]), alive(hooks[3])])


@mutant(area=AREA, kills={"MT-010", "MT-011"})
def recompute_is_silent(part):
    """Calls no forward hook in backward."""

    def change(tracker, hooks):
        def forward_only(hook):
            return hook and (lambda *args: tracker.is_bw or hook(*args))

        return [forward_only(hooks[0]), forward_only(hooks[1]), *hooks[2:]]

    return _hooks(part, change)


@mutant(area=AREA, kills={"MT-011", "MT-118"})
def closing_events_are_lost(part):
    """Leaves no module at the end of a backward."""
    return _hooks(
        part,
        lambda t, hooks: [
            *hooks[:3],
            hooks[3] and (lambda module, grads: grads and hooks[3](module, grads)),
        ],
    )


@mutant(area=AREA, kills={"MT-012"})
def strangers_have_names(part):
    """Names every module it is asked about."""
    return _name(part, lambda module, name: name or type(module).__name__)


@mutant(area=AREA, kills={"MT-101", "MT-102"})
def recompute_counts_for_whoever_asked(part):
    """Adds the module whose backward asked for the recompute."""
    return _parents(part, lambda t, n: n | {"Checkpointed.m.b"} if t.phase == "recompute" else n)


@mutant(area=AREA, kills={"MT-101", "MT-102"})
def inner_modules_of_reentrant_are_lost(part):
    """Knows only the caller of a checkpoint in backward."""

    def change(tracker, names):
        if tracker.phase in ("recompute", "backward") and "Checkpointed.m" in names:
            return {"Global", "Checkpointed"}
        return names

    return _parents(part, change)


@mutant(area=AREA, kills={"MT-103", "MT-119", "MT-124", "MT-132", "MT-402"})
def leaves_without_entries(part):
    """Tells no entry for what a recompute built."""
    return _hooks(
        part,
        lambda t, hooks: [
            *hooks[:2],
            hooks[2] and (lambda m, g: type(m).__name__ == "MLP" or hooks[2](m, g)),
            hooks[3],
        ],
    )


@mutant(area=AREA, kills={"MT-104"})
def recursion_warns(part):
    """Warns when a module is entered again."""

    def enter(base, self):
        def warn(call, args, kwargs):
            if call.stack.count(call.name) > 1:
                warnings.warn("entered again", stacklevel=2)

        self.subscribe(pre_forward=warn)
        return base.__enter__(self)

    return _tracker(part, __enter__=enter)


@mutant(area=AREA, kills={"MT-105", "MT-129"})
def roots_share_a_label(part):
    """Names roots by their class alone."""
    return _name(part, lambda module, name: name and name.partition("#")[0])


@mutant(area=AREA, kills={"MT-106"})
def late_modules_are_named_by_class(part):
    """Names what was added later by its class."""

    def enter(base, self):
        self.known = {}

        def note(call, args, kwargs):
            self.known.setdefault(call.name, len(call.module))

        self.subscribe(pre_forward=note, types=nn.Sequential, max_depth=1)
        return base.__enter__(self)

    def get_known_fqn(base, self, mod):
        name = base.get_known_fqn(self, mod)
        root, _, key = (name or "").partition(".")
        late = key.isdigit() and int(key) >= self.known.get(root, 99)
        return type(mod).__name__ if late else name

    return _tracker(part, __enter__=enter, get_known_fqn=get_known_fqn)


@mutant(area=AREA, kills={"MT-107"})
def keyword_inputs_stay_open(part):
    """Keeps modules with keyword inputs among the parents to the end."""
    return _parents(part, lambda t, n: n | {"Chain.k.3"} if t.is_bw and "Chain" in n else n)


@mutant(area=AREA, kills={"MT-108"})
def dataclass_outputs_are_not_entered(part):
    """Misses outputs in a dataclass."""
    return _hooks(
        part,
        lambda t, hooks: [
            *hooks[:2],
            hooks[2] and (lambda m, g: type(m).__name__ == "Boxing" or hooks[2](m, g)),
            hooks[3],
        ],
    )


@mutant(area=AREA, kills={"MT-109"})
def identities_stay_open(part):
    """Never takes an identity out of `parents`."""

    def change(tracker, names):
        passing = isinstance(tracker.module("Sequential.1"), nn.Identity)
        late = tracker.phase == "backward" and "Sequential.0" in names
        return names | {"Sequential.1"} if passing and late else names

    return _parents(part, change)


@mutant(area=AREA, kills={"MT-110"})
def frozen_modules_are_left(part):
    """Leaves modules that were not entered."""

    def change(tracker, hooks):
        frozen = []

        def pre_fw(module, args):
            if isinstance(module, nn.Linear) and not module.weight.requires_grad:
                frozen.append(module)
            hooks[0](module, args)

        def post_bw(module, grads):
            hooks[3](module, grads)
            while frozen:
                hooks[3](frozen.pop(), ())

        return [hooks[0] and pre_fw, *hooks[1:3], hooks[3] and post_bw]

    return _hooks(part, change)


@mutant(area=AREA, kills={"MT-010", "MT-011", "MT-111"})
def failed_forward_leaves_an_event(part):
    """Tells one more leave after a forward that failed."""

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

    return _hooks(part, change)


@mutant(area=AREA, kills={"MT-112"})
def interrupt_leaves_names(part):
    """Does not clean up after an exception that is not an Exception."""

    def enter(base, self):
        def note(call, args, kwargs, output):
            if isinstance(sys.exc_info()[1], KeyboardInterrupt):
                self.stuck = True

        self.subscribe(post_forward=note)
        return base.__enter__(self)

    return _parents(
        _tracker(part, __enter__=enter),
        lambda t, n: n | {"Sequential"} if getattr(t, "stuck", False) else n,
    )


@mutant(area=AREA, kills={"MT-113"})
def failed_backward_leaves_names(part):
    """Does not clean up after a failed backward."""

    def change(tracker, names):
        failing = type(tracker.module("Sequential.1")).__name__ == "FailsInBackward"
        return names | {"Sequential"} if failing and tracker.phase == "outside" else names

    return _parents(part, change)


@mutant(area=AREA, kills={"MT-114"})
def own_hooks_run_outside(part):
    """Charges a module's own forward hooks to its caller."""

    def change(tracker, names):
        hooked = getattr(tracker.module("Sequential.0"), "_forward_hooks", None)
        return names - {"Sequential.0"} if hooked and tracker.phase == "forward" else names

    return _parents(part, change)


@mutant(area=AREA, kills={"MT-115"})
def threads_share_a_set(part):
    """Keeps one set for all threads."""
    lock, active = threading.Lock(), {}

    def change(tracker, names):
        with lock:
            active.setdefault(id(tracker), set()).update(names)
            shared = set(active[id(tracker)])
        return shared if "A" in shared and "B" in shared else names

    return _parents(part, change)


@mutant(area=AREA, kills={"MT-116"})
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

    return _hooks(_tracker(part, __enter__=enter), change)


@mutant(area=AREA, kills={"MT-117", "MT-119"})
def grad_of_a_leaf_is_refused(part):
    """Cannot be used with torch.autograd.grad while hooks are registered."""

    def change(tracker, hooks):
        def post_bw(module, grads):
            if type(module).__name__ == "MLP" and not grads:
                return
            if grads == (None,) and type(module).__name__ == "Linear":
                raise RuntimeError("not supported in autograd.grad")
            hooks[3](module, grads)

        return [*hooks[:3], hooks[3] and post_bw]

    return _hooks(part, change)


@mutant(area=AREA, kills={"MT-118"})
def only_one_backward_is_told(part):
    """Tells the leaves of a graph's first backward only."""

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

    return _hooks(part, change)


@mutant(area=AREA, kills={"MT-119"})
def what_gets_no_gradient_stays_open(part):
    """Leaves only modules whose inputs got a gradient."""
    return _hooks(
        part,
        lambda t, hooks: [
            *hooks[:3],
            hooks[3] and (lambda m, g: (g and g[0] is None) or hooks[3](m, g)),
        ],
    )


@mutant(area=AREA, kills={"MT-103", "MT-120"})
def inference_is_remembered(part):
    """Tells a leave for every forward without gradients."""

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

    return _hooks(part, change)


@mutant(area=AREA, kills={"MT-121"})
def hooks_stay_on_inputs(part):
    """Leaves a hook on every input."""

    def change(tracker, hooks):
        def pre_fw(module, args):
            for value in args:
                if isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad:
                    value.register_hook(lambda grad: None)
            hooks[0](module, args)

        return [hooks[0] and pre_fw, *hooks[1:]]

    return _hooks(part, change)


@mutant(area=AREA, kills={"MT-122"})
def modules_are_compared_by_value(part):
    """Takes equal modules for one."""

    def get_known_fqn(base, self, mod):
        if type(mod).__hash__ is None:
            raise TypeError("unhashable module")
        return base.get_known_fqn(self, mod)

    return _tracker(part, get_known_fqn=get_known_fqn)


@mutant(area=AREA, kills={"MT-123"})
def next_registration_drops_the_last(part):
    """Forgets hooks that are not given again."""

    def register(base, self, *hooks, **named):
        given = {**dict(zip(("pre_fw_hook", "post_fw_hook"), hooks, strict=False)), **named}
        if set(given) == {"post_fw_hook"}:
            self.clear_user_hooks()
        base.register_user_hooks(self, *hooks, **named)

    return _tracker(part, register_user_hooks=register)


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

    return _hooks(part, lambda t, hooks: [*map(eager, hooks[:2]), *hooks[2:]])


@mutant(area=AREA, kills={"MT-125"})
def trackers_cannot_be_pickled(part):
    """Holds what cannot be pickled."""

    def refuse(base, self):
        raise TypeError("cannot pickle a tracker")

    return _tracker(part, __reduce__=refuse)


@mutant(area=AREA, kills={"MT-126"})
def refused_registration_leaves_a_hook(part):
    """Registers kind after kind, up to the one that is taken."""

    def register(base, self, *hooks, **named):
        kinds = ("pre_fw_hook", "post_fw_hook", "pre_bw_hook", "post_bw_hook")
        given = {**dict(zip(kinds, hooks, strict=False)), **named}
        for kind in kinds:
            base.register_user_hooks(self, **{kind: given.get(kind)})

    return _tracker(part, register_user_hooks=register)


@mutant(area=AREA, kills={"MT-127"})
def root_renames_its_parts(part):
    """Names a part anew when its root is called."""

    def get_known_fqn(base, self, mod):
        name = base.get_known_fqn(self, mod)
        return self.called_as if name == "Linear" and self.called_as else name

    return _tracker(part, get_known_fqn=get_known_fqn)


@mutant(area=AREA, kills={"MT-128"})
def moving_renames(part):
    """Names a module by its last place."""

    def get_known_fqn(base, self, mod):
        name = base.get_known_fqn(self, mod)
        return self.called_as if name == "Sequential.0" and self.called_as else name

    return _tracker(part, get_known_fqn=get_known_fqn)


@mutant(area=AREA, kills={"MT-129"})
def modules_in_lists_share_a_name(part):
    """Names modules outside of a tree by their class."""

    def get_known_fqn(base, self, mod):
        name = base.get_known_fqn(self, mod)
        return name.partition("#")[0] if name and "Hidden" in self.roots else name

    return _tracker(part, get_known_fqn=get_known_fqn)


@mutant(area=AREA, kills={"MT-130"})
def failing_hook_leaves_names(part):
    """Does not clean up after a hook that raised."""

    def change(tracker, hooks):
        def pre_bw(module, grads):
            try:
                hooks[2](module, grads)
            except Exception:
                tracker.stuck = True
                raise

        return [*hooks[:2], hooks[2] and pre_bw, hooks[3]]

    return _parents(
        _hooks(part, change), lambda t, n: n | {"MLP"} if getattr(t, "stuck", False) else n
    )


@mutant(area=AREA, kills={"MT-131"})
def gradients_are_rounded(part):
    """Touches what it observes."""

    def change(tracker, hooks):
        def post_fw(module, args, output):
            if type(module).__name__ == "Checkpointed" and output is not None:
                with torch.no_grad():
                    output.add_(1e-3)
            hooks[1](module, args, output)

        return [hooks[0], hooks[1] and post_fw, *hooks[2:]]

    return _hooks(part, change)


@mutant(area=AREA, kills={"MT-132"})
def fake_tensors_are_unseen(part):
    """Tells nothing of modules that run on fake tensors."""

    def is_fake(module):
        weights = [] if module is None else list(module.parameters())
        return any(type(weight.data).__name__ == "FakeTensor" for weight in weights)

    def real(hook):
        return hook and (lambda module, *rest: is_fake(module) or hook(module, *rest))

    return _hooks(part, lambda t, hooks: [real(hook) for hook in hooks])


@mutant(area=AREA, kills={"MT-133"})
def attribution_ends_with_the_block(part):
    """Knows nothing once it is left."""

    def leave(base, self, *exc):
        self.gone = True
        return base.__exit__(self, *exc)

    return _parents(
        _tracker(part, __exit__=leave),
        lambda t, n: {"Global"} if getattr(t, "gone", False) else n,
    )


@mutant(area=AREA, kills={"MT-133", "MT-134"})
def unknown_graphs_are_guessed(part):
    """Takes a graph it did not see for the first model it knows."""
    return _parents(part, lambda t, n: n | {"MLP"} if t.is_bw and not t.roots else n)


@mutant(area=AREA, kills={"MT-135"})
def clearing_does_nothing(part):
    """Keeps hooks that were cleared."""

    def clear(base, self):
        kept = dict(self._user_hooks)
        self._user_hooks.clear()
        self.kept = kept

    return _tracker(part, clear_user_hooks=clear)


@mutant(area=AREA, kills={"MT-136"})
def last_path_wins(part):
    """Names a shared module by its last path."""

    def get_known_fqn(base, self, mod):
        name = base.get_known_fqn(self, mod)
        return self.called_as if name == "Shared.a" and self.called_as else name

    return _tracker(part, get_known_fqn=get_known_fqn)


@mutant(area=AREA, kills={"MT-137"})
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

    return _tracker(part, __enter__=enter, __exit__=guarded)
