"""Reads files that may come from strangers, of a kind and size that were agreed on."""

from __future__ import annotations

import errno
from pathlib import Path

from torchparts_conformance._errors import ReportError


def read_text(path: Path, *, role: str, max_bytes: int) -> str:
    """Read a UTF-8 file.

    Args:
        path: of a regular file; a device or a pipe might never end.
        role: what the file is, for the message.
        max_bytes: more is not read.
    Raises:
        ReportError: it is missing, something else than a file, too large, or not UTF-8.
    """
    name = f"{role} {path.name!r:.200}"
    try:
        content = _start_of(path, max_bytes + 1)
    except (OSError, ValueError) as error:  # the latter for a path that no file can have
        reason = getattr(error, "strerror", None) or str(error)
        raise ReportError(f"{name} cannot be read: {reason:.120}. Name a file that can.") from error
    if len(content) > max_bytes:
        raise ReportError(f"{name} exceeds {max_bytes} bytes, the most allowed. Shorten it.")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ReportError(f"{name} is not UTF-8, but text is needed. Make it again.") from error


def _start_of(path: Path, count: int) -> bytes:
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no ordinary file")
    with path.open("rb") as file:
        return file.read(count)
