"""The benchmark at real size, run at toy size."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
LEAKED: list[torch.Tensor] = []


@pytest.fixture(scope="module")
def bench_real() -> Any:
    """Import the command."""
    sys.path.insert(0, str(ROOT))
    try:
        import benchmarks.real.__main__ as script
    finally:
        sys.path.remove(str(ROOT))
    yield script
    gc.unfreeze()


def run(script: Any, ways: str, folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Run the script once and return its status and its JSON."""
    out = folder / "out.json"
    arguments = ["--model", "toy", "--llama", "script", "--rounds", "1", "--json", str(out)]
    status = script.main([*arguments, "--ways", ways, *options])
    return status, json.loads(out.read_text())


def by_way(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the entries of the only run by name."""
    (only,) = result["runs"]
    return {entry["way"]: entry for entry in only["ways"]}


@pytest.fixture(scope="module")
def measured(
    bench_real: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, dict[str, Any]]:
    """Run some ways of each eager group, and one that cannot run."""
    ways = (
        "checkpoint_,torch SAC,sac_policies matmuls,sac_policies nothing kept,fit_ 75%,"
        "AdamW over parameters,fully_shard one rank,profile_flops,transformers"
    )
    return run(bench_real, ways, tmp_path_factory.mktemp("bench"))


def test_all_ways_run_with_the_gradients_of_plain(measured: Any) -> None:
    """Each way runs with plain's gradients, or reports why it cannot run."""
    status, result = measured
    found = by_way(result)
    assert status == 0
    assert found.pop("transformers")["error"].startswith("only transformers' own models")
    assert len(found) == 10  # including the first way of each group
    assert {name: entry["error"] for name, entry in found.items() if entry["error"]} == {}
    assert {entry["gradients"] for entry in found.values()} == {"equal"}


def test_checkpointed_ways_keep_less_than_plain(measured: Any) -> None:
    """Checkpointing lowers the kept memory and the peak."""
    found = by_way(measured[1])
    kept = {name: entry["kept_mib"] for name, entry in found.items() if not entry["error"]}
    peak = {name: entry["peak_mib"] for name, entry in found.items() if not entry["error"]}
    for name in ("checkpoint_", "sac_policies nothing kept"):
        assert kept[name] < kept["sac_policies matmuls"] < kept["plain"]
        assert peak[name] < peak["sac_policies matmuls"] < peak["plain"]
    assert kept["torch SAC"] < kept["plain"]
    assert peak["fit_ 75%"] <= 0.75 * peak["plain"]


def test_peak_counts_parameters_gradients_and_state(measured: Any) -> None:
    """The peak includes more than activations."""
    (run,) = measured[1]["runs"]
    found, parameters = by_way(measured[1]), 4 * run["parameters"] / 2**20
    assert found["checkpoint_"]["peak_mib"] > 2 * parameters
    assert found["plain"]["peak_mib"] > found["plain"]["kept_mib"] + parameters
    state = found["AdamW over parameters"]["peak_mib"] - found["plain"]["peak_mib"]
    assert state == pytest.approx(2 * parameters, rel=0.05)


def test_json_has_what_the_table_shows(bench_real: Any, measured: Any) -> None:
    """Every number in the table is in the JSON."""
    _, result = measured
    report = bench_real.report(result)
    lines = {line.split("|")[1].strip(): line for line in report.splitlines() if "|" in line}
    for name, entry in by_way(result).items():
        if entry["error"]:
            assert entry["error"] in lines[name]
            continue
        cells = [cell.strip().replace(",", "") for cell in lines[name].split("|")[2:9]]
        shown = ("ms", "ms_over", "tokens_per_second", "peak_mib", "peak_over", "kept_mib")
        assert [float(cell) for cell in cells[:6]] == [entry[key] for key in shown]
        assert cells[6] == entry["gradients"]
    assert result["command"].startswith("python -m benchmarks.real --model toy --llama script")
    for text in (result["date"], result["device"], result["command"], torch.__version__):
        assert text in report


def test_wrong_gradients_and_leaks_are_reported(
    bench_real: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A way that is wrong, leaks or raises is reported; the others continue."""
    ways = sys.modules["benchmarks.real.ways"]
    monkeypatch.setattr(ways, "WAYS", ways.WAYS[:1])

    @ways.way("wrong")
    def wrong(case: Any) -> None:
        case.layers[0].register_full_backward_pre_hook(lambda _, found: (found[0] * 1.5,))

    @ways.way("leaking")
    def leaking(case: Any) -> None:
        LEAKED.append(torch.zeros(1 << 18))  # 1 MiB

    @ways.way("failing")
    def failing(case: Any) -> None:
        raise ValueError("does not work here\nfor reasons")

    status, result = run(bench_real, "*", tmp_path)
    LEAKED.clear()
    found = by_way(result)
    assert status == 1
    assert found["wrong"]["gradients"] == "off"
    assert found["wrong"]["gradients_off"] > 0
    assert found["leaking"]["gradients"] == found["plain"]["gradients"] == "equal"
    assert found["leaking"]["leaked_mib"] == pytest.approx(1, abs=0.01)
    assert abs(found["plain"]["leaked_mib"]) < 0.01
    assert found["failing"]["error"] == "ValueError: does not work here"
    printed = capsys.readouterr().out
    assert "leaks 1.0 MiB" in printed
    assert "cannot run: ValueError: does not work here" in printed


def test_pattern_that_matches_nothing_is_an_error(bench_real: Any) -> None:
    """A misspelt way is reported by name."""
    with pytest.raises(SystemExit, match="no way or group matches 'chekpoint_'"):
        bench_real.main(["--model", "toy", "--ways", "chekpoint_"])
