"""Broken reports of the area mod-tracker; each fails what it declares."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from torchparts_conformance.mutants import mutant, overlay

AREA = "mod-tracker"
_KEEPS_GRAPH = "mod_tracker._attribution.keeps_graph"
_APART = "mod_tracker.reports._memory.apart"


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


@mutant(area=AREA, kills={"MT-251"})
def first_steps_are_enough(part):
    """Counts the first six products, and takes the rest to be like them."""

    @contextmanager
    def profile_flops(*roots, **options):
        with part.profile_flops(*roots, **options) as report:
            counts = _get_current_dispatch_mode().counts
            add, left = counts.add_at, iter(range(6))
            counts.add_at = lambda *amount: next(left, None) is None or add(*amount)
            yield report

    return overlay(part, profile_flops=profile_flops)


@mutant(area=AREA, kills={"MT-252", "MT-414", "MT-424"})
def saved_is_temporary(part):
    """Does not look into graphs."""
    in_graphs = ("mod_tracker.reports._holders.saved_values", lambda roots: ())
    return _finding(part, ("watch_memory",), lambda: patch(*in_graphs))


@mutant(area=AREA, kills={"MT-253"})
def growth_is_overlooked(part):
    """Runs one step, after which anything may be a cache."""
    return overlay(part, assert_no_growth=lambda step, **options: step())


def _handing_out_changed(part, name):
    """The part whose `name` keeps tensors for backward without looking at their version."""

    @contextmanager
    def measure(*roots, **options):
        plain = torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: kept)
        with getattr(part, name)(*roots, **options) as report, plain:
            yield report

    return overlay(part, **{name: measure})


@mutant(area=AREA, kills={"MT-252", "MT-413", "MT-414", "MT-421", "MT-424"})
def saved_tensors_are_handed_out_changed(part):
    """Looks who holds memory in a way that hides changes of what was saved."""
    return _handing_out_changed(part, "watch_memory")


@mutant(area=AREA, kills={"MT-254", "MT-305", "MT-413"})
def measured_tensors_are_handed_out_changed(part):
    """Measures memory in a way that hides changes of what was saved."""
    return _handing_out_changed(part, "profile_memory")


@mutant(area=AREA, kills={"MT-301", "MT-304", "MT-305", "MT-434"})
def outside_is_forgotten(part):
    """Shows nothing for what runs outside of modules, though the total has it."""

    def change(report):
        outside = report.outside
        rows = {"": type(outside)(outside.name), **report.rows}
        report._fill(rows, report.total, report._stacks)

    return _changed(part, change, "profile_flops", "profile_time", "profile_memory")


@mutant(area=AREA, kills={"MT-302", "MT-412"})
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
        report._fill({"": report.outside, **rows}, report.total, report._stacks)

    return _changed(part, change, "profile_flops")


@mutant(area=AREA, kills={"MT-412"})
def code_between_modules_is_backward(part):
    """Looks at the node that asks, wherever no module is entered."""
    return _finding(part, ("profile_flops",), lambda: patch(_KEEPS_GRAPH, lambda: True))


@mutant(area=AREA, kills={"MT-303", "MT-409"})
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
            report._fill({"": type(report.outside)(report.outside.name), **rows}, 0)
            report.peak = 0

    return overlay(part, profile_memory=profile_memory)


@mutant(area=AREA, kills={"MT-307", "MT-435"})
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
def counts_take_operators_apart(part):
    """Counts SiLU by its parts."""

    def parts(x, inplace=False):
        return x * x.sigmoid()

    silu = (torch.nn.functional, "silu", parts)
    return _finding(part, ("profile_flops",), lambda: patch.object(*silu))


@mutant(area=AREA, kills={"MT-420", "MT-433"})
def memory_takes_operators_apart(part):
    """Measures the backward of SiLU by its parts."""
    return _finding(part, ("profile_memory",), _TakesApart)


@mutant(area=AREA, kills={"MT-301", "MT-302", "MT-412", "MT-422"})
def what_runs_again_does_not_count(part):
    """Leaves out what a checkpoint carries out again."""

    def change(report):
        lost = report.sum("self_recompute")
        rows = {
            name: replace(row, self_recompute=0, recompute=0) for name, row in report.rows.items()
        }
        report._fill({"": report.outside, **rows}, report.total - lost, report._stacks)

    return _changed(part, change, "profile_flops")


@mutant(area=AREA, kills={"MT-303", "MT-409", "MT-423"})
def formulas_of_the_caller_are_dropped(part):
    """Counts by its own formulas alone."""
    return _counting(part, lambda formulas: {})


@mutant(area=AREA, kills={"MT-407"})
def experts_count_as_nothing(part):
    """Has a formula for products of groups that gives none."""
    none = {torch.ops.aten._grouped_mm: lambda *shapes, **others: 0}
    return _counting(part, lambda formulas: {**none, **formulas})


@mutant(area=AREA, kills={"MT-405"})
def branches_are_added_up(part):
    """Counts both branches of torch.cond."""

    def both(predicate, first, second, operands):
        outputs = second(*operands), first(*operands)
        return outputs[bool(predicate)]

    return _finding(part, ("profile_flops",), lambda: patch.object(torch, "cond", both))


def _counting(part, change):
    """The part whose `profile_flops` is given the formulas that `change` makes of the user's."""

    @contextmanager
    def profile_flops(*roots, formulas=None, **options):
        with part.profile_flops(*roots, formulas=change(formulas or {}), **options) as report:
            yield report

    return overlay(part, profile_flops=profile_flops)


