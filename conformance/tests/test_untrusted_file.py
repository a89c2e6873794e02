"""Files of strangers are read only where they are ordinary, small and text."""

from __future__ import annotations

import os

import pytest

from torchparts_conformance._errors import ReportError
from torchparts_conformance.report import _untrusted_file


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("endless", "report 'endless' cannot be read: it is no ordinary file"),
        ("pipe", "report 'pipe' cannot be read: it is no ordinary file"),
        ("bytes", "report 'bytes' is not UTF-8, but text is needed"),
        ("large", "report 'large' exceeds 100 bytes, the most allowed"),
        ("nowhere", "report 'nowhere' cannot be read: No such file"),
        ("no\0name", "cannot be read"),
    ],
)
def test_only_small_text_files_are_read(tmp_path, place, said):
    """A link to a device or a pipe is not waited for, and nothing large is taken in."""
    (tmp_path / "endless").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    (tmp_path / "large").write_text("x" * 101)
    with pytest.raises(ReportError, match=said):
        _untrusted_file.read_text(tmp_path / place, role="report", max_bytes=100)


def test_file_of_exactly_the_most_bytes_is_read(tmp_path):
    """One more is refused, and nothing is cut off."""
    path = tmp_path / "file"
    path.write_text("x" * 100)
    assert _untrusted_file.read_text(path, role="report", max_bytes=100) == "x" * 100
    with pytest.raises(ReportError, match="exceeds 99 bytes"):
        _untrusted_file.read_text(path, role="report", max_bytes=99)
