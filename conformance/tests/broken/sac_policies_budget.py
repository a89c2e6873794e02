"""Broken regions and budgets of the area sac-policies; each fails what it declares."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import warnings

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from torchparts_conformance.mutants import mutant, overlay

AREA = "sac-policies"


def _hooked(part, around):
    """The part with `around(function, args)` in place of a region's forward, in eager code."""

    def checkpoint(function, *args, **kwargs):
        if torch.compiler.is_compiling() or kwargs.get("policy") is None:
            return part.checkpoint(function, *args, **kwargs)
        return part.checkpoint(functools.partial(around, function), *args, **kwargs)

    return overlay(part, checkpoint=checkpoint)


@mutant(area=AREA, kills={"SP-100", "SP-152", "SP-181"})
def random_state_is_advanced(part):
    """Draws one number more than the function does."""

    def around(function, *args):
        out = function(*args)
        torch.rand(1, device=args[0].device)
        return out

    return _hooked(part, around)


@mutant(area=AREA, kills={"SP-101", "SP-152", "SP-181"})
def graph_holds_itself(part):
    """Keys what it knows of a node in the node, and points back to it."""

    def around(function, *args):
        out = function(*args)
        if isinstance(out, torch.Tensor) and out.grad_fn is not None:
            out.grad_fn.metadata["self"] = [out.grad_fn]
        return out

    return _hooked(part, around)


@mutant(
    area=AREA,
    kills={
        "SP-102",
        "SP-132",
        "SP-153",
        "SP-156",
        "SP-161",
    },
)
def inputs_are_copied(part):
    """Works on copies of what it is given, so that no change of an input is ever noticed."""

    def checkpoint(function, *args, policy=None, **kwargs):
        if policy is not None and not hasattr(policy, "kept_bytes"):
            args = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
        return part.checkpoint(function, *args, policy=policy, **kwargs)

    return overlay(part, checkpoint=checkpoint)


@mutant(area=AREA, kills={"SP-153", "SP-156", "SP-161", "SP-181"})
def sums_and_results_are_kept(part):
    """Rebuilds from what a node itself saved, and keeps what has to be looked for."""

    def checkpoint(function, *args, policy=None, **kwargs):
        if policy == part.recompute_all():
            policy = part.save_ops("aten.add", "aten.cat", "aten.tanh", "aten._softmax")
        return part.checkpoint(function, *args, policy=policy, **kwargs)

    return overlay(part, checkpoint=checkpoint)


@mutant(area=AREA, kills={"SP-154", "SP-209"})
def operands_are_read_as_they_are(part):
    """Runs a function of containers again, on whatever has become of their tensors."""

    def checkpoint(function, *args, **kwargs):
        if any(isinstance(each, list) for each in args):
            return torch_checkpoint(function, *args, use_reentrant=False)
        return part.checkpoint(function, *args, **kwargs)

    return overlay(part, checkpoint=checkpoint)


@mutant(
    area=AREA,
    kills={
        "SP-108",
        "SP-142",
        "SP-152",
        "SP-155",
        "SP-181",
    },
)
def forward_runs_twice(part):
    """Calls the function once before the region does."""

    def around(function, *args):
        with torch.no_grad(), torch.random.fork_rng():
            function(*args)
        return function(*args)

    return _hooked(part, around)


def _replanned(part, change):
    """The part with every plan of `solve` put through `change(plan)`."""

    def solve(trace, budget, **kwargs):
        plan = part.solve(trace, budget, **kwargs)
        return change(plan) if plan else plan

    return overlay(part, solve=solve)


@mutant(area=AREA, kills={"SP-120"})
def dry_run_weighs_nothing(part):
    """Counts no bytes where tensors have no data."""

    def profile(function, *args, **kwargs):
        trace = part.profile(function, *args, **kwargs)
        if not isinstance(args[0], FakeTensor):
            return trace
        ops = tuple(dataclasses.replace(op, out_bytes=0) for op in trace.ops)
        return dataclasses.replace(trace, ops=ops)

    return overlay(part, profile=profile)


@mutant(area=AREA, kills={"SP-122", "SP-177", "SP-212"})
def bytes_are_estimated(part):
    """Promises one byte less than the engine keeps."""

    def estimate(plan):
        less = int(plan.recompute_cost > 0)
        return dataclasses.replace(plan, kept_bytes=plan.kept_bytes - less)

    return _replanned(part, estimate)


