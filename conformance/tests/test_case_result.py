"""A case on one device: its area, its device and a name without the device."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from torchparts_conformance.run import _case_result


def test_case_on_two_devices_has_the_same_name(suite, monkeypatch):
    """Devices are in the row, not in the case's name."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    suite.run("--device", "cpu,cuda")
    rows = [row for row in suite.report()["rows"] if row["id"] == "CW-001"]
    assert [row["device"] for row in rows] == ["cpu", "cuda"]
    assert len({row["case"] for row in rows}) == 1


@pytest.mark.parametrize(
    ("path", "area"),
    [
        ("/x/cases/ckpt_wrap/test_a.py", "ckpt-wrap"),
        ("/x/cases/combined/deep/test_a.py", "combined"),
        ("/cases/x/cases/mod_tracker/test_a.py", "mod-tracker"),
        ("/x/cases/wheels/test_a.py", None),
        ("/x/tests/ckpt_wrap/test_a.py", None),
        ("/x/ckpt_wrap/cases/test_a.py", None),
    ],
)
def test_area_of_a_file_is_the_folder_below_cases(path, area):
    """A folder of this name elsewhere makes no case."""
    assert _case_result.area_of_path(Path(path)) == area
    assert _case_result.is_case_path(Path(path)) is (area is not None)


def _item(name, device=None, folder="ckpt_wrap"):
    callspec = None if device is None else SimpleNamespace(params={"device": device})
    path = Path(f"/home/cases/{folder}/test_a.py")
    return SimpleNamespace(path=path, name=name, callspec=callspec)


@pytest.mark.parametrize(
    ("name", "device", "wanted"),
    [
        ("test_one", None, "test_one"),
        ("test_one[cpu]", "cpu", "test_one"),
        ("test_one[cpu-deep]", "cpu", "test_one[deep]"),
        ("test_one[deep-cuda-2]", "cuda", "test_one[deep-2]"),
        ("test_one[cpu-deep]", "cuda", "test_one[cpu-deep]"),
    ],
)
def test_name_of_a_case_has_its_parameters_without_the_device(name, device, wanted):
    """And of its folders the last that is an area's."""
    assert _case_result.case_name(_item(name, device)) == f"ckpt_wrap/test_a.py::{wanted}"
    deep = _item(name, device, folder="flat_param/deep")
    assert _case_result.case_name(deep) == f"flat_param/test_a.py::{wanted}"


def test_device_is_the_processor_where_a_case_has_no_parameter():
    """Or has others only."""
    assert _case_result.device_of(_item("test_one")) == "cpu"
    other = SimpleNamespace(callspec=SimpleNamespace(params={"depth": 2}))
    assert _case_result.device_of(other) == "cpu"
    assert _case_result.device_of(_item("test_one[xpu]", "xpu")) == "xpu"
