"""Whatever waits for an accelerator, in one command: `python .ci/gpu.py [--device cuda] OUT`.

Runs conformance on the device and every test marked for devices, two at a time, and then the
benchmarks that take a device, one at a time. Each part has a log in the folder OUT; what runs at
the limit is ended. `gpu.md` and `gpu.json` say on which machine and day, what each part came to,
which defects that the simulated device had shown are confirmed to be gone on this one, and which of
its tables are.

Needs torch and pytest; the distributions need not be installed. Exits with 1 unless all passed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("ckpt-wrap", "mod-tracker", "flat-param", "sac-policies")
LIMIT_S = 24 * 60.0
AT_A_TIME = 2
_NO_TESTS = 5  # pytest's exit status
GONE, HELD = ("gone", "still there"), ("confirmed", "not so")


@dataclass(frozen=True)
class Part:
    """One process of the run; `measures` tells whether it wants the machine for itself."""

    name: str
    command: tuple[str, ...]
    measures: bool = False


@dataclass(frozen=True)
class Ended:
    """What a part came to."""

    name: str
    outcome: str
    seconds: float


@dataclass(frozen=True)
class Defect:
    """What the simulated device had shown, and whose passing says that it is gone.

    `tests` are beginnings of pytest's names, `requirements` are ids.
    """

    what: str
    tests: tuple[str, ...] = ()
    requirements: tuple[str, ...] = ()


DEFECTS = {
    "D1": Defect(
        "two devices shared pinned memory, and the wrong one waited",
        tests=("test_host_memory_goes_from_one_device_to_another_after_its_last_use",),
    ),
    "D2": Defect(
        "backward threads of two devices disturbed each other's copies",
        tests=(
            "test_two_backward_threads_read_each_storage_once",
            "test_two_threads_that_read_one_storage_fetch_it_once",
        ),
    ),
    "D3": Defect(
        "whether a change after saving was an error hung on timing",
        tests=("test_a_change_after_saving_is_an_error_however_far_the_copy_is",),
    ),
    "D4": Defect(
        "what was fetched early was read on a stream that nobody had told",
        tests=("test_a_later_part_may_run_on_another_stream",),
    ),
    "D5": Defect(
        "with the host far ahead, memory was reserved as if nothing were offloaded",
        tests=("test_memory_does_not_grow_with_how_far_the_host_is_ahead",),
    ),
    "D6": Defect(
        "a pack hook of the user's was given bytes that had not arrived",
        tests=("test_offloaded_outputs_give_the_plain_gradients",),
    ),
    "D7": Defect(
        "sources were held after backward until the next call",
        tests=("test_after_backward_nothing_is_held",),
    ),
    "D8": Defect(
        "nodes made on a device's backward thread were charged outside of modules",
        tests=("test_on_a_device_with_a_backward_thread_of_its_own",),
        requirements=("MT-209",),
    ),
    "D9": Defect(
        "time was told of the current device alone",
        tests=("test_times_of_two_devices_are_those_of_their_modules",),
    ),
}


# What conformance/simdev/README.md has in tables and figures, and what asks the same of a device.
TABLES = {
    "offload": Defect(
        "no race and plain gradients: two devices, backward threads, streams, slow copies",
        requirements=("CW-112", "CW-113", "CW-114"),
    ),
    "offload, memory": Defect(
        "reserved memory with the host far ahead, and nothing held after backward",
        requirements=("CW-115", "CW-116"),
    ),
    "offload, schedule": Defect(
        "limits of host memory, and copies that come in time",
        requirements=("CW-117", "CW-118"),
    ),
    "offload inside contexts": Defect(
        "no race and plain gradients: two devices, backward threads, streams, slow copies",
        requirements=("SP-178", "SP-200", "SP-201", "SP-206", "SP-207"),
    ),
    "offload inside contexts, memory": Defect(
        "reserved memory with the host far ahead", requirements=("SP-208",)
    ),
    "sharded": Defect(
        "plain training: other streams and threads, gathers ahead, microbatches",
        requirements=("FP-234", "FP-235", "FP-244", "FP-245", "FP-246", "FP-247"),
    ),
    "sharded, the host": Defect("waits for nothing in a step", requirements=("FP-236",)),
    "report by device clock": Defect("time is the module's", requirements=("MT-431",)),
}


def parts(device: str, out: Path) -> Iterator[Part]:
    """Give what there is to run."""
    suite = ("-m", "torchparts_conformance", "run", "--impl", "ours", "--device", device)
    yield Part("conformance", (*suite, "--out", str(out / "conformance")))
    for name in PARTS:
        tests = ("-m", "pytest", "-q", "-m", "accelerator", f"packages/{name}/tests")
        yield Part(f"tests {name}", (*tests, f"--junitxml={out / name}.xml"))
    recipe = ("packages/sac-policies/benchmarks/bench_recipe.py", "--device", device)
    yield Part("bench recipe 256", (*recipe, "--width", "256"), measures=True)
    large = ("--width", "2048", "--dtype", "bfloat16")
    yield Part("bench recipe 2048", (*recipe, *large), measures=True)
    demo = ("docs/examples/compare_gpt.py", "--device", device, "--quick")
    yield Part("demo", (*demo, "--out", str(out / "demo")), measures=True)
    front = ("packages/sac-policies/benchmarks/bench_frontier.py", "--device", device)
    small = ("--dtype", "bfloat16", "--rounds", "2", "--json", str(out / "frontier.json"))
    yield Part("bench frontier", (*front, *small), measures=True)


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


def seen(out: Path) -> dict[str, list[str]]:
    """Outcomes of the tests and requirements of a run, by name without parameters and by id."""
    found: dict[str, list[str]] = {}
    for file in sorted(out.glob("*.xml")):
        for case in ET.parse(file).getroot().iter("testcase"):
            name = str(case.get("name")).partition("[")[0]
            found.setdefault(name, []).append(_outcome(case))
    report = out / "conformance" / "report.json"
    if report.is_file():
        for row in json.loads(report.read_text(encoding="utf-8"))["rows"]:
            found.setdefault(row["id"], []).append(row["outcome"])
    return found


def _outcome(case: ET.Element) -> str:
    if (skipped := case.find("skipped")) is not None:
        return f"skipped, {skipped.get('message')}"
    return "pass" if case.find("failure") is None and case.find("error") is None else "fail"


def verdict(
    defect: Defect, found: Mapping[str, Sequence[str]], words: tuple[str, str] = GONE
) -> str:
    """Say whether a defect is confirmed to be gone: every test of it ran, and passed.

    `words` are for that, and for what a test has shown not to be so.
    """
    outcomes = [
        outcome
        for name in (*defect.tests, *defect.requirements)
        for outcome in found.get(name, ["not run"])
    ]
    if any(outcome in ("fail", "error") for outcome in outcomes):
        return words[1]
    ran = [outcome for outcome in outcomes if outcome == "pass"]
    rest = [outcome for outcome in outcomes if outcome != "pass"]
    if not ran:
        return f"not run: {rest[0].removeprefix('skipped, ')}"
    return f"{words[0]} ({len(ran)} cases{f', {len(rest)} not run' if rest else ''})"


def machine(device: str) -> dict[str, str]:
    """Name the accelerator, its driver, torch, Python and the day."""
    import torch

    module = torch.get_device_module(device)
    name = getattr(module, "get_device_name", lambda: device)()
    return {
        "accelerator": f"{torch.accelerator.device_count()} x {name}",
        "driver": _driver(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "day": datetime.now(timezone.utc).date().isoformat(),
    }


def _driver() -> str:
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(ask, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def page(
    facts: Mapping[str, str],
    ended: Sequence[Ended],
    defects: Mapping[str, str],
    tables: Mapping[str, str],
) -> str:
    """Write all of it as one page."""
    lines = ["# On an accelerator", "", *(f"- **{key}**: {fact}" for key, fact in facts.items())]
    lines += ["", "| part | outcome | seconds |", "| --- | --- | --- |"]
    lines += [f"| {each.name} | {each.outcome} | {each.seconds:.0f} |" for each in ended]
    lines += ["", "| defect | what it was | on this device |", "| --- | --- | --- |"]
    lines += [f"| {name} | {DEFECTS[name].what} | {defects[name]} |" for name in DEFECTS]
    lines += ["", "| simulated table | what it says | on this device |", "| --- | --- | --- |"]
    lines += [f"| {name} | {TABLES[name].what} | {tables[name]} |" for name in TABLES]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run everything; 0 if every part passed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--device", default="cuda", help="kind of accelerator, without an index")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="SECONDS")
    asked = parser.parse_args()
    import torch

    here = torch.accelerator.current_accelerator(check_available=True)
    if here is None or here.type != asked.device:
        there = "no accelerator" if here is None else here.type
        parser.error(f"{asked.device} asked for, but this machine has {there}: nothing was run")
    out = asked.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + asked.limit
    chosen = list(parts(asked.device, out))
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        beside = [part for part in chosen if not part.measures]
        ended = list(pool.map(lambda part: run(part, out, end), beside))
    ended += [run(part, out, end) for part in chosen if part.measures]
    found = seen(out)
    defects = {name: verdict(defect, found) for name, defect in DEFECTS.items()}
    facts = machine(asked.device)
    tables = {name: verdict(table, found, HELD) for name, table in TABLES.items()}
    told: dict[str, object] = {"machine": facts, "parts": [asdict(each) for each in ended]}
    told |= {"defects": defects, "tables": tables}
    (out / "gpu.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    text = page(facts, ended, defects, tables)
    (out / "gpu.md").write_text(text, encoding="utf-8")
    print(text)
    fine = all(each.outcome in ("passed", "nothing is marked") for each in ended)
    shown = {GONE[1], HELD[1]} & {*defects.values(), *tables.values()}
    return 0 if fine and not shown else 1


if __name__ == "__main__":
    sys.exit(main())
