"""One test or more per row of the table of situations, each with the right answer.

The rows number the situations in which torch's own trackers were examined; a test's name says
which row it answers.
"""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import warnings
import weakref
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from mod_tracker import ModTracker, profile_flops, profile_memory

FW, RE, BW = "forward", "recompute", "backward"


def step(model, x):
    """One forward and backward."""
    model(x).sum().backward()


def test_row01_every_operation_is_attributed_and_event_order_is_torchs(mlp, x, log_ops, log_events):
    """A plain MLP: exact stacks; modules that share a boundary tensor keep torch's event order."""
    tracker = ModTracker()
    events = log_events(tracker)
    entries = log_ops(tracker, lambda: step(mlp, x))
    assert entries == [
        (FW, "mm", ("MLP", "MLP.a")),
        (FW, "relu", ("MLP",)),
        (FW, "mm", ("MLP", "MLP.b")),
        (BW, "mm", ("MLP", "MLP.b")),
        (BW, "mm", ("MLP", "MLP.b")),
        (BW, "threshold_backward", ("MLP",)),
        (BW, "mm", ("MLP", "MLP.a")),
        (BW, "mm", ("MLP", "MLP.a")),
    ]
    assert events[-6:] == [
        "+bw MLP.b",
        "+bw MLP",
        "-bw MLP.b",
        "+bw MLP.a",
        "-bw MLP",
        "-bw MLP.a",
    ]


def test_row02_modules_without_a_grad_input_are_left_at_the_end(mlp, log_ops, log_events):
    """Input without gradient: the root and the first layer are left when the backward ends."""
    tracker = ModTracker()
    events = log_events(tracker)
    entries = log_ops(tracker, lambda: step(mlp, torch.randn(2, 4)))
    assert [e for e in entries if e[0] == BW][-1] == (BW, "mm", ("MLP", "MLP.a"))
    assert events[-5:] == ["+bw MLP", "-bw MLP.b", "+bw MLP.a", "-bw MLP.a", "-bw MLP"]


def test_row03_recompute_has_the_stack_of_the_forward(checkpointed, x, log_ops):
    """What is recomputed runs inside the modules of the first forward, and no others."""
    entries = log_ops(ModTracker(), lambda: step(checkpointed(use_reentrant=False), x))
    inner = ("Checkpointed", "Checkpointed.m")
    assert [stack for phase, op, stack in entries if phase == RE and op == "mm"] == [
        (*inner, "Checkpointed.m.a")
    ]
    assert (RE, "relu", inner) in entries
    assert Counter(stack[-1] for phase, op, stack in entries if (phase, op) == (BW, "mm")) == {
        "Checkpointed.out": 2,
        "Checkpointed.m.b": 2,
        "Checkpointed.m.a": 2,
    }


def test_row03_non_reentrant_flops_are_exact(checkpointed, x):
    """b: 64 forward and 128 backward; it needs no recompute, because a's result is enough."""
    with profile_flops() as report:
        step(checkpointed(use_reentrant=False), x)
    b, a = report["Checkpointed.m.b"], report["Checkpointed.m.a"]
    assert (b.forward, b.recompute, b.backward) == (64, 0, 128)
    assert (a.forward, a.recompute, a.backward) == (64, 64, 128)


def test_row04_reentrant_recompute_and_its_backward_are_attributed(
    checkpointed, x, log_ops, log_events
):
    """The inner graph is built in backward; its modules are entered and left in backward, too."""
    tracker = ModTracker()
    events = log_events(tracker)
    entries = log_ops(tracker, lambda: step(checkpointed(use_reentrant=True), x))
    inner = ("Checkpointed", "Checkpointed.m")
    assert [e for e in entries if e[0] == RE] == [
        (RE, "mm", (*inner, "Checkpointed.m.a")),
        (RE, "relu", inner),
        (RE, "mm", (*inner, "Checkpointed.m.b")),
    ]
    assert Counter(stack for phase, op, stack in entries if (phase, op) == (BW, "mm")) == {
        ("Checkpointed", "Checkpointed.out"): 2,
        (*inner, "Checkpointed.m.b"): 2,
        (*inner, "Checkpointed.m.a"): 2,
    }
    backward = [event for event in events if "bw" in event]
    assert sorted(e[1:] for e in backward if e[0] == "+") == sorted(
        e[1:] for e in backward if e[0] == "-"
    )
    assert "+bw Checkpointed.m.a" in backward


