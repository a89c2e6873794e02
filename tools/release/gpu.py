"""Run everything that needs an accelerator: `python tools/release/gpu.py [--device cuda] OUT`.

Runs the conformance suite and the tests marked `accelerator`, two processes at a time, then the
demo and `benchmarks.real`, one at a time. Each part writes a log into the folder OUT, and a
part that is still running at the time limit is ended. `gpu.json` names the machine, the date and
the outcome of each part.

Needs torch and pytest; the packages need not be installed. Exits with 1 unless all parts passed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("ckpt-wrap", "mod-tracker", "flat-param", "sac-policies")
LIMIT_S = 24 * 60.0
AT_A_TIME = 2
_NO_TESTS = 5  # pytest's exit status


@dataclass(frozen=True)
class Part:
    """One process of the run; `measures` is true if no other part may run at the same time."""

    name: str
    command: tuple[str, ...]
    measures: bool = False


@dataclass(frozen=True)
class Ended:
    """Outcome and duration of a part."""

    name: str
    outcome: str
    seconds: float


def parts(device: str, out: Path) -> Iterator[Part]:
    """List the parts in the order in which they start."""
    suite = ("-m", "torchparts_conformance", "run", "--impl", "ours", "--device", device)
    yield Part("conformance", (*suite, "--out", str(out / "conformance")))
    for name in PACKAGES:
        tests = ("-m", "pytest", "-q", "-m", "accelerator", f"packages/{name}/tests")
        yield Part(f"tests {name}", (*tests, f"--junitxml={out / name}.xml"))
    demo = ("docs/examples/compare_gpt.py", "--device", device, "--quick")
    yield Part("demo", (*demo, "--out", str(out / "demo")), measures=True)
    real = ("-m", "benchmarks.real", "--model", "1b", "--json", str(out / "real.json"))
    yield Part("bench real", real, measures=True)


def run(part: Part, out: Path, end: float) -> Ended:
    """Run one part until `end` of the monotonic clock; its output goes to a log of its name."""
    sources = [*ROOT.glob("packages/*/src"), ROOT / "conformance/src"]
    path = os.pathsep.join([*map(str, sources), os.environ.get("PYTHONPATH", "")])
    began = time.monotonic()
    with (out / f"{part.name.replace(' ', '-')}.log").open("wb") as log:
        try:
            code = subprocess.run(
                [sys.executable, *part.command],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": path.strip(os.pathsep)},
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=max(end - began, 1.0),
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return Ended(part.name, "ended at the limit", time.monotonic() - began)
    outcome = {0: "passed", _NO_TESTS: "nothing is marked"}.get(code, f"failed ({code})")
    return Ended(part.name, outcome, time.monotonic() - began)


def machine(device: str) -> dict[str, str]:
    """Name the accelerator, its driver, torch, Python and the date."""
    import torch

    module = torch.get_device_module(device)
    name = getattr(module, "get_device_name", lambda: device)()
    return {
        "accelerator": f"{torch.accelerator.device_count()} x {name}",
        "driver": _driver(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def _driver() -> str:
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(ask, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def main() -> int:
    """Run everything; 0 if every part passed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--device", default="cuda", help="kind of accelerator, without an index")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="SECONDS")
    options = parser.parse_args()
    import torch

    here = torch.accelerator.current_accelerator(check_available=True)
    if here is None or here.type != options.device:
        there = "no accelerator" if here is None else here.type
        parser.error(f"{options.device} asked for, but this machine has {there}: nothing was run")
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.limit
    chosen = list(parts(options.device, out))
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        beside = [part for part in chosen if not part.measures]
        ended = list(pool.map(lambda part: run(part, out, end), beside))
    ended += [run(part, out, end) for part in chosen if part.measures]
    facts = machine(options.device)
    result = {"machine": facts, "parts": [asdict(part) for part in ended]}
    (out / "gpu.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print("\n".join(f"{key}: {value}" for key, value in facts.items()))
    print("\n".join(f"{each.seconds:6.0f} s  {each.name}: {each.outcome}" for each in ended))
    return 0 if all(each.outcome in ("passed", "nothing is marked") for each in ended) else 1


if __name__ == "__main__":
    sys.exit(main())
