"""Fingerprints of the code under test, and the words that describe this machine."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import importlib.util
import json
import platform
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

from torchparts_conformance._console import shown
from torchparts_conformance.subject._adapters import known_adapters
from torchparts_conformance.subject._devices import accelerator, name_of
from torchparts_conformance.subject._protocol import Implementation

MAX_WORD = 100
# Written at the installation, not by the wheel; they differ from one machine to the next.
_WRITTEN_BY_INSTALLERS = ("INSTALLER", "REQUESTED", "RECORD", "direct_url.json", "uv_cache.json")


def describe_implementation(implementation: Implementation, spec: str) -> dict[str, Any]:
    """Name an implementation, and fingerprint its distributions and its adapter."""
    return {
        "name": printable(implementation.name),
        "version": printable(implementation.version),
        "adapter": printable(spec, limit=200),
        "adapter_sha256": _adapter_sha256(spec),
        "distributions": [describe_distribution(name) for name in implementation.distributions],
    }


def printable(text: str, *, limit: int = MAX_WORD) -> str:
    """Give text with control characters replaced, cut to a length; never empty."""
    return shown(text)[:limit] or "-"


def describe_distribution(name: str) -> dict[str, Any]:
    """Fingerprint one distribution: its RECORD if it was installed from a wheel, else its source.

    `wheel_sha256` is known only where the installer noted which file it installed.
    """
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return _described(name, None, "source", _source_sha256(name), None)
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    record = distribution.read_text("RECORD")
    if record and not origin.get("dir_info", {}).get("editable"):
        sha256 = record_sha256(record)
        wheel = origin.get("archive_info", {}).get("hashes", {}).get("sha256")
        return _described(name, distribution.version, "record", sha256, wheel)
    return _described(name, distribution.version, "source", _source_sha256(name), None)


def record_sha256(record: str) -> str:
    """Hash what a wheel brought, from an installed RECORD: the same wherever it was installed."""
    kept = sorted(line for line in record.splitlines() if _is_from_wheel(line))
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()


def wheel_record_sha256(path: Path) -> str | None:
    """Give the same for the file of a wheel; None where its RECORD is not true of what it holds."""
    try:
        with zipfile.ZipFile(path) as wheel:
            (name,) = (each for each in wheel.namelist() if each.endswith(".dist-info/RECORD"))
            record = wheel.read(name).decode()
            noted = {row[0]: row[1] for row in csv.reader(record.splitlines())}
            held = {each: _noted_sha256(wheel, each) for each in wheel.namelist() if each != name}
    except (zipfile.BadZipFile, ValueError, LookupError):
        return None
    return record_sha256(record) if noted == {**held, name: ""} else None


def _noted_sha256(wheel: zipfile.ZipFile, name: str) -> str:
    """Hash one file of a wheel, as its RECORD writes it."""
    total = hashlib.sha256()
    with wheel.open(name) as file:
        while part := file.read(1 << 20):
            total.update(part)
    return f"sha256={base64.urlsafe_b64encode(total.digest()).decode().rstrip('=')}"


def _is_from_wheel(line: str) -> bool:
    path, _, _ = line.rpartition(",")[0].rpartition(",")
    folder, _, name = path.rpartition("/")
    if path.startswith("..") or name.endswith(".pyc"):
        return False
    return not (folder.endswith(".dist-info") and name in _WRITTEN_BY_INSTALLERS)


def _described(
    name: str, version: str | None, kind: str, sha256: str | None, wheel: str | None
) -> dict[str, Any]:
    return {
        "name": printable(name),
        "version": version if version is None else printable(version),
        "kind": kind if sha256 else "none",
        "sha256": sha256,
        "wheel_sha256": wheel,
    }


def _source_sha256(name: str) -> str | None:
    """Hash the Python files of the package a distribution is named after."""
    found = importlib.util.find_spec(re.sub(r"[-.]", "_", name))
    if found is None or not found.submodule_search_locations:
        return None
    root = Path(next(iter(found.submodule_search_locations)))
    total = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{path.relative_to(root).as_posix()} {digest}\n".encode())
    return total.hexdigest()


def adapter_file(spec: str) -> Path | None:
    """Give the file of an adapter that was imported."""
    module = known_adapters().get(spec, spec).partition(":")[0]
    origin = getattr(sys.modules.get(module), "__file__", None)
    return Path(origin) if origin else None


def _adapter_sha256(spec: str) -> str | None:
    path = adapter_file(spec)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path else None


def describe_environment() -> dict[str, Any]:
    """Say which Python, torch and devices a run used; nothing that names the machine."""
    import torch

    kind = accelerator()
    gpu = name_of(kind)
    return {
        "python": platform.python_version(),
        "torch": printable(torch.__version__),
        "platform": printable(f"{platform.system()}-{platform.machine()}"),
        "cpu": printable(torch.backends.cpu.get_cpu_capability()),
        "cuda": torch.version.cuda if kind == "cuda" else None,
        "gpu": printable(gpu) if gpu else None,
    }
