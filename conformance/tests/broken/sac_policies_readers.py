"""Broken counts of who reads what is made again; each fails exactly what it declares."""

from __future__ import annotations

from pkgutil import resolve_name
from unittest.mock import patch

from torchparts_conformance.mutants import mutant, overlay

AREA = "sac-policies"
_SAVED = "sac_policies.engines.recipe._sources.Edges.saved"
_REGISTER = "sac_policies.engines.recipe._edges.Follower.register"


def _counting(part, name, count):
    def checkpoint(function, *args, **kwargs):
        with patch(name, count):
            return part.checkpoint(function, *args, **kwargs)

    return overlay(part, checkpoint=checkpoint)


@mutant(area=AREA, kills={"SP-104"})
def copy_has_one_reader(part):
    """Takes the copy that an operator in place saves for one of another node."""

    def saved(self, cell, number, own_number):
        self.cells.setdefault(number, []).append(cell)

    return _counting(part, _SAVED, saved)


@mutant(area=AREA, kills={"SP-104"})
def what_was_saved_waits(part):
    """Has what a node saved wait for its replay, which finds all that it reads at edges."""
    register = resolve_name(_REGISTER)

    def registered(self, node, number, rule, cell):
        register(self, node, number, rule, cell)
        if cell.through and rule.operands is None:
            for each in self.edges.cells.get(number + 1, ()):
                each.readers += 1

    return _counting(part, _REGISTER, registered)
