"""Broken queries of trackers, and hooks under torch.compile; each fails what it declares."""

from __future__ import annotations

from contextlib import contextmanager
from fnmatch import fnmatchcase

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from torchparts_conformance.mutants import mutant, overlay

AREA = "mod-tracker"


def _with(part, kind):
    """The part with another ModTracker."""
    kind.__qualname__ = "ModTracker"
    globals()["ModTracker"] = kind  # where pickle looks for it
    return overlay(part, ModTracker=kind)


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
            attribution.attribute_op = attribution.locate
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


@mutant(area=AREA, kills={"MT-401"})
def compiled_code_is_thrown_away(part):
    """Drops what was compiled without it when it is entered, to see the modules inside."""

    class ModTracker(part.ModTracker):
        def __enter__(self):
            torch.compiler.reset()
            return super().__enter__()

    return _with(part, ModTracker)
