"""A case on one device: its area, its device and a name without the device."""

from __future__ import annotations


def test_case_on_two_devices_has_the_same_name(suite, monkeypatch):
    """Devices are in the row, not in the case's name."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    suite.run("--device", "cpu,cuda")
    rows = [row for row in suite.report()["rows"] if row["id"] == "CW-001"]
    assert [row["device"] for row in rows] == ["cpu", "cuda"]
    assert len({row["case"] for row in rows}) == 1
