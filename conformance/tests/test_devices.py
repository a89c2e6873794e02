"""Which kinds of devices are there is asked of torch and of the back ends that are installed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from torchparts_conformance.subject import _devices

KIND = "made_up_kind"


@pytest.fixture
def brought(monkeypatch):
    """A back end that brings a device once it is imported, and the kinds that are there."""
    there = [None]
    load = lambda: lambda: there.append(KIND)  # noqa: E731
    entries = [SimpleNamespace(name=KIND, load=load)]
    monkeypatch.setattr(_devices, "_back_ends", lambda: entries)
    monkeypatch.setattr(_devices, "accelerator", lambda: there[-1])
    return there


def test_device_of_an_installed_back_end_is_known_and_there(brought):
    """A process that was kept from it imports it when it is asked for."""
    assert _devices.is_known(KIND)
    assert _devices.is_there(KIND)
    assert brought == [None, KIND]


def test_device_that_a_back_end_does_not_bring_is_not_there(brought):
    """Importing one back end makes no other kind."""
    assert not _devices.is_known("another_kind")
    assert not _devices.is_there("another_kind")


def test_device_that_torch_knows_needs_no_back_end(brought):
    """The CPU is always there; a word of torch's without a device is not, and nothing is loaded."""
    assert _devices.is_there("cpu")
    assert _devices.is_known("xpu")
    assert not _devices.is_there("xpu")
    brought.append("xpu")
    assert _devices.is_there("xpu")
    assert KIND not in brought


def test_device_has_the_name_of_its_maker_or_its_kind():
    """None has none."""
    assert _devices.name_of(None) is None
    assert _devices.name_of("cpu") == "cpu"


def test_accelerator_that_torch_was_built_for_and_does_not_find_is_not_there(monkeypatch):
    """Only what is available counts."""

    def current_accelerator(check_available=False):
        return None if check_available else SimpleNamespace(type="cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    assert _devices.accelerator() is None
    assert not _devices.is_there("cuda")
