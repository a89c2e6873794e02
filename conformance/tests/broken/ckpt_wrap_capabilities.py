"""Broken changes in place, plans and compiled forwards; each fails what it declares."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn.utils import parametrize

from torchparts_conformance.mutants import mutant, overlay

AREA = "ckpt-wrap"


def _recomputed_by(part, change):
    """The part, `change(engine, function, *args, **kwargs)` where `checkpoint_` calls its engine.

    `change` is a function of this module, so that what it changes can be pickled.
    """

    def checkpoint_(module, **options):
        engine = part.checkpoint_wrapper(nn.Identity(), **options).checkpoint_fn
        return part.checkpoint_(module, checkpoint_fn=functools.partial(change, engine))

    return overlay(part, checkpoint_=checkpoint_)


@mutant(area=AREA, kills={"CW-060"})
def checkpointing_leaves_a_buffer(part):
    """Marks the module with a buffer."""

    def checkpoint_(module, **options):
        module.register_buffer("checkpointed", torch.ones(()), persistent=False)
        return part.checkpoint_(module, **options)

    return overlay(part, checkpoint_=checkpoint_)


@mutant(area=AREA, kills={"CW-061"})
def engine_is_a_closure(part):
    """Binds the options in a function that cannot be pickled."""

    def checkpoint_(module, **options):
        engine = part.checkpoint_wrapper(nn.Identity(), **options).checkpoint_fn
        return part.checkpoint_(module, checkpoint_fn=lambda *args, **kw: engine(*args, **kw))

    return overlay(part, checkpoint_=checkpoint_)


def _with_hooks_again(engine, function, *args, **kwargs):
    if torch.compiler.is_compiling():  # which cannot follow `__self__`
        return engine(function, *args, **kwargs)
    module, runs = function.__self__, []

    def run(*args, **kwargs):
        for hook in module._forward_pre_hooks.values() if runs else ():
            hook(module, args)
        runs.append(None)
        return function(*args, **kwargs)

    return engine(run, *args, **kwargs)


@mutant(area=AREA, kills={"CW-062", "CW-064"})
def recomputation_calls_hooks(part):
    """Calls the hooks of the module in the second run, too."""
    return _recomputed_by(part, _with_hooks_again)


@mutant(area=AREA, kills={"CW-063", "CW-068"})
def unwrap_does_nothing(part):
    """Leaves the module as it is."""
    return overlay(part, unwrap=lambda module, **options: module)


@mutant(area=AREA, kills={"CW-068"})
def unwrap_takes_the_topmost_class(part):
    """Takes the class of a parametrization for its own."""

    def unwrap(module, **options):
        if not parametrize.is_parametrized(module):
            return part.unwrap(module, **options)
        module.__class__ = type(module).__bases__[0]
        return module

    return overlay(part, unwrap=unwrap)


def _with_layers(layers, function, *args, **kwargs):
    modules = function.__self__._modules
    now = {name: modules[name] for name in layers}
    modules.update(layers)
    try:
        return function(*args, **kwargs)
    finally:
        modules.update(now)


def _as_it_was(engine, layers, function, *args, **kwargs):
    if torch.compiler.is_compiling():  # which cannot follow `__self__`
        return engine(function, *args, **kwargs)
    modules = function.__self__._modules
    replaced = {name: old for name, old in layers.items() if modules.get(name, old) is not old}
    if replaced:
        function = functools.partial(_with_layers, replaced, function)
    return engine(function, *args, **kwargs)


@mutant(area=AREA, kills={"CW-064"})
def runs_the_layers_of_then(part):
    """Remembers the layers a module has when it is changed, and runs those."""

    def checkpoint_(module, **options):
        engine = part.checkpoint_wrapper(nn.Identity(), **options).checkpoint_fn
        run = functools.partial(_as_it_was, engine, dict(module.named_children()))
        return part.checkpoint_(module, checkpoint_fn=run)

    return overlay(part, checkpoint_=checkpoint_)


@mutant(area=AREA, kills={"CW-065", "CW-104"})
def random_state_is_not_replayed(part):
    """Recomputes with whatever random state there is."""
    checkpoint_ = functools.partial(part.checkpoint_, preserve_rng_state=False)
    return overlay(part, checkpoint_=checkpoint_)


@mutant(area=AREA, kills={"CW-066"})
def second_run_is_not_told(part):
    """Says that nothing is recomputed, whatever runs."""
    return overlay(part, is_recomputing=lambda: False)


@mutant(area=AREA, kills={"CW-107"})
def first_run_is_not_told(part):
    """Says that a module is checkpointed in its second run only."""
    return overlay(part, is_checkpointing=part.is_recomputing)


@mutant(area=AREA, kills={"CW-067"})
def prefixed_keys_are_unexpected(part):
    """Loads as a module that was never wrapped."""
    name = "_load_from_state_dict"

    def checkpoint_(module, **options):
        vars(module)[name] = functools.partial(getattr(nn.Module, name), module)
        return part.checkpoint_(module, **options)

    def unwrap(module, **options):
        for below in module.modules():
            vars(below).pop(name, None)
        return part.unwrap(module, **options)

    return overlay(part, checkpoint_=checkpoint_, unwrap=unwrap)


def _if_finite(engine, function, *args, **kwargs):
    for arg in args:
        if isinstance(arg, torch.Tensor) and not arg.detach().isfinite().all():
            raise ValueError("an input is not finite")
    return engine(function, *args, **kwargs)


@mutant(area=AREA, kills={"CW-080", "CW-082"})
def branches_on_what_is_in_the_input(part):
    """Looks at the numbers in its input, which nobody knows while a compiler traces."""
    return _recomputed_by(part, _if_finite)


@mutant(area=AREA, kills={"CW-090"})
def planning_applies(part):
    """Changes the model when the plan is made."""

    def make_plan(model, policy, **options):
        plan = part.make_plan(model, policy, **options)
        plan.apply(model)
        return plan

    return overlay(part, make_plan=make_plan)


@mutant(area=AREA, kills={"CW-091"})
def options_of_a_rule_are_dropped(part):
    """Takes options for True."""

    def make_plan(model, rule, **options):
        return part.make_plan(model, lambda name, module: bool(rule(name, module)), **options)

    return overlay(part, make_plan=make_plan)


@mutant(area=AREA, kills={"CW-092"})
def selecting_nothing_is_a_plan(part):
    """Gives an empty plan."""

    def make_plan(model, rule, **options):
        try:
            return part.make_plan(model, rule, **options)
        except part.PolicyError:
            return part.Plan(())

    return overlay(part, make_plan=make_plan)


@mutant(area=AREA, kills={"CW-093"})
def plan_tells_no_names(part):
    """Changes each planned module as if it stood alone."""

    class Nameless(part.Plan):
        def apply(self, model):
            for step in self.steps:
                part.checkpoint_(model.get_submodule(step.name), **step.options)
            return model

    def make_plan(model, policy, **options):
        plan = part.make_plan(model, policy, **options)
        return Nameless(plan.steps)

    return overlay(part, make_plan=make_plan)


@mutant(area=AREA, kills={"CW-104"})
def contexts_are_made_once(part):
    """Gives every module that has one `context_fn` the same two contexts."""

    def checkpoint_(module, **options):
        given = options.get("context_fn")
        if callable(given) and not isinstance(given, type):
            options["context_fn"] = _once(given)
        return part.checkpoint_(module, **options)

    return overlay(part, checkpoint_=checkpoint_)


@functools.cache
def _once(context_fn):
    return functools.cache(context_fn)
