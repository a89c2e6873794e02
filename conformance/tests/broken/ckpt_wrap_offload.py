"""Broken offloads; each fails what it declares."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from torchparts_conformance.mutants import mutant, overlay

AREA = "ckpt-wrap"


def _before_offload(part, prepare):
    """The part, `prepare(module, folder)` before a module is offloaded to a folder."""

    def offload_(module, **options):
        if "to" in options:
            prepare(module, Path(options["to"]))
        return part.offload_(module, **options)

    return overlay(part, offload_=offload_)


@mutant(area=AREA, kills={"CW-071"})
def shared_storages_are_counted_again(part):
    """Counts a storage for each saved tensor that has it."""

    def offload_stats(module):
        stats = part.offload_stats(module)
        return dataclasses.replace(stats, copies_out=stats.copies_out + stats.shared)

    return overlay(part, offload_stats=offload_stats)


def _copied(module, args):
    return tuple(arg.clone() for arg in args)


@mutant(area=AREA, kills={"CW-075"})
def offload_copies_its_inputs(part):
    """Works on copies, so that no change of an input is ever noticed."""
    return _before_offload(part, lambda module, _: module.register_forward_pre_hook(_copied))


@mutant(area=AREA, kills={"CW-075"})
def offload_hides_the_class(part):
    """Calls every module Module in messages."""

    def hide(module, folder):
        module.__class__ = type("Module", (type(module),), {})

    return _before_offload(part, hide)