@mutant(area=AREA, kills={"SP-121", "SP-123", "SP-125"})
def budget_is_rounded_up(part):
    """Rounds every budget up to whole KiB."""

    def solve(trace, budget, **kwargs):
        if isinstance(budget, int) and budget > 0:
            budget = -(-budget // 1024) * 1024
        return part.solve(trace, budget, **kwargs)

    return overlay(part, solve=solve)


@mutant(area=AREA, kills={"SP-124", "SP-125"})
def large_budgets_are_wasted(part):
    """Keeps the least, whatever the budget, between the two ends."""

    def solve(trace, budget, **kwargs):
        low, high = trace.fixed_bytes(), trace.total_bytes()
        if isinstance(budget, int) and (low + high) // 2 < budget < high:
            budget = low
        return part.solve(trace, budget, **kwargs)

    return overlay(part, solve=solve)


@mutant(area=AREA, kills={"SP-123"})
def infeasible_budget_gets_the_least(part):
    """Gives the smallest plan where none fits, and says it needs nothing."""

    def solve(trace, budget, **kwargs):
        found = part.solve(trace, budget, **kwargs)
        return found or dataclasses.replace(found, smallest_bytes=found.smallest_bytes + 1)

    return overlay(part, solve=solve)


@mutant(area=AREA, kills={"SP-126"})
def unreadable_budget_is_everything(part):
    """Takes a budget that it cannot read for no limit."""

    def solve(trace, budget, **kwargs):
        try:
            return part.solve(trace, budget, **kwargs)
        except ValueError:
            return part.solve(trace, "100%", **kwargs)

    return overlay(part, solve=solve)


@mutant(area=AREA, kills={"SP-127"})
def front_repeats_a_plan(part):
    """Lists its first plan twice."""

    def pareto(trace, **kwargs):
        front = part.pareto(trace, **kwargs)
        return [front[0], *front]

    return overlay(part, pareto=pareto)


@mutant(area=AREA, kills={"SP-128"})
def fit_trusts_its_estimate(part):
    """Returns the plan that keeps all, without a measurement."""

    def fit(model, batch, budget, **kwargs):
        found = part.fit(model, batch, budget, **kwargs)
        with torch.random.fork_rng():
            whole = part.solve(part.profile(copy.deepcopy(model), batch), "100%")
        return dataclasses.replace(found, policy=whole) if found else found

    return overlay(part, fit=fit)


@mutant(area=AREA, kills={"SP-130"})
def fit_leaves_its_gradients(part):
    """Drops the gradients that were there."""

    def fit(model, batch, budget, **kwargs):
        found = part.fit(model, batch, budget, **kwargs)
        for parameter in model.parameters():
            parameter.grad = None
        return found

    return overlay(part, fit=fit)


@mutant(area=AREA, kills={"SP-131"})
def digest_is_lost(part):
    """Reads back a plan without its decisions."""

    def from_json(text):
        plan = part.from_json(text)
        return dataclasses.replace(plan, choices=()) if hasattr(plan, "choices") else plan

    return overlay(part, from_json=from_json)


@mutant(area=AREA, kills={"SP-104", "SP-110", "SP-132"})
def region_runs_again(part):
    """Runs a region of one input again, without a look at what it reads."""

    def checkpoint(function, *args, policy=None, **kwargs):
        replays = len(args) == 1 and not kwargs
        if not replays or policy != part.recompute_all():
            return part.checkpoint(function, *args, policy=policy, **kwargs)
        return torch_checkpoint(function, *args, use_reentrant=False)

    return overlay(part, checkpoint=checkpoint)


def _keeps_nothing(policy):
    try:
        return inspect.isfunction(policy) and policy(None, torch.ops.aten.mm.default) is False
    except (AttributeError, TypeError):  # it asks more than which operator runs
        return False


def _as_torch(part, wrong):
    """The part; calls that keep nothing and of which `wrong(args, kwargs)` holds are torch's."""

    def checkpoint(function, *args, policy=None, **kwargs):
        if not (_keeps_nothing(policy) and wrong(args, kwargs)):
            return part.checkpoint(function, *args, policy=policy, **kwargs)
        return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)

    return overlay(part, checkpoint=checkpoint)


@mutant(area=AREA, kills={"SP-140", "SP-143", "SP-157", "SP-215"})
def changed_leaves_are_read(part):
    """Runs a region of one leaf again, whatever its parameters have become."""
    return _as_torch(part, lambda args, kwargs: len(args) == 1 and args[0].is_leaf)


@mutant(area=AREA, kills={"SP-141"})
def gradient_inside_runs_all_of_the_region(part):
    """Runs a region to its end for a gradient inside it, where early stop is off."""
    return _as_torch(part, lambda args, kwargs: kwargs.get("early_stop") is False)


@mutant(area=AREA, kills={"SP-151"})
def damaged_policy_keeps_nothing(part):
    """Reads what it cannot read as a policy that keeps nothing."""

    def from_json(text):
        try:
            return part.from_json(text)
        except ValueError:
            return part.recompute_all()

    return overlay(part, from_json=from_json)


@mutant(area=AREA, kills={"SP-152"})
def warning_is_given_once(part):
    """Remembers the policies it warned of, and is silent about them afterwards."""
    known = set()

    def checkpoint(function, *args, policy=None, **kwargs):
        if torch.compiler.is_compiling():
            return part.checkpoint(function, *args, policy=policy, **kwargs)
        with warnings.catch_warnings():
            if not callable(policy) and repr(policy) in known:
                warnings.simplefilter("ignore", part.UnmatchedEntryWarning)
            known.add(repr(policy))
            return part.checkpoint(function, *args, policy=policy, **kwargs)

    return overlay(part, checkpoint=checkpoint)


@mutant(area=AREA, kills={"SP-177", "SP-212"})
def host_is_not_asked(part):
    """Repeats what it does not keep, however fast the host is."""

    def solve(trace, budget, *, host_bandwidth=None, **options):
        return part.solve(trace, budget, **options)

    return overlay(part, solve=solve)


@mutant(area=AREA, kills={"SP-212"})
def copies_cost_nothing(part):
    """Offloads as if the host were infinitely fast."""

    def solve(trace, budget, *, host_bandwidth=None, **options):
        rate = None if host_bandwidth is None else 2**62
        return part.solve(trace, budget, host_bandwidth=rate, **options)

    return overlay(part, solve=solve)


@mutant(area=AREA, kills={"SP-212"})
def each_region_waits_for_its_copies_back(part):
    """Plans for regions in a row as for one that stands alone."""

    def solve(trace, budget, *, regions=1, **options):
        return part.solve(trace, budget, **options)

    return overlay(part, solve=solve)
