"""What holds for all public names, and what importing them costs."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import subprocess
import sys
from dataclasses import is_dataclass

import pytest
import torch.distributed._tools.mod_tracker as source

import mod_tracker
from mod_tracker import ModTracker, ModuleCall, PhaseRow


def test_values_cannot_be_changed():
    found = set()
    for item in pkgutil.walk_packages(mod_tracker.__path__, "mod_tracker."):
        members = vars(importlib.import_module(item.name)).values()
        found |= {kind for kind in members if inspect.isclass(kind) and is_dataclass(kind)}
    changeable = {kind for kind in found if not kind.__dataclass_params__.frozen}
    assert {ModuleCall, PhaseRow} <= found
    assert not changeable


@pytest.mark.parametrize(
    "name", ["__init__", "get_known_fqn", "register_user_hooks", "clear_user_hooks"]
)
def test_drop_in_signatures_are_torchs(name):
    """Positional parameters of the drop-in names, in torch's order."""
    found = []
    for kind in (ModTracker, source.ModTracker):
        parameters = inspect.signature(getattr(kind, name)).parameters.values()
        found.append([p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD])
    assert found[0] == found[1]


def test_every_public_name_has_a_docstring():
    """Classes, functions and their public members."""
    for name in mod_tracker.__all__:
        value = getattr(mod_tracker, name)
        assert value.__doc__, name
        for member, found in vars(value).items() if inspect.isclass(value) else ():
            if not member.startswith("_") and (callable(found) or isinstance(found, property)):
                assert found.__doc__, f"{name}.{member}"


def test_import_loads_nothing_but_the_package():
    """Over torch, a first backward, which loads more since 2.15, and the standard library.

    Triton, which comes with torch's formulas for FLOPs, waits for a report.
    """
    code = (
        "import sys, torch; torch.ones((), requires_grad=True).backward()\n"
        "before = set(sys.modules); import mod_tracker as p\n"
        "[getattr(p, name) for name in p.__all__]\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    ).stdout.split()
    known = {"mod_tracker", *sys.stdlib_module_names}
    assert [name for name in loaded if name.partition(".")[0] not in known] == []
