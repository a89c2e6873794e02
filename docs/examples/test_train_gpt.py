"""The demo refuses what it cannot do, measures what it says, and keeps what it has finished."""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest

TINY = shlex.split("--layers 2 --width 24 --heads 2 --context 16 --batch 4 --steps 5")


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    """Import the script without running it."""
    spec = importlib.util.spec_from_file_location(
        "train_gpt", Path(__file__).parent / "train_gpt.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_gpt"] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--config", "plian"], "--config 'plian' is unknown. The configurations are 'plain', "),
        (["--data", "nowhere.txt"], "--data nowhere.txt does not exist, but it must name a file"),
        (["--layers", "0"], "--layers is 0, but it must be at least 1."),
        (["--steps", "3"], "--steps is 3, but 4 are needed to measure and to time."),
        (["--width", "50"], "--width 50 is not a multiple of --heads 6."),
        (["--dropout", "1"], "--dropout is 1.0, but it must be in [0, 1)."),
        (["--batch", "3"], "--batch is 3, but two ranks need an even number."),
        (["--device", "tpu"], "--device 'tpu' is unknown. Give cpu or cuda."),
    ],
)
def test_bad_options_are_refused_in_one_line(demo, tmp_path, capsys, arguments, sentence):
    """A wrong option ends with exit code 2 and one line, before anything is written."""
    with pytest.raises(SystemExit) as stop:
        demo.main([*arguments, "--out", str(tmp_path / "out")])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("train_gpt: ")
    assert sentence in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_empty_text_is_refused(demo, tmp_path, capsys):
    """An empty file is refused with the number of bytes that are needed."""
    (tmp_path / "empty.txt").touch()
    with pytest.raises(SystemExit):
        demo.main(["--data", str(tmp_path / "empty.txt"), "--out", str(tmp_path / "out")])
    assert "gives 0 bytes of training text, but one sample needs 130" in capsys.readouterr().err


def test_checkpointed_run_is_plain_to_the_last_bit(demo, tmp_path, capsys):
    """With dropout on, every loss is equal, and exactly the bytes of theory are freed."""
    demo.main([*TINY, "--config", "plain", "checkpointed", "--out", str(tmp_path)])
    plain, checkpointed = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert plain["losses"] == checkpointed["losses"]
    assert checkpointed["bit_identical"]
    assert len(set(plain["losses"])) == 5
    freed = plain["saved_bytes"] - checkpointed["saved_bytes"]
    said = capsys.readouterr().out
    assert f"should free {freed:,} bytes of saved activations; measured: {freed:,}" in said
    assert freed > 0


def test_every_configuration_trains_as_plain_does(demo, tmp_path):
    """No part changes a loss, and every one that is there for memory keeps less than plain."""
    demo.main([*TINY, "--out", str(tmp_path)])
    plain, *others = json.loads((tmp_path / "table.json").read_text())["rows"]
    sharded = others.pop()
    assert sharded["configuration"] == "sharded x2"
    assert sharded["peak_bytes"] < plain["peak_bytes"]
    assert abs(sharded["training_loss"] - plain["training_loss"]) < 0.1
    for row in others:
        assert row["losses"] == plain["losses"], row["configuration"]
        if not row["configuration"].startswith("flat"):
            assert row["saved_bytes"] < plain["saved_bytes"], row["configuration"]


def test_interrupt_keeps_finished_rows(demo, tmp_path, capsys, monkeypatch):
    """Ctrl-C in the second configuration leaves the first one's row on disk."""
    train = demo.train

    def interrupted(name, *rest):
        if name != "plain":
            raise KeyboardInterrupt
        return train(name, *rest)

    monkeypatch.setattr(demo, "train", interrupted)
    with pytest.raises(SystemExit) as stop:
        demo.main([*TINY, "--config", "plain", "checkpointed", "--out", str(tmp_path)])
    assert stop.value.code == 130
    rows = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert [row["configuration"] for row in rows] == ["plain"]
    assert "the rows finished so far are on disk" in capsys.readouterr().err


def test_own_text_is_split_by_file(demo, tmp_path):
    """Every tenth file of a folder is kept for validation."""
    for i in range(10):
        (tmp_path / f"{i}.txt").write_bytes(bytes([65 + i]) * 20)
    text = demo.read_text(tmp_path, context=8)
    assert set(text.validation.tolist()) == {74}
    assert set(text.train.tolist()) == set(range(65, 74))
