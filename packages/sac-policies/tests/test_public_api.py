"""Properties of all public names, and the cost of importing them."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import subprocess
import sys
from dataclasses import is_dataclass

import pytest

import sac_policies

SUBMODULES = ("budget", "policies", "reports")


def public() -> list[tuple[str, object]]:
    """All public names of the package and its public modules."""
    modules = [sac_policies, *(getattr(sac_policies, name) for name in SUBMODULES)]
    return [(name, getattr(module, name)) for module in modules for name in module.__all__]


def test_public_objects_have_docstrings():
    """Every callable has a docstring."""
    assert [name for name, each in public() if callable(each) and not each.__doc__] == []


def test_records_are_frozen():
    """Policies are looked up by value; records are shared by regions and threads."""
    found = set()
    for item in pkgutil.walk_packages(sac_policies.__path__, "sac_policies."):
        members = vars(importlib.import_module(item.name)).values()
        found |= {kind for kind in members if inspect.isclass(kind) and is_dataclass(kind)}
    assert sac_policies.budget.BudgetPlan in found
    assert [kind for kind in found if not kind.__dataclass_params__.frozen] == []


def test_import_loads_what_is_used_and_nothing_else():
    """After torch and a first backward, which loads more since 2.15: only the standard library.

    Budgets and reports are loaded at first use, without an import statement. Triton, which torch's
    FLOP formulas import, is loaded by the first trace.
    """
    code = (
        "import sys, torch; torch.ones((), requires_grad=True).backward()\n"
        "before = set(sys.modules); import sac_policies as p; early = set(sys.modules)\n"
        "p.reports.Row, p.budget.Trace, [getattr(p, name) for name in p.__all__]\n"
        "print(*sorted(early - before)); print(*sorted(set(sys.modules) - early))"
    )
    lines = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    ).stdout.splitlines()
    early, later = (line.split() for line in lines)
    known = {"sac_policies", *sys.stdlib_module_names}
    assert [name for name in (*early, *later) if name.partition(".")[0] not in known] == []
    assert {"sac_policies.budget", "sac_policies.reports"} <= set(later)


def test_names_that_wait_are_listed_and_others_are_no_attributes():
    """Each lazy name is loaded once, and a misspelt name raises AttributeError."""
    name = "fit_"
    assert set(sac_policies.__all__) <= set(dir(sac_policies))
    assert getattr(sac_policies, name) is vars(sac_policies)[name]
    with pytest.raises(AttributeError, match=f"module 'sac_policies' has no attribute '{name}x'"):
        getattr(sac_policies, f"{name}x")
