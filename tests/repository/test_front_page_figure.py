"""The figure of the front page: measured at toy size, drawn without overlapping labels."""

from __future__ import annotations

import gc
import itertools
import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
OURS = {"checkpoint_", "checkpoint_layers_ every=2", "sac_policies matmuls", "fit_ smallest"}


@pytest.fixture(scope="module")
def tools() -> Iterator[Any]:
    """Import the command and the figure."""
    sys.path.insert(0, str(ROOT))
    try:
        import benchmarks.real.__main__ as command
        from benchmarks.real import figure
    finally:
        sys.path.remove(str(ROOT))
    yield command, figure
    gc.unfreeze()


def measure(script: Any, folder: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    """Run the script once; return its status, its JSON and its figure."""
    out, figure = folder / "out.json", folder / "out.svg"
    arguments = ["--front-page", "--toy", "--json", str(out), "--figure", str(figure)]
    status = script.main([*arguments, *options])
    return status, json.loads(out.read_text()), figure.read_text()


def copied_pages(folder: Path) -> Path:
    """Return a folder with the pages that have measured tables."""
    (folder / "docs/assets").mkdir(parents=True)
    for name in ("README.md", "docs/benchmarks.md"):
        (folder / name).write_text((ROOT / name).read_text())
    return folder


ROW = {"group": "eager", "error": None, "note": "", "ms_over": 1.0, "tokens_per_second": 9000}
ROW |= {"peak_over": 1.0, "kept_mib": 1.0, "leaks": False, "gradients_off": None}
RESULT: dict[str, Any] = {
    "date": "2026-01-02T03:04:05",
    "device": "NVIDIA X",
    "python": "3.13.0",
    "libraries": {"torch": "2.99", "transformers": None},
    "command": "python -m benchmarks.real --front-page --pages",
    "runs": [
        {
            "model": "1b-128k",
            "parameters": 1_240_000_000,
            "dtype": "bfloat16",
            "sequences": 1,
            "tokens_each": 4096,
            "ways": [
                ROW | {"way": "plain", "ms": 100.4, "peak_mib": 1234.5, "gradients": "equal"},
                ROW | {"way": "checkpoint_", "ms": 130.0, "peak_mib": 2000.0, "gradients": "off"},
                ROW | {"way": "torch SAC", "error": "it cannot"},
            ],
        }
    ],
}


def test_results_replace_what_the_pages_said_before(tools: Any, tmp_path: Path) -> None:
    """Between the marks only; rows that could not run are left out of the README."""
    pages = sys.modules["benchmarks.real.pages"]
    copy = copied_pages(tmp_path)
    for _ in range(2):  # the marks are still there
        pages.write_pages(RESULT, copy)
    front, page = (copy / "README.md").read_text(), (copy / "docs/benchmarks.md").read_text()
    assert "| a whole training step of a Llama of 1.2B, NVIDIA X | peak memory" in front
    table = front.partition("|---|---|---|\n")[2].partition("\n\n")[0]
    assert table.splitlines() == [
        "| `checkpoint_` on each layer | 2,000 | 130 |",
        "| plain | 1,234 | 100 |",
    ]
    assert "Gradients differ from the plain model's: `checkpoint_` on each layer." in front
    assert "bfloat16, 1 x 4,096 tokens, AdamW, torch 2.99, 2026-01-02;" in front
    assert "cannot run: it cannot" in page
    for text, name in ((front, "README.md"), (page, "docs/benchmarks.md")):
        before = (ROOT / name).read_text()
        assert text.partition(pages.BEGIN)[0] == before.partition(pages.BEGIN)[0]
        assert text.partition(pages.END)[2] == before.partition(pages.END)[2]


def test_pages_without_marks_are_refused_before_anything_is_measured(
    tools: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong folder, toy results for this checkout, and another run than the front page's."""
    for arguments, said in (
        (["--front-page", "--toy", "--pages", str(tmp_path)], "README.md lacks the marks"),
        (["--front-page", "--toy", "--pages"], "give --pages a copy"),
        (["--model", "toy", "--pages", str(tmp_path)], "results of --front-page without --moe"),
    ):
        with pytest.raises(SystemExit):
            tools[0].main(arguments)
        assert said in capsys.readouterr().err


@pytest.mark.nightly
def test_front_page_runs_at_toy_size(tools: Any, tmp_path: Path) -> None:
    """Gradients equal plain's, and peaks have the expected order."""
    script, _ = tools
    copy = copied_pages(tmp_path)
    status, result, figure = measure(script, tmp_path, "--llama", "script", "--pages", str(copy))
    assert status == 0
    assert (copy / "docs/assets/time-against-memory.svg").read_text() == figure
    assert f", {result['device']} |" in (copy / "README.md").read_text()
    vocabulary, layers = (
        {entry["way"]: entry for entry in run["ways"] if not entry["error"]}
        for run in result["runs"]
    )
    drawn = [*vocabulary, *layers]
    sliced = vocabulary.pop("checkpoint_ and in_slices"), layers.pop("checkpoint_ and in_slices")
    fitted = vocabulary.pop("fit_ 75% and in_slices")
    for loss in ("TRL", "Liger"):  # they add in another order; run where they are installed
        vocabulary.pop(f"checkpoint_ and {loss} loss", None)
    assert fitted["peak_mib"] < vocabulary["checkpoint_"]["peak_mib"]
    assert max(entry["gradients_off"] or 0 for entry in sliced) < 1e-6
    for found in (vocabulary, layers):
        assert {entry["gradients"] for entry in found.values()} == {"equal"}
        peak = {name: entry["peak_mib"] for name, entry in found.items()}
        assert peak["checkpoint_"] < peak["checkpoint_layers_ every=2"] < peak["plain"]
        assert peak["fit_ smallest"] <= 1.01 * min(peak.values())
        assert set(found) > OURS
    assert layers["fit_ 75%"]["peak_mib"] <= 0.75 * layers["plain"]["peak_mib"]
    peak = layers["checkpoint_"]["peak_mib"]
    assert peak < layers["sac_policies matmuls"]["peak_mib"] < layers["plain"]["peak_mib"]
    # With a large vocabulary, logits and loss decide the peak; slices have a 16th of them.
    assert sliced[0]["peak_mib"] < 0.7 * vocabulary["checkpoint_"]["peak_mib"]
    labels = re.findall(r'class="label"[^>]*>([^<]*)<', figure)
    assert labels == drawn
    assert result["date"][:10] in figure
    assert result["device"] in figure


@pytest.mark.slow
def test_experts_are_chosen_once_at_toy_size(tools: Any, tmp_path: Path) -> None:
    """With router noise, ordinary checkpoints get other gradients; ours do not."""
    pytest.importorskip("transformers", exc_type=ImportError)
    status, result, _ = measure(tools[0], tmp_path, "--moe")
    (run,) = result["runs"]
    found = {entry["way"]: entry for entry in run["ways"]}
    assert status == 0
    for name in ("plain", "sac_policies matmuls", "sac_policies nothing kept"):
        assert found[name]["gradients"] == "equal"
    assert found["sac_policies nothing kept"]["peak_mib"] < 0.8 * found["plain"]["peak_mib"]
    for name in ("transformers", "torch SAC"):  # raises, or has wrong gradients
        assert found[name]["error"] or found[name]["gradients_off"] > 1e-4


def test_parameters_keep_their_bits_under_the_shared_optimizer(tools: Any) -> None:
    """All ways start from the same parameters, also after other ways."""
    import torch

    script, _ = tools
    job = sys.modules["benchmarks.real.jobs"].front_page(toy=True, moe=False)[1]
    subject = script.build_subject(job.shape, "script", (1, 16), torch.device("cpu"))
    before = [parameter.detach().clone() for parameter in subject.model.parameters()]
    parameters = subject.nbytes
    for _ in range(3):
        subject.case().step()
    assert all(map(torch.equal, subject.model.parameters(), before))
    assert subject.nbytes == pytest.approx(3 * parameters, rel=0.01)


@pytest.mark.parametrize("spread", [1.0, 0.1, 0.0])
def test_labels_do_not_overlap(tools: Any, spread: float) -> None:
    """Twenty labels find room, also if all points coincide."""
    _, drawing = tools
    room, rng = drawing.Box(70, 34, 836, 408), random.Random(0)
    marks = [(400 + spread * rng.uniform(-300, 400), 200 + spread * rng.uniform(-150, 200))]
    marks += [
        (400 + spread * rng.uniform(-300, 400), 200 + spread * rng.uniform(-150, 200))
        for _ in range(19)
    ]
    labels = [f"transformers every_n_layers={n}" for n in range(20)]
    boxes = drawing.place_labels(marks, labels, room)
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    assert all(box.is_inside(room) for box in boxes)


def test_too_many_labels_are_an_error(tools: Any) -> None:
    """Labels are never drawn over each other."""
    _, drawing = tools
    with pytest.raises(ValueError, match="no room is left"):
        drawing.place_labels([(20, 20)] * 3, ["a long label"] * 3, drawing.Box(0, 0, 100, 40))