def test_row04_reentrant_flops_are_exact(checkpointed, x):
    """b: 64 forward, 64 recomputed, 128 backward."""
    with profile_flops() as report:
        step(checkpointed(use_reentrant=True), x)
    b, m = report["Checkpointed.m.b"], report["Checkpointed.m"]
    assert (b.forward, b.recompute, b.backward) == (64, 64, 128)
    assert m.total == 512


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4, bias=False)
        self.seq = nn.Sequential(self.a, nn.ReLU())

    def forward(self, x):
        return self.seq(self.a(x))


def test_row05_shared_module_has_one_name_and_two_called_paths(x):
    """The canonical name is the first registered; the path of the call is kept beside it."""
    tracker, calls = ModTracker(), []
    tracker.subscribe(
        pre_forward=lambda call, *_: calls.append((call.name, call.called_as)), types=nn.Linear
    )
    with tracker:
        Shared()(x)
    assert calls == [("Shared.a", "Shared.a"), ("Shared.a", "Shared.seq.0")]


class Reused(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.a(self.a(self.a(x)))


def test_row06_reused_module_is_attributed_in_every_backward(x, log_ops, log_events):
    """Three calls, three backwards of the same module, each with its call index."""
    tracker, indexes = ModTracker(), []
    events = log_events(tracker)
    tracker.subscribe(pre_backward=lambda call, _: indexes.append(call.call_index), types=nn.Linear)
    entries = log_ops(tracker, lambda: step(Reused(), x))
    assert [e for e in entries if e[0] == BW] == [(BW, "mm", ("Reused", "Reused.a"))] * 6
    assert indexes == [2, 1, 0]
    assert Counter(events)["+bw Reused.a"] == Counter(events)["-bw Reused.a"] == 3


class Recursive(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False)

    def forward(self, x, n=2):
        return self.inner(x) if n == 0 else self(x, n - 1)


def test_row07_recursive_module_is_on_the_stack_as_often_as_it_runs(x, log_ops):
    """No warning, no global change, and the depth of the recursion is visible."""
    formatter = warnings.formatwarning
    entries = log_ops(ModTracker(), lambda: step(Recursive(), x))
    stack = ("Recursive", "Recursive", "Recursive", "Recursive.inner")
    assert entries == [(FW, "mm", stack), (BW, "mm", stack), (BW, "mm", stack)]
    assert warnings.formatwarning is formatter


def test_row08_name_given_once_stays(mlp, x):
    """A part called before its root keeps the name of that call."""
    tracker, names = ModTracker(), []
    tracker.subscribe(pre_forward=lambda call, *_: names.append((call.name, call.called_as)))
    with tracker:
        mlp.a(x)
        mlp(x)
    assert names == [
        ("Linear", "Linear"),
        ("MLP", "MLP"),
        ("Linear", "MLP.a"),
        ("MLP.b", "MLP.b"),
    ]


def test_row08_named_root_names_its_parts_before_they_are_called(mlp, x):
    """With the root given, a part called first has its full name from the start."""
    tracker, names = ModTracker(mlp), []
    tracker.subscribe(pre_forward=lambda call, *_: names.append(call.name))
    with tracker:
        mlp.a(x)
        mlp(x)
    assert names == ["MLP.a", "MLP", "MLP.a", "MLP.b"]


def test_row09_roots_of_one_class_have_different_labels(x):
    """The second root of a class gets a number."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    with ModTracker() as tracker:
        second(first(x))
    assert [tracker.get_known_fqn(m) for m in (first, second)] == ["Linear", "Linear#2"]


def test_row10_module_added_after_the_first_call_gets_its_path(mlp, x):
    """A late module is named by its place, not by its class."""
    with ModTracker() as tracker:
        mlp(x)
        mlp.c = nn.Linear(4, 4)
        mlp.forward = lambda x: mlp.c(mlp.b(mlp.a(x)))
        mlp(x)
    assert tracker.get_known_fqn(mlp.c) == "MLP.c"


def test_row11_moved_module_keeps_its_name(x):
    """Moving a module to another root does not rewrite history."""
    old = nn.Sequential(nn.Linear(4, 4))
    with ModTracker() as tracker:
        old(x)
        new = nn.Sequential(nn.ReLU(), old[0])
        new(x)
    assert tracker.get_known_fqn(old[0]) == "Sequential.0"


def test_row12_name_is_root_label_and_state_dict_prefix(x):
    """Without the label, a name is the prefix of the module's keys in the state_dict."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    with ModTracker() as tracker:
        model(x)
    names = [tracker.get_known_fqn(m) for m in (model[0], model[1][0])]
    keys = {key.rpartition(".")[0] for key in model.state_dict()}
    assert {name.partition(".")[2] for name in names} == keys


def test_row13_modules_outside_the_tree_have_distinct_names(x):
    """Modules in a plain list are roots of their own, and told apart."""

    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = [nn.Linear(4, 4), nn.Linear(4, 4)]

        def forward(self, x):
            return self.parts[1](self.parts[0](x))

    model = Hidden()
    with ModTracker() as tracker:
        model(x)
    assert [tracker.get_known_fqn(m) for m in model.parts] == ["Linear", "Linear#2"]


class ByKeyword(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False)

    def forward(self, *, x):
        return self.inner(x)


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.k = nn.ModuleList(ByKeyword() for _ in range(4))

    def forward(self, x):
        for k in self.k:
            x = k(x=x)
        return x


def test_row14_keyword_inputs_are_attributed(x, log_events):
    """Four chained blocks with keyword inputs have 192 FLOPs each, and paired events."""
    tracker = ModTracker()
    events = log_events(tracker)
    with tracker, profile_flops() as report:
        step(Chain(), x)
    assert [report[f"Chain.k.{i}"].total for i in range(4)] == [192] * 4
    assert events[events.index("+bw Chain.k.3") :].count("-bw Chain.k.0") == 1
    assert events.index("-bw Chain.k.3") < events.index("+bw Chain.k.1")


@dataclass
class Output:
    y: torch.Tensor


class Wrapping(nn.Module):
    def __init__(self):
        super().__init__()
        self.d = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return Output(self.d(x))


class Unwrapping(nn.Module):
    def __init__(self):
        super().__init__()
        self.d = Wrapping()
        self.o = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.o(self.d(x).y)


def test_row15_dataclass_output_is_attributed(x, log_ops, log_events):
    """An output inside a dataclass hides nothing: stacks and events are complete."""
    tracker = ModTracker()
    events = log_events(tracker)
    entries = log_ops(tracker, lambda: step(Unwrapping(), x))
    assert entries[-1] == (BW, "mm", ("Unwrapping", "Unwrapping.d", "Unwrapping.d.d"))
    assert events.count("+bw Unwrapping.d") == events.count("-bw Unwrapping.d") == 1


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x):
        return self.a(x), self.b(x)


