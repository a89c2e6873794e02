"""Metadata that cannot be read says why, and nothing of what is in it."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from flat_param import CheckpointError
from flat_param.dcp import _dcp_metadata
from flat_param.dcp._dcp_metadata import METADATA, parse_metadata, read_bytes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of torch's own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is one process
        dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    return tmp_path


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError("the disk is gone"), "the disk is gone"),
        (ValueError("a value of the file"), "ValueError"),
        (RecursionError(), "RecursionError"),
    ],
)
def test_reason_is_the_systems_words_or_the_kind_of_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    """What other errors say may be what the file holds."""

    def load_inert(data: bytes) -> None:
        raise error

    monkeypatch.setattr(_dcp_metadata, "load_inert", load_inert)
    with pytest.raises(CheckpointError) as raised:
        parse_metadata(folder, read_bytes(folder))
    assert str(raised.value) == (
        f"flat_param.load: '{folder / METADATA}' cannot be read ({said}), but it describes the "
        "checkpoint. It is truncated, damaged or foreign: load another one."
    )


def test_file_that_is_not_there_is_named(folder: Path) -> None:
    """And so is one that is shorter than the metadata says."""
    (part,) = folder.glob("*.distcp")
    data = part.read_bytes()
    part.write_bytes(data[:5])
    with pytest.raises(CheckpointError, match=part.name):
        parse_metadata(folder, read_bytes(folder))
    part.unlink()
    with pytest.raises(CheckpointError, match=part.name):
        parse_metadata(folder, read_bytes(folder))
    part.write_bytes(data)
    assert set(parse_metadata(folder, read_bytes(folder)).entries) == {"a"}


INTERRUPTED = """
import signal, sys
from flat_param.dcp._dcp_metadata import encode_metadata
from flat_param.dcp._stored import Origin, Stored

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "sympy.printing":
            sys.meta_path.remove(self)
            signal.raise_signal(signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
sys.meta_path.insert(0, Interrupts())
stored = Stored({}, Origin("0" * 12, 1, None, ()))
try:
    encode_metadata(stored)
    print("once")
except KeyboardInterrupt:
    encode_metadata(stored)
    print("again")
"""


def test_first_save_that_is_interrupted_can_be_made_again() -> None:
    """Ctrl-C as torch's classes are imported would leave a half of sympy, for good."""
    made = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=120
    )
    # What torch 2.9 needs for that imports no sympy, so that nothing is interrupted.
    expected = "once\n" if torch.__version__.startswith("2.9.") else "again\n"
    assert made.stdout == expected, made.stderr
