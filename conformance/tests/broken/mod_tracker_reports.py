"""Broken reports; each fails exactly the requirements that it declares."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import torch

from torchparts_conformance.mutants import mutant, overlay

_KEEPS_GRAPH = "mod_tracker._attribution.keeps_graph"


def _changed(part, change, *names):
    """The part with a change to completed reports of the kinds `names`."""

    def measuring(name):
        @contextmanager
        def measure(*roots, **options):
            with getattr(part, name)(*roots, **options) as report:
                yield report
            change(report)

        return measure

    return overlay(part, **{name: measuring(name) for name in names})


def _handing_out_changed(part, name):
    """The part whose `name` saves tensors for backward without checking their version."""

    @contextmanager
    def measure(*roots, **options):
        plain = torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: kept)
        with getattr(part, name)(*roots, **options) as report, plain:
            yield report

    return overlay(part, **{name: measure})


@mutant("MT-254")
def measured_tensors_are_handed_out_changed(part):
    """Measures memory and hides in-place changes of saved tensors."""
    return _handing_out_changed(part, "profile_memory")


@mutant("MT-301")
def outside_is_forgotten(part):
    """The row of the outside is empty, although the total includes it."""

    def change(report):
        outside = report.outside
        rows = {"": type(outside)(outside.name), **report.rows}
        report._fill(rows, report.total, report._stacks)

    return _changed(part, change, "profile_flops", "profile_time", "profile_memory")


@mutant("MT-302 MT-412")
def recompute_counts_as_forward(part):
    """Counts recomputation as forward."""

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


@mutant("MT-412")
def code_between_modules_is_backward(part):
    """Attributes operators by the running node if no module is entered."""
    return _finding(part, ("profile_flops",), lambda: patch(_KEEPS_GRAPH, lambda: True))


def _finding(part, names, change):
    """The part whose reports `names` run `change()` while they measure."""

    def measuring(name):
        @contextmanager
        def measure(*roots, **options):
            with change(), getattr(part, name)(*roots, **options) as report:
                yield report

        return measure

    return overlay(part, **{name: measuring(name) for name in names})


@mutant("MT-404")
def counts_take_operators_apart(part):
    """Decomposes SiLU to count it."""

    def parts(x, inplace=False):
        return x * x.sigmoid()

    silu = (torch.nn.functional, "silu", parts)
    return _finding(part, ("profile_flops",), lambda: patch.object(*silu))


@mutant("MT-301 MT-302 MT-412")
def what_runs_again_does_not_count(part):
    """Leaves out operators that a checkpoint recomputes."""

    def change(report):
        lost = report.sum("self_recompute")
        rows = {
            name: replace(row, self_recompute=0, recompute=0) for name, row in report.rows.items()
        }
        report._fill({"": report.outside, **rows}, report.total - lost, report._stacks)

    return _changed(part, change, "profile_flops")


@mutant("MT-407")
def experts_count_as_nothing(part):
    """Has a formula for grouped products that returns zero."""
    none = {torch.ops.aten._grouped_mm: lambda *shapes, **others: 0}
    return _counting(part, lambda formulas: {**none, **formulas})


def _counting(part, change):
    """The part whose `profile_flops` gets formulas changed by `change`."""

    @contextmanager
    def profile_flops(*roots, formulas=None, **options):
        with part.profile_flops(*roots, formulas=change(formulas or {}), **options) as report:
            yield report

    return overlay(part, profile_flops=profile_flops)


@mutant("MT-408")
def attention_counts_as_nothing(part):
    """Counts attention only if it is decomposed into products."""
    kernels = [
        getattr(torch.ops.aten, f"_scaled_dot_product_{kind}")
        for kind in ("flash_attention_for_cpu", "flash_attention", "efficient_attention")
    ]
    none = dict.fromkeys(kernels, lambda *shapes, **others: 0)
    return _counting(part, lambda formulas: {**none, **formulas})