def test_row16_unused_output_has_no_backward_event(x, log_events):
    """A branch whose output is not used is neither entered nor left."""
    tracker, model = ModTracker(), TwoOutputs()
    events = log_events(tracker)
    with tracker:
        model(x)[0].sum().backward()
    assert [e for e in events if "bw" in e] == [
        "+bw TwoOutputs.a",
        "+bw TwoOutputs",
        "-bw TwoOutputs",
        "-bw TwoOutputs.a",
    ]


def test_row17_identity_is_entered_before_it_is_left(x, log_ops, log_events):
    """Modules that return their input are entered and left at once, and hold nothing."""
    model = nn.Sequential(
        nn.Linear(4, 4, bias=False), nn.Identity(), nn.Dropout(0.5), nn.Linear(4, 4, bias=False)
    ).eval()
    tracker = ModTracker()
    events = log_events(tracker)
    entries = log_ops(tracker, lambda: step(model, x))
    assert entries[-1] == (BW, "mm", ("Sequential", "Sequential.0"))
    for name in ("Sequential.1", "Sequential.2"):
        assert events.index(f"+bw {name}") < events.index(f"-bw {name}")
        assert events.index(f"-bw {name}") < events.index("-bw Sequential.0")


def test_row18_frozen_first_layer_has_no_backward_event(log_events):
    """Nothing flows back through a frozen layer, so nothing is told of it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    tracker = ModTracker()
    events = log_events(tracker)
    with tracker:
        step(model, torch.randn(2, 4))
    assert [e for e in events if "bw" in e] == [
        "+bw Sequential.1",
        "+bw Sequential",
        "-bw Sequential.1",
        "-bw Sequential",
    ]


class Double(nn.Module):
    def forward(self, x):
        return x.mul_(2)


def test_row19_in_place_modules_are_attributed(x, log_ops, log_events):
    """In-place modules, alone and chained, behave like others."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), Double(), nn.ReLU(inplace=True))
    tracker = ModTracker()
    events = log_events(tracker)
    entries = log_ops(tracker, lambda: step(model, x))
    backward = [(op, stack[-1]) for phase, op, stack in entries if phase == BW]
    assert backward == [
        ("threshold_backward", "Sequential.2"),
        ("mul", "Sequential.1"),
        ("mm", "Sequential.0"),
        ("mm", "Sequential.0"),
    ]
    opened = [e[4:] for e in events if e.startswith("+bw")]
    assert opened == ["Sequential.2", "Sequential", "Sequential.1", "Sequential.0"]


