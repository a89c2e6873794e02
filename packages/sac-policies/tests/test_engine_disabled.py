"""Modes of the contexts engine look away while the engine itself works."""

from __future__ import annotations

from types import SimpleNamespace

from sac_policies.engines._engine_disabled import EngineDisabled, active, own_work


def test_own_work_gives_each_mode_its_table_back() -> None:
    """Also where modes came and went meanwhile, as when unpacking runs a region again."""
    modes = [SimpleNamespace(op_table=name) for name in ("outer", "inner")]
    active.modes[:] = modes
    try:
        with own_work():
            assert all(isinstance(mode.op_table, EngineDisabled) for mode in modes)
            active.leave(modes[1])
        assert [mode.op_table for mode in modes] == ["outer", "inner"]
    finally:
        active.modes.clear()
