"""Broken offloads; each fails what it declares."""

from __future__ import annotations

import dataclasses
import os
import weakref
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


def _drop_low_bytes(file):
    data = bytearray(file.read_bytes())
    data[::4] = bytes(len(data[::4]))
    file.write_bytes(data)


@mutant(area=AREA, kills={"CW-070", "CW-098", "CW-117"})
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


@mutant(area=AREA, kills={"CW-071", "CW-117"})
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


@mutant(area=AREA, kills={"CW-073", "CW-118"})
def latest_calls_are_not_kept(part):
    """Has the tensors of every call leave, whatever `keep_last`."""

    def offload_(module, *, keep_last=0, **options):
        return part.offload_(module, **options)

    return overlay(part, offload_=offload_)


@mutant(area=AREA, kills={"CW-074", "CW-117"})
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


def _without_a_limit(part, room):
    """The part that gives `room(module, limit)` as the limit, and a limit of the same words."""

    def offload_(module, *, max_bytes_away=None, **options):
        limit = None if max_bytes_away is None else room(module, max_bytes_away)
        return part.offload_(module, max_bytes_away=limit, **options)

    return overlay(part, offload_=offload_)


@mutant(area=AREA, kills={"CW-117"})
def limits_are_passed_over(part):
    """Offloads all, however much is away."""
    return _without_a_limit(part, lambda module, limit: None)


@mutant(area=AREA, kills={"CW-117"})
def each_module_has_the_limit_for_itself(part):
    """Forgets what other modules have away."""
    numbers = iter(range(10**6))
    return _without_a_limit(part, lambda module, limit: limit + next(numbers))


@mutant(area=AREA, kills={"CW-117"})
def a_limit_keeps_everything(part):
    """Keeps all tensors where there is a limit at all."""
    return _without_a_limit(part, lambda module, limit: 0)


def _with_late(part, late_of):
    def offload_stats(module):
        stats = part.offload_stats(module)
        return dataclasses.replace(stats, late=late_of(stats))

    return overlay(part, offload_stats=offload_stats)


@mutant(area=AREA, kills={"CW-118"})
def every_copy_back_counts_as_late(part):
    """Counts those that were asked for before, too."""
    return _with_late(part, lambda stats: stats.copies_in)


@mutant(area=AREA, kills={"CW-118"})
def no_copy_counts_as_late(part):
    """Never says that backward waited."""
    return _with_late(part, lambda stats: 0)
