"""Shards that end where they should not, for the area flat-param."""

from __future__ import annotations

import math

from torch import Tensor

from torchparts_conformance.mutants import mutant, overlay

AREA = "flat-param"


def _choosing(part, choose):
    """The part with another boundary in place of the one that is asked for."""

    def fully_shard(module, *, boundary="element", **options):
        return part.fully_shard(module, boundary=choose(boundary), **options)

    return overlay(part, fully_shard=fully_shard)


@mutant(area=AREA, kills={"FP-208"})
def blocks_are_cut(part):
    """Ends shards after other numbers of elements than were asked for."""
    kind = part.Blocks

    def choose(given):
        is_run = isinstance(given, kind) and isinstance(given.shape, int)
        return kind(3) if is_run else given

    return _choosing(part, choose)


@mutant(area=AREA, kills={"FP-241"})
def tiles_are_runs_of_elements(part):
    """Leaves as many elements together as a tile has, wherever they lie."""
    kind = part.Blocks

    def choose(given):
        is_tile = isinstance(given, kind) and isinstance(given.shape, tuple)
        return kind(math.prod(given.shape)) if is_tile else given

    return _choosing(part, choose)


@mutant(area=AREA, kills={"FP-243"})
def codes_are_cast(part):
    """Loads all optimizer state in the dtype of its parameter."""

    def load_sharded(module, path, *, optimizer=None, **options):
        part.load_sharded(module, path, optimizer=optimizer, **options)
        for param, values in optimizer.state.items() if optimizer is not None else ():
            for key, value in values.items():
                if isinstance(value, Tensor):
                    values[key] = value.to(param.dtype)

    return overlay(part, load_sharded=load_sharded)


@mutant(area=AREA, kills={"FP-209"})
def one_boundary_is_that_of_all(part):
    """Keeps all parameters whole where one has to be."""
    kind = type(part.by_name({}))
    return _choosing(part, lambda given: "tensor" if isinstance(given, kind) else given)
