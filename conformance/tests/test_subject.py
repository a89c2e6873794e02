"""What is under test: an implementation by its text, and a fault in the part that it is for."""

from __future__ import annotations

import sys

import pytest

from torchparts_conformance._errors import AdapterError
from torchparts_conformance.subject._subject import Subject

ADAPTER = """
import types
from torchparts_conformance import Implementation

parts = {word: types.SimpleNamespace(answer=42) for word in ("ckpt-wrap", "mod-tracker")}
impl = Implementation("mine", "1", parts=parts)
"""
FAULT = """
from torchparts_conformance.mutants import mutant, overlay

@mutant(area="ckpt-wrap", kills={"CW-001"})
def wrong(part):
    '''Answers wrongly.'''
    return overlay(part, answer=41)
"""


@pytest.fixture
def spec(tmp_path, monkeypatch):
    """Give the text of an adapter that has two of the parts."""
    (tmp_path / "adapter_of_a_subject.py").write_text(ADAPTER)
    monkeypatch.syspath_prepend(tmp_path)
    yield "adapter_of_a_subject:impl"
    sys.modules.pop("adapter_of_a_subject", None)


def test_adapter_is_imported_when_it_is_asked_for_and_once(spec):
    """Until then nothing of a stranger's code has run."""
    subject = Subject(spec)
    assert "adapter_of_a_subject" not in sys.modules
    first = subject.implementation
    del sys.modules["adapter_of_a_subject"]
    assert subject.implementation is first


def test_part_without_a_fault_is_the_adapters_own(spec):
    """Nothing is put around it."""
    subject = Subject(spec)
    assert subject.part("ckpt-wrap") is subject.implementation.parts["ckpt-wrap"]


def test_fault_is_in_the_part_that_it_is_for_and_in_no_other(spec, tmp_path):
    """And the implementation itself is left as it was."""
    (tmp_path / "faults.py").write_text(FAULT)
    subject = Subject(spec, f"{tmp_path / 'faults.py'}::wrong")
    assert subject.part("ckpt-wrap").answer == 41
    assert subject.part("mod-tracker") is subject.implementation.parts["mod-tracker"]
    assert subject.implementation.parts["ckpt-wrap"].answer == 42


def test_part_that_is_not_provided_is_refused(spec):
    """By its area and the implementation's name."""
    with pytest.raises(AdapterError, match="part 'flat-param' is not provided by 'mine'"):
        Subject(spec).part("flat-param")
