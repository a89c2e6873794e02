"""Public names and signatures equal those in the snapshot files."""

from __future__ import annotations

import importlib
import importlib.util
import types

import pytest


@pytest.fixture
def names(load):
    return load("release/public_names")


MODULES = (
    *("ckpt_wrap", "mod_tracker", "torchparts_conformance"),
    *("flat_param", "flat_param.handle", "flat_param.plan"),
    *("sac_policies", "sac_policies.budget", "sac_policies.policies", "sac_policies.reports"),
)


@pytest.mark.parametrize("name", MODULES)
def test_public_names_are_those_written_down(names, name):
    """`python tools/release/public_names.py --write` accepts an intended change."""
    assert names.MODULES == MODULES
    assert names.differences(importlib.import_module(name)) == []


class _Base:
    def __init__(self, size: int = 1) -> None:
        self.size = size

    def double(self) -> int:
        """Return twice the size."""
        return 2 * self.size


class _Derived(_Base):
    @property
    def half(self) -> int:
        """Half of the size."""
        return self.size // 2


def _function(x, *, deep=False):
    """Do nothing."""


def test_names_options_and_members_that_go_are_seen(names, tmp_path, monkeypatch):
    """A function, an option, a member; members of a public base are listed once."""
    monkeypatch.setattr(names, "FOLDER", tmp_path)
    module = types.ModuleType(__name__)
    module.__all__ = ["Base", "Derived", "LIMIT", "function"]
    module.Base, module.Derived, module.LIMIT, module.function = _Base, _Derived, 3, _function
    assert names.lines_of(module) == [
        "class Base(object)(size: 'int' = 1) -> 'None'",
        "Base.double(self) -> 'int'",
        "class Derived(_Base)(size: 'int' = 1) -> 'None'",
        "Derived.half",
        "LIMIT: int",
        "function(x, *, deep=False)",
    ]
    (tmp_path / f"{__name__}.txt").write_text("\n".join(names.lines_of(module)) + "\n")
    assert names.differences(module) == []
    module.function = lambda x: None
    module.__all__ = ["Base", "Derived", "function"]
    changes = [line for line in names.differences(module) if line[:2] not in ("--", "++", "@@")]
    assert changes == ["-LIMIT: int", "-function(x, *, deep=False)", "+function(x)"]
