"""Broken implementations: each is caught by what it declares; nothing-doers pass nothing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from torchparts_conformance._errors import RegistryError
from torchparts_conformance.mutants import find_mutants, mutant, overlay
from torchparts_conformance.mutation import _run
from torchparts_conformance.requirements._areas import AREAS, CLAIMED_BY_ALL
from torchparts_conformance.requirements._cases import load_registry

BROKEN = Path(__file__).parent / "broken"


def _declared():
    return [
        found
        for area in AREAS
        for path in _run.mutant_files(BROKEN, area)
        for found in find_mutants(path)
    ]


def test_every_must_has_a_broken_implementation():
    """Of other capabilities only some have one."""
    broken = {id for found in _declared() for id in found.kills}
    lacking = [
        r.id
        for r in load_registry().values()
        if r.level == "MUST" and r.id not in broken
        if r.profile in (*CLAIMED_BY_ALL, "distributed") or r.area == "combined"
    ]
    assert lacking == []


def test_mutants_declare_requirements_that_exist():
    """A mutant names ids of its own area."""
    registry = load_registry()
    strays = [
        (found.name, id)
        for found in _declared()
        for id in found.kills
        if id not in registry or registry[id].area != found.area
    ]
    assert strays == []


def test_overlay_replaces_names_that_exist():
    """The rest of the part is untouched, and a name that is not there cannot be replaced."""
    part = SimpleNamespace(a=1, b=2)
    changed = overlay(part, a=3)
    assert (changed.a, changed.b, part.a) == (3, 2, 1)
    assert {"a", "b"} <= set(dir(changed))
    with pytest.raises(AttributeError):
        overlay(part, c=1)


@pytest.mark.parametrize(
    "arguments", [{"area": "wheels", "kills": {"X"}}, {"area": "ckpt-wrap", "kills": ()}]
)
def test_incomplete_mutant_is_refused(arguments):
    """A mutant says where it is put, what it breaks and what has to notice."""
    with pytest.raises(RegistryError, match="needs a known area, at least one id and a docstring"):
        mutant(**arguments)(lambda part: part)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["do_nothing", "always_raise"])
def test_degenerate_implementation_passes_nothing(name, control_rows):
    """Neither doing nothing nor always raising satisfies a single requirement."""
    rows = control_rows[f"degenerate:{name}"]
    judged = [row for row in rows if row["profile"] in CLAIMED_BY_ALL]
    assert judged
    assert [(row["id"], row["case"]) for row in judged if row["outcome"] == "pass"] == []


def test_mutant_is_told_by_the_first_line_of_its_docstring():
    """Also where that is the only one."""

    @mutant(area="ckpt-wrap", kills={"CW-001"})
    def wrong(part):
        """Is wrong."""

    @mutant(area="ckpt-wrap", kills={"CW-001"})
    def worse(part):
        """Is worse.

        Much worse.
        """

    assert (wrong.text, worse.text) == ("Is wrong.", "Is worse.")