@mutant(area=AREA, kills={"MT-408"})
def attention_counts_as_nothing(part):
    """Knows the products of attention only where they are carried out one by one."""
    kernels = [
        getattr(torch.ops.aten, f"_scaled_dot_product_{kind}")
        for kind in ("flash_attention_for_cpu", "flash_attention", "efficient_attention")
    ]
    none = dict.fromkeys(kernels, lambda *shapes, **others: 0)
    return _counting(part, lambda formulas: {**none, **formulas})


@mutant(area=AREA, kills={"MT-409"})
def failed_formulas_count_as_nothing(part):
    """Takes a formula that raises for one that gives none, without a word."""

    def guarded(formula):
        def count(*shapes, **others):
            try:
                return formula(*shapes, **others)
            except ZeroDivisionError:
                return 0

        return count

    return _counting(part, lambda formulas: {key: guarded(f) for key, f in formulas.items()})


@mutant(area=AREA, kills={"MT-410"})
def pages_load_their_style(part):
    """Writes pages that look right as long as there is a network."""

    def change(report):
        page = report.to_html
        link = '<link rel="stylesheet" href="https://example.org/report.css">'
        report.to_html = lambda **options: link + page(**options)

    return _changed(part, change, "profile_flops", "profile_time", "profile_memory", "trace")


@mutant(area=AREA, kills={"MT-411"})
def compiled_modules_are_not_named(part):
    """Leaves out what was seen as a whole."""

    def change(report):
        report.notes = tuple(note for note in report.notes if "compiled" not in note)

    return _changed(part, change, "profile_flops", "profile_time", "profile_memory", "trace")


@mutant(area=AREA, kills={"MT-413"})
def saved_tensors_hold_themselves(part):
    """Keeps what is saved for backward with its place in the graph."""

    @contextmanager
    def change():
        with patch(_APART, lambda kept: kept):
            yield

    return _finding(part, ("profile_memory",), change)


@mutant(area=AREA, kills={"MT-414"})
def caught_errors_have_no_page(part):
    """Looks at errors that end the measurement only."""

    @contextmanager
    def watch_memory(*roots, **options):
        with part.watch_memory(*roots, **options) as watch:
            watch._ran_out, ran_out = lambda error: None, watch._ran_out
            try:
                yield watch
            finally:
                watch._ran_out = ran_out

    return overlay(part, watch_memory=watch_memory)
