"""Broken queries, reports and hooks under torch.compile of the area mod-tracker."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from torchparts_conformance.mutants import mutant, overlay

AREA = "mod-tracker"


def _with(part, kind):
    """The part with another ModTracker."""
    kind.__qualname__ = "ModTracker"
    globals()["ModTracker"] = kind  # where pickle looks for it
    return overlay(part, ModTracker=kind)


def _changed(part, change, *names):
    """The part whose reports, of the kinds `names` make, are changed once they are complete."""

    def measuring(name):
        @contextmanager
        def measure(*roots, **options):
            with getattr(part, name)(*roots, **options) as report:
                yield report
            change(report)

        return measure

    return overlay(part, **{name: measuring(name) for name in names})


@mutant(area=AREA, kills={"MT-201"})
def stack_begins_inside(part):
    """Gives the innermost module first."""

    class ModTracker(part.ModTracker):
        @property
        def stack(self):
            return super().stack[::-1]

    return _with(part, ModTracker)


@mutant(area=AREA, kills={"MT-202"})
def recompute_is_a_forward(part):
    """Tells no recompute from a forward."""

    class ModTracker(part.ModTracker):
        @property
        def phase(self):
            phase = super().phase
            return "forward" if phase == "recompute" else phase

    return _with(part, ModTracker)


@mutant(area=AREA, kills={"MT-203"})
def backward_has_the_latest_index(part):
    """Gives in backward the index of the path's latest call, not of the one that made the node."""

    class ModTracker(part.ModTracker):
        @property
        def call_index(self):
            latest = self.__dict__.setdefault("latest", {})
            if self.phase != "backward":
                latest[self.called_as] = super().call_index
            return latest.get(self.called_as)

    return _with(part, ModTracker)


@mutant(area=AREA, kills={"MT-204"})
def one_end_ends_all(part):
    """Ends every subscription with the first that ends."""

    class ModTracker(part.ModTracker):
        def subscribe(self, **options):
            subscription = super().subscribe(**options)
            ends = self.__dict__.setdefault("ends", [])
            ends.append(subscription.remove)
            subscription.remove = lambda: [end() for end in ends]
            return subscription

    return _with(part, ModTracker)


@mutant(area=AREA, kills={"MT-205"})
def nothing_is_excluded(part):
    """Lets through what a subscription excludes."""

    class ModTracker(part.ModTracker):
        def subscribe(self, **options):
            return super().subscribe(**{**options, "exclude": ()})

    return _with(part, ModTracker)


@mutant(area=AREA, kills={"MT-206"})
def prefixes_do_not_match(part):
    """Compares patterns with whole names only."""

    class ModTracker(part.ModTracker):
        def in_module(self, *patterns):
            return any(fnmatchcase(name, pattern) for name in self.stack for pattern in patterns)

    return _with(part, ModTracker)


@mutant(area=AREA, kills={"MT-207"})
def modules_are_kept(part):
    """Keeps every module alive that it was asked for."""

    class ModTracker(part.ModTracker):
        def module(self, name):
            kept = self.__dict__.setdefault("kept", {})
            return kept.setdefault(name, super().module(name))

    return _with(part, ModTracker)


@mutant(area=AREA, kills={"MT-208"})
def every_way_is_the_first(part):
    """Gives a shared module's name for the way by which it was reached."""

    class ModTracker(part.ModTracker):
        @property
        def called_as(self):
            return self.current

    return _with(part, ModTracker)


@mutant(area=AREA, kills={"MT-209", "MT-250"})
def second_backward_is_outside(part):
    """Does not note which module's node made the nodes of a second backward."""

    @contextmanager
    def profile_flops(*roots, **options):
        with part.profile_flops(*roots, **options) as report:
            mode = _get_current_dispatch_mode()
            attribution = mode.attribution
            attribution.attribute_op = mode._counter._attribute_op = attribution.locate
            yield report

    return overlay(part, profile_flops=profile_flops)


@mutant(area=AREA, kills={"MT-250"})
def nodes_have_one_maker(part):
    """Looks every node up in the thread that ran the forward, whichever made it."""

    @contextmanager
    def profile_flops(*roots, **options):
        with part.profile_flops(*roots, **options) as report:
            _get_current_dispatch_mode().attribution._follow_makers = lambda state: state
            yield report

    return overlay(part, profile_flops=profile_flops)


@mutant(area=AREA, kills={"MT-251"})
def steps_are_sampled(part):
    """Counts only in the steps in which operators are listed, too."""

    def change(report):
        for note in report.notes:
            looked, begun = (int(word) for word in note.split() if word.isdigit())
            report.fill({"": report.outside, **report.rows}, report.total * looked // begun)

    return _changed(part, change, "profile_flops")


@mutant(area=AREA, kills={"MT-252"})
def saved_is_temporary(part):
    """Does not know what is kept for backward."""

    @contextmanager
    def watch_memory(*roots, **options):
        with part.watch_memory(*roots, **options) as watch:
            watch.ledger.saved = {}
            yield watch

    return overlay(part, watch_memory=watch_memory)


@mutant(area=AREA, kills={"MT-253"})
def growth_is_overlooked(part):
    """Runs one step, after which anything may be a cache."""
    return overlay(part, assert_no_growth=lambda step, **options: step())


@mutant(area=AREA, kills={"MT-252", "MT-254"})
def saved_tensors_are_handed_out_changed(part):
    """Keeps tensors for backward without looking at their version."""

    @contextmanager
    def watch_memory(*roots, **options):
        plain = torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: kept)
        with part.watch_memory(*roots, **options) as watch, plain:
            yield watch

    return overlay(part, watch_memory=watch_memory)


