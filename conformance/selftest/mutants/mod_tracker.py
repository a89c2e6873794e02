"""Broken implementations of the area mod-tracker; each fails exactly what it declares."""

from __future__ import annotations

import sys
import threading
import warnings
from dataclasses import is_dataclass

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
    kind = type("ModTracker", (base,), names)
    globals()["ModTracker"] = kind  # where pickle looks for it
    return overlay(part, ModTracker=kind)


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


def _once(part, listen):
    """The part whose trackers call `listen(tracker)` when they are first entered."""

    def enter(base, self):
        if not hasattr(self, "listening"):
            self.listening = True
            listen(self)
        return base.__enter__(self)

    return _tracker(part, __enter__=enter)


def _following(part):
    """The part whose trackers have `open`: names entered in backward and not left."""

    def listen(tracker):
        tracker.open = set()
        tracker.subscribe(
            pre_backward=lambda call, grads: tracker.open.add(call.name),
            post_backward=lambda call, grads: tracker.open.discard(call.name),
        )

    return _once(part, listen)


def _sticking(part, sticks):
    """The part in which modules stay in `parents` to the end of a backward.

    Those are meant for whose call `sticks(args, kwargs, output)`.
    """

    def listen(tracker):
        tracker.stick, tracker.stuck = set(), set()

        def note(call, args, kwargs, output):
            if sticks(args, kwargs, output):
                tracker.stick.add(call.name)

        def enter(call, grads):
            tracker.stuck |= {call.name} & tracker.stick

        tracker.subscribe(post_forward=note, pre_backward=enter)

    def change(tracker, names):
        if not tracker.is_bw:
            tracker.stuck = set()
        return names | tracker.stuck

    return _parents(_once(part, listen), change)