class Failing(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.error = error

    def forward(self, x):
        y = self.a(x)
        if self.error is not None:
            raise self.error
        return y


def test_row20_failed_forward_leaves_nothing_behind(x, log_events):
    """After an exception and a retry each module has exactly one backward."""
    model = nn.Sequential(Failing(ValueError("once")))
    tracker = ModTracker()
    events = log_events(tracker)
    with tracker:
        with pytest.raises(ValueError, match="once"):
            model(x)
        assert tracker.parents == {"Global"}
        assert events[-2:] == ["-fw Sequential.0", "-fw Sequential"]
        model[0].error = None
        step(model, x)
    assert Counter(e for e in events if "bw" in e) == {
        f"{sign}bw {name}": 1
        for sign in "+-"
        for name in ("Sequential", "Sequential.0", "Sequential.0.a")
    }


def test_row21_keyboard_interrupt_leaves_nothing_behind(x):
    """An exception that is not an `Exception` leaves the next call clean."""
    model, after = nn.Sequential(Failing(KeyboardInterrupt())), nn.Linear(4, 4)
    tracker, stacks = ModTracker(), []
    tracker.subscribe(pre_forward=lambda *_: stacks.append(tracker.stack), include="Linear")
    with tracker:
        with pytest.raises(KeyboardInterrupt):
            model(x)
        after(x)
    assert stacks == [("Linear",)]
    assert tracker.parents == {"Global"}


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("in backward")


class Fails(nn.Module):
    def forward(self, x):
        return FailingBackward.apply(x)


def test_row22_failed_backward_leaves_nothing_behind(x, log_ops, log_events):
    """After an error in backward the next forward and backward are clean."""
    model = nn.Sequential(nn.Linear(4, 4), Fails(), nn.Linear(4, 4))
    tracker = ModTracker()
    events = log_events(tracker)
    with tracker:
        with pytest.raises(ValueError, match="in backward"):
            step(model, x)
        assert tracker.parents == {"Global"}
        assert tracker.phase == "outside"
    after = nn.Linear(4, 4, bias=False)
    events.clear()
    assert [e[2] for e in log_ops(tracker, lambda: step(after, x))] == [("Linear",)] * 3
    assert events == ["+fw Linear", "-fw Linear", "+bw Linear", "-bw Linear"]


def test_row22_failing_hook_in_backward_leaves_nothing_behind(x):
    """A hook's own exception reaches the caller of backward, and nothing else changes."""
    tracker, model = ModTracker(), nn.Linear(4, 4)

    def bad(module, grads):
        raise ZeroDivisionError

    tracker.register_user_hooks(pre_bw_hook=bad)
    with tracker:
        with pytest.raises(ZeroDivisionError):
            step(model, x)
        tracker.clear_user_hooks()
        assert tracker.parents == {"Global"}
        step(model, x)
        assert tracker.parents == {"Global"}


def test_row23_foreign_hook_that_raises_is_the_only_error(mlp, x):
    """Another global hook's exception arrives unchanged and without a warning."""

    def bad(module, args):
        raise ZeroDivisionError

    handle = nn.modules.module.register_module_forward_pre_hook(bad)
    try:
        with ModTracker() as tracker:
            with pytest.raises(ZeroDivisionError):
                mlp(x)
            assert tracker.parents == {"Global"}
    finally:
        handle.remove()


def test_row24_hooks_of_a_module_run_inside_it(x, log_ops):
    """What a module's own hooks compute is charged to the module."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    model[0].register_forward_hook(lambda module, args, output: output.neg())
    entries = log_ops(ModTracker(), lambda: model(x))
    assert entries[-1] == (FW, "neg", ("Sequential", "Sequential.0"))


def test_row25_threads_have_stacks_of_their_own():
    """Two models in two threads at the same time do not see each other."""
    meet, seen = threading.Barrier(2, timeout=20), {}

    class Waits(nn.Module):
        def forward(self, x):
            meet.wait()
            seen[threading.get_ident()] = tracker.stack
            meet.wait()
            return x

    class A(nn.Sequential):
        pass

    class B(nn.Sequential):
        pass

    with ModTracker() as tracker:
        threads = [
            threading.Thread(target=m, args=(torch.ones(1),)) for m in (A(Waits()), B(Waits()))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(seen.values()) == [("A", "A.0"), ("B", "B.0")]


def test_row25_one_model_in_four_threads_is_exact():
    """4 x 100 steps of one model: no error, and every operation in its own module."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    wrong, errors = [], []

    def expect(module, name):
        def check(grad):
            if tracker.stack != ("Sequential", name):
                wrong.append(tracker.stack)

        return lambda _, args, output: output.register_hook(check) and None

    for name in "012":
        getattr(model, name).register_forward_hook(expect(model, f"Sequential.{name}"))

    def work():
        try:
            for _ in range(100):
                step(model, torch.randn(2, 4))
        except Exception as error:
            errors.append(error)

    with ModTracker() as tracker:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (wrong, errors) == ([], [])


@pytest.mark.parametrize("listens", [False, True])
def test_row25_backward_in_another_thread_is_looked_up_where_the_graph_was_made(
    x, log_ops, listens
):
    """A graph built in one thread and run in another, whose numbers collide, is attributed."""
    built, model = [], nn.Sequential(nn.Linear(4, 4, bias=False))
    other = nn.Sequential(nn.Identity(), nn.Linear(4, 4, bias=False))
    tracker, heard = ModTracker(), []
    if listens:
        tracker.subscribe(pre_forward=lambda call, *_: heard.append(call.name))
    with tracker:
        other(x)  # gives this thread a record of its own
        thread = threading.Thread(target=lambda: built.append(model(x.detach())))
        thread.start()
        thread.join()
    entries = log_ops(tracker, built[0].sum().backward)
    assert {stack for _, _, stack in entries} == {("Sequential#2", "Sequential#2.0")}
    assert len(heard) == 5 * listens


def test_row26_trackers_may_leave_in_any_order(mlp, x):
    """Overlapping trackers each see their part, and the patch is gone at the end."""
    original = nn.Module.__call__
    first, second = ModTracker(), ModTracker()
    counts = Counter()
    first.subscribe(pre_forward=lambda *_: counts.update("1"), types=nn.Linear)
    second.subscribe(pre_forward=lambda *_: counts.update("2"), types=nn.Linear)
    first.__enter__()
    second.__enter__()
    mlp(x)
    first.__exit__(None, None, None)
    mlp(x)
    second.__exit__(None, None, None)
    mlp(x)
    assert counts == {"1": 2, "2": 4}
    assert nn.Module.__call__ is original


def test_row26_one_tracker_entered_twice_sees_each_call_once(x):
    """Entering again counts; nothing leaks after the last exit."""
    original, module = nn.Module.__call__, nn.modules.module
    tracker, calls = ModTracker(), []
    tracker.subscribe(pre_forward=lambda call, *_: calls.append(call.name))
    with tracker:
        with tracker:
            nn.Linear(4, 4)(x)
        nn.ReLU()(x)
    nn.ReLU()(x)
    assert calls == ["Linear", "ReLU"]
    assert nn.Module.__call__ is original
    assert not module._global_forward_hooks
    assert not module._global_forward_pre_hooks


def test_row27_backward_after_exit_is_attributed(mlp, x):
    """The graph outlives the block; so does the answer, events included."""
    tracker, events = ModTracker(), []
    tracker.register_user_hooks(pre_bw_hook=lambda m, _: events.append(tracker.get_known_fqn(m)))
    seen = []
    with tracker:
        y = mlp(x)
    y.register_hook(lambda _: seen.append((tracker.is_bw, tracker.current)))
    y.sum().backward()
    assert seen == [(True, "MLP.b")]
    assert events == ["MLP.b", "MLP", "MLP.a"]


def test_row28_forward_before_enter_is_unknown_in_backward(mlp, x, log_ops):
    """What was not seen is not guessed."""
    loss = mlp(x).sum()
    entries = log_ops(ModTracker(), loss.backward)
    assert {(phase, stack) for phase, _, stack in entries} == {(BW, ())}


class Square(nn.Module):
    def forward(self, x):
        return x * x


def test_row29_deleted_module_keeps_its_name(x, log_ops):
    """The hook gets None for a dead module, but the stack still has its name."""
    tracker, hooks, names = ModTracker(), [], []
    tracker.register_user_hooks(pre_bw_hook=lambda m, _: hooks.append(m))
    tracker.subscribe(pre_backward=lambda call, _: names.append((call.name, call.module)))
    with tracker:
        model = Square()
        loss = model(x).sum()
        del model
    entries = log_ops(tracker, loss.backward)
    assert {stack for _, _, stack in entries} == {("Square",)}
    assert (hooks, names) == ([None], [("Square", None)])


@pytest.mark.parametrize("hooked", [False, True])
def test_row30_autograd_grad_of_a_leaf_input_works(hooked, mlp, x, log_events):
    """torch.autograd.grad for the module's own input gives what it gives without a tracker."""
    expected = torch.autograd.grad(mlp(x).sum(), x)[0]
    tracker = ModTracker()
    events = log_events(tracker) if hooked else []
    with tracker:
        grad = torch.autograd.grad(mlp(x).sum(), x)[0]
    assert torch.equal(grad, expected)
    assert sorted(e[1:] for e in events if e[0] == "+") == sorted(
        e[1:] for e in events if e[0] == "-"
    )


def test_row30_double_backward_is_attributed_to_the_module_that_made_it(x):
    """Nodes that the first backward creates belong to the module whose node created them."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    with profile_flops() as report:
        grad = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
        grad.pow(2).sum().backward()
    # mm: 2*2*4*4 = 64. Forward 64 each. First backward: input gradient, 64 each. Second: of the
    # input gradient's mm both factors for layer 0; for layer 2 the weight only; then tanh leads
    # back into layer 0's forward mm: weight and input gradient.
    assert report["Sequential.0"].forward == report["Sequential.2"].forward == 64
    assert report.outside.total == 0
    assert report["Sequential.0"].backward == 64 + 128 + 128
    assert report["Sequential.2"].backward == 64 + 64


@pytest.mark.parametrize("name", ["vjp", "jacrev"])
def test_row30_functional_reverse_mode_gives_the_same_values(name, mlp, x, log_events):
    """torch.func.vjp and jacrev work with hooks registered, and give the same bits."""
    x = x.detach()

    def run():
        if name == "jacrev":
            return torch.func.jacrev(mlp)(x)
        output, back = torch.func.vjp(mlp, x)
        return back(output)[0]

    expected = run()
    tracker = ModTracker()
    log_events(tracker)
    with tracker:
        assert torch.equal(run(), expected)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("name", ["grad", "vmap", "per-sample", "jvp"])
def test_row31_functional_transforms_give_the_same_values(name, mlp, x, log_events):
    """grad, vmap, per-sample gradients and jvp work, and give the same bits."""
    x, parameters = x.detach(), dict(mlp.named_parameters())
    call = torch.func.functional_call

    def loss(parameters, x):
        return call(mlp, parameters, (x,)).sum()

    def run():
        if name == "grad":
            return torch.func.grad(loss)(parameters, x)["a.weight"]
        if name == "vmap":
            return torch.func.vmap(lambda x: call(mlp, parameters, (x,)))(x)
        if name == "per-sample":
            return torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)["a.weight"]
        return torch.func.jvp(mlp, (x,), (x,))[1]

    expected = run()
    tracker = ModTracker()
    log_events(tracker)
    with tracker:
        assert torch.equal(run(), expected)
        assert tracker.parents == {"Global"}


def test_row32_second_backward_has_the_same_events(log_events):
    """With retain_graph, a second backward tells the same as the first."""
    tracker, model = ModTracker(), nn.Sequential(nn.Linear(4, 4))
    events = log_events(tracker)
    with tracker:
        y = model(torch.randn(2, 4)).sum()
        events.clear()
        y.backward(retain_graph=True)
        first = list(events)
        y.backward()
    assert events == first * 2
    assert sorted(first) == [
        "+bw Sequential",
        "+bw Sequential.0",
        "-bw Sequential",
        "-bw Sequential.0",
    ]


def test_row33_gradient_of_one_parameter_closes_what_it_opens(mlp, x, log_events):
    """autograd.grad for one weight: every module that is entered is left."""
    tracker = ModTracker()
    events = log_events(tracker)
    with tracker:
        torch.autograd.grad(mlp(x).sum(), [mlp.b.weight])
    assert [e for e in events if "bw" in e] == ["+bw MLP.b", "+bw MLP", "-bw MLP.b", "-bw MLP"]


def test_row34_inference_keeps_nothing():
    """10,000 forwards without gradients leave no record, and the next backward tells no more."""
    model, x = nn.Sequential(nn.ReLU(), nn.ReLU()), torch.ones(1)
    tracker, events = ModTracker(), []
    tracker.register_user_hooks(post_bw_hook=lambda m, _: events.append(m))
    with tracker:
        with torch.no_grad():
            for _ in range(10_000):
                model(x)
        assert len(tracker._attribution.state().record) == 0
        model(x.requires_grad_()).sum().backward()
    assert events == [model, model[0], model[1]] or len(events) == 3


def test_row35_no_hook_stays_on_tensors(mlp, x, log_events):
    """1,000 forwards with hooks registered leave no hook on the input."""
    tracker = ModTracker()
    log_events(tracker)
    with tracker:
        for _ in range(1_000):
            mlp(x)
    assert not x._backward_hooks
    assert all(not p._backward_hooks for p in mlp.parameters())


def test_row35_activations_die_by_reference_count(mlp, x, log_events):
    """With hooks registered, an activation is freed without the garbage collector."""
    tracker = ModTracker()
    log_events(tracker)
    gc.disable()
    try:
        with tracker:
            y = mlp(x)
            alive = weakref.ref(y)
            y.sum().backward()
            del y
            assert alive() is None
    finally:
        gc.enable()


def test_row36_scripted_module_and_data_parallel_are_seen_as_one(x):
    """A scripted module is one opaque module; DataParallel on CPU works."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(nn.Sequential(nn.ReLU()))
    model = nn.Sequential(scripted, nn.DataParallel(nn.Linear(4, 4)))
    tracker, names = ModTracker(), []
    tracker.subscribe(pre_forward=lambda call, *_: names.append(call.name))
    with tracker:
        step(model, x)
    assert names == ["Sequential", "Sequential.0", "Sequential.1", "Sequential.1.module"]


def test_row36_fake_tensors_are_tracked(log_ops, checkpointed):
    """Under FakeTensorMode the answers are the same as with data."""
    with FakeTensorMode():
        model, x = checkpointed(use_reentrant=False), torch.randn(2, 4, requires_grad=True)
        fake = log_ops(ModTracker(), lambda: step(model, x))
    model, x = checkpointed(use_reentrant=False), torch.randn(2, 4, requires_grad=True)
    assert fake == log_ops(ModTracker(), lambda: step(model, x))


def test_row37_direct_call_of_forward_belongs_to_the_caller(x, log_ops):
    """`module.forward(x)` is not a module call; its work is the calling module's."""

    class Direct(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4, bias=False)

        def forward(self, x):
            return self.a.forward(x)

    entries = log_ops(ModTracker(), lambda: step(Direct(), x))
    assert {stack for _, _, stack in entries} == {("Direct",)}


def test_row38_encoder_fast_path_stays():
    """In eval mode the fused encoder layer still runs as one kernel, seen as one module."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    tracker, names = ModTracker(), []
    tracker.subscribe(pre_forward=lambda call, *_: names.append(call.name))
    with tracker, torch.no_grad():
        layer(torch.randn(1, 3, 8))
    assert names == ["TransformerEncoderLayer"]


class AllEqual(nn.Linear):
    def __eq__(self, other):
        return True

    __hash__ = None


def test_row39_modules_are_told_apart_by_identity(x, log_events):
    """`__eq__` that is always true, and no hash: two modules, two names, no error."""
    model = nn.Sequential(AllEqual(4, 4), AllEqual(4, 4))
    tracker, names = ModTracker(), []
    log_events(tracker)
    tracker.subscribe(pre_forward=lambda call, *_: names.append(call.name))
    with tracker:
        step(model, x)
    assert names == ["Sequential", "Sequential.0", "Sequential.1"]


def test_row40_hooks_registered_one_by_one_all_stay(x):
    """A second registration of another kind drops nothing."""
    tracker, kinds = ModTracker(), []
    tracker.register_user_hooks(pre_fw_hook=lambda *_: kinds.append("pre"))
    tracker.register_user_hooks(post_fw_hook=lambda *_: kinds.append("post"))
    with tracker:
        nn.ReLU()(x)
    assert kinds == ["pre", "post"]


def test_row45_export_traces_and_is_not_tracked(mlp):
    """torch.export gives the same program inside a tracker, which sees nothing of it."""
    tracker, names = ModTracker(), []
    tracker.subscribe(pre_forward=lambda call, *_: names.append(call.name))
    with tracker:
        program = torch.export.export(mlp, (torch.randn(2, 4),))
    x = torch.randn(2, 4)
    assert torch.equal(program.module()(x), mlp(x))
    assert not [name for name in names if "export" in name.lower()]


def test_row46_memory_over_several_iterations(mlp, x):
    """Two iterations in one block are measured, and saved bytes are twice those of one."""
    with profile_memory() as one:
        step(mlp, x)
    with profile_memory() as two:
        step(mlp, x)
        step(mlp, x)
    assert two.sum("self_saved") == 2 * one.sum("self_saved") > 0


def test_row47_tracker_can_be_pickled_and_copied(mlp, x):
    """A copy starts afresh with the same options."""
    tracker = ModTracker(history=7)
    with tracker:
        mlp(x)
    for twin in (pickle.loads(pickle.dumps(tracker)), copy.deepcopy(tracker)):
        assert twin._options == tracker._options
        assert twin.roots == {}
        with twin:
            mlp(x)
        assert twin.get_known_fqn(mlp.a) == "MLP.a"


def test_recomputed_lambda_between_modules_belongs_to_the_caller(x, log_ops):
    """Row 3 and 4, harder: a checkpointed function that is no module."""

    class Lambda(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4, bias=False)
            self.b = nn.Linear(4, 4, bias=False)

        def forward(self, x):
            return checkpoint(lambda x: self.b(self.a(x).tanh()), x, use_reentrant=False)

    entries = log_ops(ModTracker(), lambda: step(Lambda(), x))
    assert (RE, "mm", ("Lambda", "Lambda.a")) in entries
    assert {stack for phase, _, stack in entries if phase == BW} == {
        ("Lambda",),
        ("Lambda", "Lambda.a"),
        ("Lambda", "Lambda.b"),
    }
