"""Where something was raised: the lines of the case, of the adapter, and of what they called.

Rule 1: files are named by their last folders, so that no folder of a machine is in a report.
Rule 2: what is said of code below the adapter is its own last line, and below that torch's.
"""

from __future__ import annotations

import sys
import sysconfig
import traceback
from pathlib import Path

from torchparts_conformance._package import PACKAGE
from torchparts_conformance.run._case_result import is_case_path

_LIBRARY = sysconfig.get_paths()["stdlib"]
_CASE, _ADAPTER = "case ", "adapter "
_ARROW = " > "


def place_of(raised: BaseException, adapter: Path | None, area: str, *, failed: bool) -> str:
    """Give the lines that lead to what was raised, from the case on.

    Args:
        raised: with its traceback.
        adapter: the file of the adapter; where none of its lines ran, the one that names the area
            comes first.
        area: of the case.
        failed: a claim of the case was false; then what it called last is no reason.
    """
    frames = [(Path(f.filename), f.lineno or 0) for f in traceback.extract_tb(raised.__traceback__)]
    below = [number for number, (path, _) in enumerate(frames) if is_case_path(path)]
    if not below:
        return ""
    frames = frames[below[0] :]
    steps = [_CASE + _line(*next(frame for frame in frames[::-1] if is_case_path(frame[0])))]
    steps += [_ADAPTER + _line(*frame) for frame in frames if frame[0] == adapter][-1:]
    if not failed:
        called = [frame for frame in frames if _is_called(frame[0], adapter)]
        own = [frame for frame in called if not _is_torch(frame[0])]
        steps += [_line(*frame) for frame in dict.fromkeys([*own[-1:], *called[-1:]])]
    if not any(map(is_of_adapter, steps)):
        steps.insert(0, _line_of_area(adapter, area))
    return _ARROW.join(filter(None, steps))


def is_of_adapter(step: str) -> bool:
    """Say whether a line is the adapter's."""
    return step.startswith(_ADAPTER)


def _line_of_area(adapter: Path | None, area: str) -> str:
    """Give the line of an adapter that names an area, or its first."""
    if adapter is None or not adapter.is_file():
        return ""
    lines = adapter.read_text(encoding="utf-8", errors="replace").splitlines()
    found = [n for n, line in enumerate(lines, 1) if f'"{area}"' in line or f"'{area}'" in line]
    return _ADAPTER + _line(adapter, (found or [1])[0])


def _line(path: Path, number: int) -> str:
    parts = path.parts
    if "site-packages" in parts:
        return f"{'/'.join(parts[len(parts) - parts[::-1].index('site-packages') :])}:{number}"
    return f"{'/'.join(parts[-2:])}:{number}"


def _is_torch(path: Path) -> bool:
    root = getattr(sys.modules.get("torch"), "__file__", None)
    return root is not None and Path(root).parent in path.parents


def _is_called(path: Path, adapter: Path | None) -> bool:
    """Say whether a file is neither of the case and the adapter nor of what runs them."""
    is_runner = {"_pytest", "pluggy", "<frozen runpy>"} & set(path.parts)
    is_suite = PACKAGE in path.parents
    is_standard = str(path).startswith(_LIBRARY) and "site-packages" not in path.parts
    made = str(path).startswith("<")
    return not (path == adapter or is_runner or is_suite or is_standard or made)