def _skipping_entry(part, skipped):
    """The part that tells no entry in backward of modules, by their forward.

    Those are meant for which `skipped(tracker, args, output)` is true when they end.
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

    return _hooks(part, change)


def _without_parts_of_dicts(tracker, names):
    def in_dict(name):
        return isinstance(tracker.module(name.rpartition(".")[0]), nn.ModuleDict)

    return {name for name in names if not in_dict(name)}


@mutant(area=AREA, kills={"MT-001"})
def innermost_is_missing_in_forward(part):
    """Leaves modules out of `parents` that sit in a ModuleDict."""
    return _parents(part, lambda t, n: n if t.is_bw else _without_parts_of_dicts(t, n))


@mutant(area=AREA, kills={"MT-002"})
def innermost_is_missing_in_backward(part):
    """Leaves modules out of `parents` in backward that sit in a ModuleDict."""
    return _parents(part, lambda t, n: _without_parts_of_dicts(t, n) if t.is_bw else n)


@mutant(area=AREA, kills={"MT-003"})
def only_the_first_iteration_is_seen(part):
    """Says nothing more about a root that is called again."""
    return _parents(part, lambda t, n: {"Global"} if t.iteration else n)


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
    """Stays in backward after a model has had one."""

    def listen(tracker):
        tracker.subscribe(post_backward=lambda *_: setattr(tracker, "had_one", True))

    def is_bw(base, self):
        stuck = getattr(self, "had_one", False) and self.phase == "outside"
        return stuck or base.is_bw.fget(self)

    return _tracker(_once(part, listen), is_bw=is_bw)


@mutant(area=AREA, kills={"MT-006"})
def inputs_close_inside_out(part):
    """Leaves a module in backward only after all modules inside it."""

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


@mutant(area=AREA, kills={"MT-101"})
def recompute_counts_for_whoever_asked(part):
    """Adds the modules whose backward is under way when a recompute is asked for."""
    return _parents(_following(part), lambda t, n: n | t.open if t.phase == "recompute" else n)


@mutant(area=AREA, kills={"MT-101", "MT-102"})
def what_was_recomputed_is_lost(part):
    """Knows only who called a checkpoint, in its recompute and in its backward."""

    def listen(tracker):
        tracker.again = set()

        def note(call, args, kwargs):
            if tracker.phase == "recompute":
                tracker.again.add(call.name)

        tracker.subscribe(pre_forward=note)

    return _parents(_once(part, listen), lambda t, n: n - t.again if t.is_bw else n)


@mutant(area=AREA, kills={"MT-103"})
def leaves_without_entries(part):
    """Tells no entry for what a recompute built."""
    return _skipping_entry(part, lambda tracker, args, output: tracker.is_bw)


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

    return _tracker(_once(part, listen), get_known_fqn=get_known_fqn)


@mutant(area=AREA, kills={"MT-107"})
def keyword_inputs_stay_open(part):
    """Keeps modules that got nothing but keywords among the parents to the end."""
    return _sticking(part, lambda args, kwargs, output: kwargs and not args)


@mutant(area=AREA, kills={"MT-108"})
def dataclass_outputs_are_not_entered(part):
    """Misses outputs in a dataclass."""
    return _skipping_entry(part, lambda tracker, args, output: is_dataclass(output))


@mutant(area=AREA, kills={"MT-109"})
def identities_stay_open(part):
    """Never takes a module out of `parents` in backward that returned its input."""
    return _sticking(part, lambda args, kwargs, output: any(value is output for value in args))


@mutant(area=AREA, kills={"MT-110"})
def frozen_modules_are_left(part):
    """Leaves modules that were not entered, because nothing flows back through them."""

    def change(tracker, hooks):
        frozen = []

        def post_fw(module, args, output):
            hooks[1](module, args, output)
            if torch.is_grad_enabled() and not getattr(output, "requires_grad", True):
                frozen.append(module)

        def post_bw(module, grads):
            hooks[3](module, grads)
            while frozen:
                hooks[3](frozen.pop(), ())

        return [hooks[0], hooks[1] and post_fw, hooks[2], hooks[3] and post_bw]

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

    def listen(tracker):
        tracker.stuck = set()

        def note(call, args, kwargs, output):
            raised = sys.exc_info()[1]
            if raised is not None and not isinstance(raised, Exception):
                tracker.stuck.add(call.name)

        tracker.subscribe(post_forward=note)

    return _parents(_once(part, listen), lambda t, n: n | t.stuck)


@mutant(area=AREA, kills={"MT-113"})
def failed_backward_leaves_names(part):
    """Takes names out of `parents` only when modules are left, which a failed backward does not."""
    return _parents(_following(part), lambda t, n: n | t.open if t.phase == "outside" else n)


@mutant(area=AREA, kills={"MT-114"})
def own_hooks_run_outside(part):
    """Charges a module that has forward hooks of its own to its caller."""

    def change(tracker, names):
        hooked = getattr(tracker.module(tracker.current or ""), "_forward_hooks", None)
        return names - {tracker.current} if hooked and tracker.phase == "forward" else names

    return _parents(part, change)


@mutant(area=AREA, kills={"MT-115"})
def threads_share_a_set(part):
    """Keeps what every thread last was told in one set for all."""
    lock = threading.Lock()

    def change(tracker, names):
        with lock:
            told = tracker.__dict__.setdefault("told", {})
            told[threading.get_ident()] = names
            return set().union(*told.values())

    return _parents(part, change)


@mutant(area=AREA, kills={"MT-141"})
def newest_thread_is_asked(part):
    """Knows nothing of a backward in a thread that is not the first."""

    def change(tracker, names):
        first = tracker.__dict__.setdefault("first", threading.get_ident())
        return names if not tracker.is_bw or threading.get_ident() == first else {"Global"}

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


@mutant(area=AREA, kills={"MT-117", "MT-121"})
def grad_of_a_leaf_is_refused(part):
    """Waits for the gradients of leaf inputs by a hook that torch.autograd.grad refuses."""

    def change(tracker, hooks):
        def pre_fw(module, args):
            leaves = [value for value in args if getattr(value, "is_leaf", False)]
            if torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves):
                wanted = [leaf for leaf in leaves if leaf.requires_grad]
                torch.autograd.graph.register_multi_grad_hook(wanted, lambda grads: None)
            hooks[0](module, args)

        return [hooks[0] and pre_fw, *hooks[1:]]

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


@mutant(area=AREA, kills={"MT-138", "MT-139"})
def gradients_of_inputs_are_lost(part):
    """Leaves modules with no gradient, as if it had waited for the nodes behind their inputs."""
    return _hooks(
        part,
        lambda t, hooks: [
            *hooks[:3],
            hooks[3] and (lambda module, grads: hooks[3](module, tuple(None for _ in grads))),
        ],
    )


@mutant(area=AREA, kills={"MT-139"})
def gradients_of_one_output_go_to_all(part):
    """Tells every module that is left the gradients of the first one."""

    def change(tracker, hooks):
        first = []

        def post_bw(module, grads):
            first.append(grads)
            hooks[3](module, first[0])

        return [*hooks[:3], hooks[3] and post_bw]

    return _hooks(part, change)


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
    """Keeps names in a dictionary by module, which asks `__hash__` and `__eq__`."""

    def get_known_fqn(base, self, mod):
        names = self.__dict__.setdefault("names", {})
        return names.setdefault(mod, base.get_known_fqn(self, mod))

    return _tracker(part, get_known_fqn=get_known_fqn)


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

    return _tracker(part, register_user_hooks=register, clear_user_hooks=clear)


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


def root(name):
    """Return the label of the root."""
    return name.partition(".")[0]


def _renaming(part, when):
    """The part that names a running module by the way to it, if `when(name, way)`."""

    def get_known_fqn(base, self, mod):
        name, path = base.get_known_fqn(self, mod), self.called_as
        return path if name and path and name == self.current and when(name, path) else name

    return _tracker(part, get_known_fqn=get_known_fqn)


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

    return _tracker(_once(part, listen), get_known_fqn=get_known_fqn)


@mutant(area=AREA, kills={"MT-130"})
def failing_hook_leaves_names(part):
    """Does not clean up after a hook that raised."""

    def change(tracker, hooks):
        def pre_bw(module, grads):
            try:
                hooks[2](module, grads)
            except Exception:
                tracker.stuck = {tracker.current}
                raise

        return [*hooks[:2], hooks[2] and pre_bw, hooks[3]]

    return _parents(_hooks(part, change), lambda t, n: n | getattr(t, "stuck", set()))


@mutant(area=AREA, kills={"MT-131"})
def outputs_are_touched(part):
    """Changes what a root returns by a little."""

    def change(tracker, hooks):
        def post_fw(module, args, output):
            if len(tracker.parents) == 2 and isinstance(output, torch.Tensor):
                output.data.add_(1e-3)
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


@mutant(area=AREA, kills={"MT-134"})
def unknown_graphs_are_named(part):
    """Has a name for the backward of what it did not see."""
    return _parents(
        part, lambda t, n: n | {"unknown"} if t.phase == "backward" and not t.stack else n
    )


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

    return _tracker(part, register_user_hooks=register, clear_user_hooks=clear)


@mutant(area=AREA, kills={"MT-136"})
def last_path_wins(part):
    """Names a shared module by the last way to it."""
    return _renaming(part, lambda name, path: "." in name and root(name) == root(path))


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


@mutant(area=AREA, kills={"MT-140"})
def entered_again_is_deaf(part):
    """Tells nothing once it was entered a second time."""

    def enter(base, self):
        self.times = getattr(self, "times", 0) + 1
        return base.__enter__(self)

    def register(base, self, pre_fw_hook=None, **others):
        def told(*event):
            if getattr(self, "times", 0) < 2:
                pre_fw_hook(*event)

        base.register_user_hooks(self, pre_fw_hook=pre_fw_hook and told, **others)

    return _tracker(part, __enter__=enter, register_user_hooks=register)