@mutant(area=AREA, kills={"MT-210"})
def names_die_with_modules(part):
    """Names a call by its module, so not at all when that is gone."""

    class ModTracker(part.ModTracker):
        def subscribe(self, *, pre_backward=None, **options):
            def told(call, grads):
                name = None if call.module is None else self.get_known_fqn(call.module)
                pre_backward(overlay(call, name=name), grads)

            return super().subscribe(pre_backward=pre_backward and told, **options)

    return _with(part, ModTracker)


@mutant(area=AREA, kills={"MT-301", "MT-304", "MT-305"})
def outside_is_forgotten(part):
    """Shows nothing for what runs outside of modules, though the total has it."""

    def change(report):
        outside = report.outside
        report.fill({"": type(outside)(outside.name), **report.rows}, report.total)

    return _changed(part, change, "profile_flops", "profile_time", "profile_memory")


@mutant(area=AREA, kills={"MT-302"})
def recompute_counts_as_forward(part):
    """Adds what is computed again to the forward."""

    def merged(row):
        return replace(
            row,
            self_forward=row.self_forward + row.self_recompute,
            forward=row.forward + row.recompute,
            self_recompute=0,
            recompute=0,
        )

    def change(report):
        rows = {name: merged(row) for name, row in report.rows.items()}
        report.fill({"": report.outside, **rows}, report.total)

    return _changed(part, change, "profile_flops")


@mutant(area=AREA, kills={"MT-303"})
def unknown_operators_are_silent(part):
    """Counts operators without a formula as nothing, and does not say so."""
    return _changed(part, lambda report: report.uncounted.clear(), "profile_flops")


@mutant(area=AREA, kills={"MT-306"})
def fake_tensors_weigh_nothing(part):
    """Counts the bytes that are there, so none of a fake tensor."""

    @contextmanager
    def profile_memory(*roots, **options):
        fake = isinstance(torch.empty(0), FakeTensor)
        with part.profile_memory(*roots, **options) as report:
            yield report
        if fake:
            rows = {name: type(row)(name) for name, row in report.rows.items()}
            report.fill({"": type(report.outside)(report.outside.name), **rows}, 0)
            report.peak = 0

    return overlay(part, profile_memory=profile_memory)


@mutant(area=AREA, kills={"MT-307"})
def slices_do_not_end(part):
    """Leaves out the ends of the slices in backward."""

    def is_kept(event):
        return event["ph"] != "E" or event["cat"] != "backward"

    def change(report):
        report.events[:] = [event for event in report.events if is_kept(event)]

    return _changed(part, change, "trace")


@mutant(area=AREA, kills={"MT-308"})
def difference_is_to_nothing(part):
    """Subtracts nothing from a report that is compared with another."""

    def change(report):
        report.diff = lambda other: report

    return _changed(part, change, "profile_flops", "profile_time", "profile_memory", "trace")


@mutant(area=AREA, kills={"MT-401"})
def compiled_code_is_thrown_away(part):
    """Drops what was compiled without it when it is entered, to see the modules inside."""

    class ModTracker(part.ModTracker):
        def __enter__(self):
            torch.compiler.reset()
            return super().__enter__()

    return _with(part, ModTracker)


@mutant(area=AREA, kills={"MT-403", "MT-406"})
def compile_safe_hooks_end_with_forward(part):
    """Calls no hook in backward."""

    class ModTracker(part.ModTracker):
        @staticmethod
        def compile_safe_hooks(model, **hooks):
            forward = {name: hook for name, hook in hooks.items() if "_bw_" not in name}
            return part.ModTracker.compile_safe_hooks(model, **forward)

    return _with(part, ModTracker)


@mutant(area=AREA, kills={"MT-406"})
def tensors_of_mappings_trade_places(part):
    """Fills a mapping that is not a plain dict from the other end."""

    def trade(module, args, output):
        if isinstance(output, dict) and type(output) is not dict:
            for key, value in zip(tuple(output), reversed(tuple(output.values())), strict=True):
                output[key] = value
        return output

    class ModTracker(part.ModTracker):
        @staticmethod
        @contextmanager
        def compile_safe_hooks(model, **hooks):
            with part.ModTracker.compile_safe_hooks(model, **hooks):
                handle = model.register_forward_hook(trade)
                yield
                handle.remove()

    return _with(part, ModTracker)


def _finding(part, names, change):
    """The part whose reports `names` run `change()` instead of nothing while they measure."""

    def measuring(name):
        @contextmanager
        def measure(*roots, **options):
            with change(), getattr(part, name)(*roots, **options) as report:
                yield report

        return measure

    return overlay(part, **{name: measuring(name) for name in names})


class _TakesApart(TorchDispatchMode):
    """Carries out every operator by its parts that has some."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.silu_backward.default:
            return func.decompose(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@mutant(area=AREA, kills={"MT-404"})
def reports_take_operators_apart(part):
    """Counts the backward of SiLU by its parts."""
    return _finding(part, ("profile_memory",), _TakesApart)


@mutant(area=AREA, kills={"MT-407"})
def experts_count_as_nothing(part):
    """Has a formula for products of groups that gives none."""

    @contextmanager
    def profile_flops(*roots, formulas=None, **options):
        none = {torch.ops.aten._grouped_mm: lambda *shapes, **others: 0, **(formulas or {})}
        with part.profile_flops(*roots, formulas=none, **options) as report:
            yield report

    return overlay(part, profile_flops=profile_flops)


@mutant(area=AREA, kills={"MT-405"})
def branches_are_added_up(part):
    """Counts both branches of torch.cond."""

    def both(predicate, first, second, operands):
        outputs = second(*operands), first(*operands)
        return outputs[bool(predicate)]

    return _finding(part, ("profile_flops",), lambda: patch.object(torch, "cond", both))
