"""Shards that end where they should not, for the area flat-param."""

from __future__ import annotations

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
    return _choosing(part, lambda given: kind(3) if isinstance(given, kind) else given)


@mutant(area=AREA, kills={"FP-209"})
def one_boundary_is_that_of_all(part):
    """Keeps all parameters whole where one has to be."""
    kind = type(part.by_name({}))
    return _choosing(part, lambda given: "tensor" if isinstance(given, kind) else given)
