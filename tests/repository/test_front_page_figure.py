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


@pytest.mark.nightly
def test_front_page_runs_at_toy_size(tools: Any, tmp_path: Path) -> None:
    """Gradients equal plain's, and peaks have the expected order."""
    script, _ = tools
    status, result, figure = measure(script, tmp_path, "--llama", "script")
    assert status == 0
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
