"""Broken changes in place, offloads, plans and compiled forwards; each fails what it declares."""

from __future__ import annotations

import dataclasses
import functools
import os
import weakref
from pathlib import Path

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


def _before_offload(part, prepare):
    """The part, `prepare(module, folder)` before a module is offloaded to a folder."""

    def offload_(module, **options):
        if "to" in options:
            prepare(module, Path(options["to"]))
        return part.offload_(module, **options)

    return overlay(part, offload_=offload_)


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


def _drop_low_bytes(file):
    data = bytearray(file.read_bytes())
    data[::4] = bytes(len(data[::4]))
    file.write_bytes(data)


@mutant(area=AREA, kills={"CW-070", "CW-098"})
def files_lose_digits(part):
    """Writes the last eight bits of each number as zeros."""

    def prepare(module, folder):
        def lose(*_):
            for file in folder.glob("*/*.bin"):
                _drop_low_bytes(file)

        module.register_forward_hook(lose)

    return _before_offload(part, prepare)


@mutant(area=AREA, kills={"CW-070", "CW-074"})
def files_have_a_twin(part):
    """Gives every file a second name, and removes only the first."""

    def prepare(module, folder):
        def link(*_):
            for file in folder.glob("*/*.bin"):
                twin = file.with_name(f"twin-{file.name.removeprefix('twin-')}")
                if not twin.exists():
                    os.link(file, twin)

        module.register_forward_hook(link)

    return _before_offload(part, prepare)


@mutant(area=AREA, kills={"CW-071"})
def shared_storages_are_counted_again(part):
    """Counts a storage for each saved tensor that has it."""

    def offload_stats(module):
        stats = part.offload_stats(module)
        return dataclasses.replace(stats, copies_out=stats.copies_out + stats.shared)

    return overlay(part, offload_stats=offload_stats)


@mutant(area=AREA, kills={"CW-072", "CW-073"})
def checkpointing_ends_offload(part):
    """Forgets what was done to a module when it is checkpointed."""

    def checkpoint_(module, **options):
        return part.checkpoint_(part.unwrap(module, recurse=False), **options)

    return overlay(part, checkpoint_=checkpoint_)


@mutant(area=AREA, kills={"CW-073"})
def latest_calls_are_not_kept(part):
    """Has the tensors of every call leave, whatever `keep_last`."""

    def offload_(module, *, keep_last=0, **options):
        return part.offload_(module, **options)

    return overlay(part, offload_=offload_)


@mutant(area=AREA, kills={"CW-074"})
def results_are_remembered(part):
    """Holds on to the result of every forward."""

    def prepare(module, folder):
        results = []
        module.register_forward_hook(lambda module, args, result: results.append(result))

    return _before_offload(part, prepare)


def _copied(module, args):
    return tuple(arg.clone() for arg in args)


@mutant(area=AREA, kills={"CW-075"})
def offload_copies_its_inputs(part):
    """Works on copies, so that no change of an input is ever noticed."""
    return _before_offload(part, lambda module, _: module.register_forward_pre_hook(_copied))


@mutant(area=AREA, kills={"CW-075", "CW-076"})
def offload_hides_the_class(part):
    """Calls every module Module in messages."""

    def hide(module, folder):
        module.__class__ = type("Module", (type(module),), {})

    return _before_offload(part, hide)


def _if_finite(engine, function, *args, **kwargs):
    for arg in args:
        if isinstance(arg, torch.Tensor) and not arg.detach().isfinite().all():
            raise ValueError("an input is not finite")
    return engine(function, *args, **kwargs)


@mutant(area=AREA, kills={"CW-080", "CW-081", "CW-082"})
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
def counting_starts_at_n(part):
    """Takes the n-th, not the first, as the first of every n-th."""

    def every_nth(n, of, *, start=0):
        return part.every_nth(n, of, start=start + n - 1)

    return overlay(part, every_nth=every_nth)


@mutant(area=AREA, kills={"CW-091"})
def size_is_in_bytes(part):
    """Compares the bounds with bytes."""

    def by_size(*, at_least=0, at_most=None):
        return part.by_size(
            at_least=-(-at_least // 4), at_most=None if at_most is None else at_most // 4
        )

    return overlay(part, by_size=by_size)


@mutant(area=AREA, kills={"CW-092"})
def selecting_nothing_is_a_plan(part):
    """Gives an empty plan."""

    def make_plan(model, policy, *, action="checkpoint", **options):
        try:
            return part.make_plan(model, policy, action=action, **options)
        except part.PolicyError:
            return part.Plan(action, ())

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
        return Nameless(plan.action, plan.steps)

    return overlay(part, make_plan=make_plan)


@mutant(area=AREA, kills={"CW-098"})
def children_write_into_the_folder_of_their_parent(part):
    """Empties what a forked child finds in the folder, as one that takes it for its own does."""
    owner = os.getpid()
    folders = set()

    def clear():
        if os.getpid() != owner:
            for folder in folders:
                for file in folder.glob("*/*.bin"):
                    file.write_bytes(b"")

    def prepare(module, folder):
        folders.add(folder)
        module.register_forward_pre_hook(lambda *_: clear())

    return _before_offload(part, prepare)


@mutant(area=AREA, kills={"CW-099"})
def folders_are_made_unasked(part):
    """Makes whatever folder it is given."""
    return _before_offload(part, lambda module, folder: folder.mkdir(parents=True, exist_ok=True))


@mutant(area=AREA, kills={"CW-109"})
def folders_are_held_open(part):
    """Opens the folder in forward, and closes it with the module."""

    def prepare(module, folder):
        def hold(*_):
            weakref.finalize(module, os.close, os.open(folder, os.O_RDONLY))

        module.register_forward_hook(hold)

    return _before_offload(part, prepare)


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
