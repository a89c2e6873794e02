"""Peak FLOPs by the name of a device."""

from __future__ import annotations

import pytest
import torch

from mod_tracker import OptionError, profile_flops
from mod_tracker.reports._peaks import PEAKS, peak_of


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("AMD Instinct MI300X", "MI300X"),
        ("h200", "H200"),
    ],
)
def test_names_that_drivers_report_are_known(name, known):
    assert peak_of(name) == PEAKS[known]


@pytest.mark.parametrize("name", ["", "RTX 4090 Laptop GPU", "NVIDIA H100 MIG 1g.10gb", "cuda"])
def test_other_names_are_refused(name):
    with pytest.raises(OptionError, match="Pass its FLOPs per second as a number"):
        peak_of(name)


def test_utilization_by_name_is_that_by_number():
    with profile_flops() as report:
        torch.ones(4, 4) @ torch.ones(4, 4)
    assert report.mfu("NVIDIA H100 80GB HBM3", 1e-9) == report.mfu(989e12, 1e-9) > 0
    assert report.hfu("H100", 1e-9) == report.hfu(989e12, 1e-9)
