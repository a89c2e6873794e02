"""The public surface, as a frozen list."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import subprocess
import sys
from dataclasses import is_dataclass

import mod_tracker
from mod_tracker import ModTracker, ModuleCall, PhaseRow

DROP_IN = {
    "__init__": (),
    "get_known_fqn": ("mod",),
    "register_user_hooks": ("pre_fw_hook", "post_fw_hook", "pre_bw_hook", "post_bw_hook"),
    "clear_user_hooks": (),
}


def test_public_names_are_listed():
    """Names change only on purpose."""
    assert mod_tracker.__all__ == [
        "FlopReport",
        "HookSlotError",
        "MemoryPage",
        "MemoryReport",
        "MemoryWatch",
        "MissingExtraError",
        "ModTracker",
        "ModTrackerError",
        "ModuleCall",
        "OptionError",
        "PhaseRow",
        "Report",
        "ReportSchedule",
        "StateError",
        "Subscription",
        "TimeReport",
        "TraceReport",
        "UnknownNameError",
        "assert_no_growth",
        "lightning_callback",
        "profile_flops",
        "profile_memory",
        "profile_time",
        "trace",
        "transformers_callback",
        "watch_memory",
    ]
    assert all(hasattr(mod_tracker, name) for name in mod_tracker.__all__)


def test_values_cannot_be_changed():
    found = set()
    for item in pkgutil.walk_packages(mod_tracker.__path__, "mod_tracker."):
        members = vars(importlib.import_module(item.name)).values()
        found |= {kind for kind in members if inspect.isclass(kind) and is_dataclass(kind)}
    changeable = {kind for kind in found if not kind.__dataclass_params__.frozen}
    assert {ModuleCall, PhaseRow} <= found
    assert not changeable


def test_tracker_has_these_members():
    """Drop-in names first, then properties and subscriptions."""
    public = {name for name in dir(ModTracker) if not name.startswith("_")}
    assert public == {
        *("parents", "is_bw", "get_known_fqn", "register_user_hooks", "clear_user_hooks"),
        *("stack", "current", "call", "called_as", "phase", "call_index", "iteration"),
        *("in_module", "module", "roots", "subscribe", "on_switch"),
    }


def test_drop_in_signatures_are_torchs():
    """Required and optional parameters of the drop-in names, in torch's order."""
    for name, expected in DROP_IN.items():
        parameters = inspect.signature(getattr(ModTracker, name)).parameters.values()
        plain = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert tuple(plain[1:]) == expected


def test_every_public_name_has_a_docstring():
    """Classes, functions and their public members."""
    for name in mod_tracker.__all__:
        value = getattr(mod_tracker, name)
        assert value.__doc__, name
        for member, found in vars(value).items() if inspect.isclass(value) else ():
            if not member.startswith("_") and (callable(found) or isinstance(found, property)):
                assert found.__doc__, f"{name}.{member}"


def test_import_loads_nothing_but_the_package():
    """Compared with torch, a first backward, which loads more since 2.15, and the standard library.

    Triton, which torch's FLOP formulas import, is loaded by the first report.
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
