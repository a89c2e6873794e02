"""Broken reports of the area mod-tracker; each fails what it declares."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import torch

from torchparts_conformance.mutants import mutant, overlay

AREA = "mod-tracker"
_KEEPS_GRAPH = "mod_tracker._attribution.keeps_graph"


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


def _handing_out_changed(part, name):
    """The part whose `name` keeps tensors for backward without looking at their version."""

    @contextmanager
    def measure(*roots, **options):
        plain = torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: kept)
        with getattr(part, name)(*roots, **options) as report, plain:
            yield report

    return overlay(part, **{name: measure})


@mutant(area=AREA, kills={"MT-254"})
def measured_tensors_are_handed_out_changed(part):
    """Measures memory in a way that hides changes of what was saved."""
    return _handing_out_changed(part, "profile_memory")


@mutant(area=AREA, kills={"MT-301"})
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


def _finding(part, names, change):
    """The part whose reports `names` run `change()` instead of nothing while they measure."""

    def measuring(name):
        @contextmanager
        def measure(*roots, **options):
            with change(), getattr(part, name)(*roots, **options) as report:
                yield report

        return measure

    return overlay(part, **{name: measuring(name) for name in names})


@mutant(area=AREA, kills={"MT-404"})
def counts_take_operators_apart(part):
    """Counts SiLU by its parts."""

    def parts(x, inplace=False):
        return x * x.sigmoid()

    silu = (torch.nn.functional, "silu", parts)
    return _finding(part, ("profile_flops",), lambda: patch.object(*silu))


@mutant(area=AREA, kills={"MT-301", "MT-302", "MT-412"})
def what_runs_again_does_not_count(part):
    """Leaves out what a checkpoint carries out again."""

    def change(report):
        lost = report.sum("self_recompute")
        rows = {
            name: replace(row, self_recompute=0, recompute=0) for name, row in report.rows.items()
        }
        report._fill({"": report.outside, **rows}, report.total - lost, report._stacks)

    return _changed(part, change, "profile_flops")


@mutant(area=AREA, kills={"MT-407"})
def experts_count_as_nothing(part):
    """Has a formula for products of groups that gives none."""
    none = {torch.ops.aten._grouped_mm: lambda *shapes, **others: 0}
    return _counting(part, lambda formulas: {**none, **formulas})


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
