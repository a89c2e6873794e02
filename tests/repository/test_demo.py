"""The demo: refused options, measurements, and comparison in turns."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parents[2] / "docs/examples"
MODEL = {"layers": 2, "width": 24, "heads": 2, "context": 16, "batch": 4}
SMALL = [f"--{name}={value}" for name, value in MODEL.items()]
TINY = [*SMALL, "--steps", "6"]


@pytest.fixture
def demo(monkeypatch) -> ModuleType:
    """Import the comparing script without running it."""
    monkeypatch.syspath_prepend(str(HERE))
    return importlib.import_module("compare_gpt")


def _rows(folder: Path) -> list[dict]:
    return json.loads((folder / "table.json").read_text())["rows"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--config", "plian"], "--config 'plian' is unknown. The configurations are 'plain', "),
        (["--data", "nowhere.txt"], "--data nowhere.txt does not exist, but it must name a file"),
        (["--layers", "0"], "--layers is 0, but it must be at least 1."),
        (["--steps", "4"], "--steps is 4, but 5 are needed to measure and to time."),
        (["--width", "50"], "--width 50 is not a multiple of --heads 6."),
        (["--dropout", "1"], "--dropout is 1.0, but it must be in [0, 1)."),
        (["--batch", "3"], "--batch is 3, but two ranks need an even number."),
        (["--device", "tpu"], "--device 'tpu' is unknown. Give cpu or cuda."),
    ],
)
def test_bad_options_are_refused_in_one_line(demo, tmp_path, capsys, arguments, sentence):
    """A wrong option exits with code 2 and one line, before any file is written."""
    with pytest.raises(SystemExit) as stop:
        demo.main([*arguments, "--out", str(tmp_path / "out")])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("compare_gpt: ")
    assert sentence in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_empty_text_is_refused(demo, tmp_path, capsys):
    """An empty file is refused; the message has the number of bytes needed."""
    (tmp_path / "empty.txt").touch()
    with pytest.raises(SystemExit):
        demo.main(["--data", str(tmp_path / "empty.txt"), "--out", str(tmp_path / "out")])
    assert "gives 0 bytes of text, but a context of 128 needs 520" in capsys.readouterr().err


def test_checkpointed_run_is_plain_to_the_last_bit(demo, tmp_path, capsys):
    """With dropout and steps in turns, losses are equal and the predicted bytes are freed."""
    demo.main([*TINY, "--config", "plain", "checkpointed", "--out", str(tmp_path)])
    plain, checkpointed = _rows(tmp_path)
    assert plain["losses"] == checkpointed["losses"]
    assert len(set(plain["losses"])) == 6
    freed = plain["saved_bytes"] - checkpointed["saved_bytes"]
    said = capsys.readouterr().out
    shown = f"{freed / 2**20:.2f} MiB"
    assert f"should free {shown} of saved activations; measured: {shown}, which is +0 bytes" in said
    assert freed > 0


@pytest.mark.nightly
def test_every_configuration_trains_as_plain_does(demo, tmp_path):
    """No part changes a loss, and every memory-saving configuration keeps less than plain."""
    demo.main([*TINY, "--out", str(tmp_path)])
    rows = {row["configuration"]: row for row in _rows(tmp_path)}
    assert list(rows) == list(demo.ALL)
    plain = rows["plain"]
    sharded = [rows.pop(name) for name in list(rows) if name in demo.ON_TWO_RANKS]
    for row in sharded:
        assert row["peak_bytes"] < plain["peak_bytes"]
        assert abs(row["losses"][-1] - plain["losses"][-1]) < 0.1
    (whole,) = sharded[1:]
    assert whole["losses"] == sharded[0]["losses"]
    for name in rows.keys() - {"plain"}:
        assert rows[name]["losses"] == plain["losses"], name
        if not name.startswith("flat"):
            assert rows[name]["saved_bytes"] < plain["saved_bytes"], name
    # A custom operator is freed like torch's; two moments of AdamW are in files.
    assert rows["own_operator"]["saved_bytes"] == rows["save_matmuls"]["saved_bytes"]
    away = rows["flat"]["peak_bytes"] - rows["flat_state_in_files"]["peak_bytes"]
    assert away > 1.9 * sum(p.nbytes for p in demo.GPT(demo.Config(**MODEL)).parameters())


def test_end_of_the_demo_says_who_holds_memory(demo, tmp_path, capsys):
    """A page of `watch_memory` in a file, and its sums on the screen."""
    demo.main([*TINY, "--config", "plain", "--out", str(tmp_path)])
    said = capsys.readouterr().out
    assert (tmp_path / "memory.txt").read_text().startswith("Who holds the memory: ")
    kinds = said.partition("forward and backward of a plain step:\n")[2].partition("\n")[0]
    assert {"saved", "optimizer", "parameters"} <= {word.split()[0] for word in kinds.split(", ")}
    assert "saved for backward inside: GPT " in said


def test_fitted_row_and_plots_are_there(demo, tmp_path, monkeypatch):
    """`fit_` takes less than plain; plots have titles, MiB, and the budget."""
    figure = pytest.importorskip("matplotlib.figure").Figure
    drawn = []

    def kept(self, *args, **kwargs):
        drawn.append(self)

    monkeypatch.setattr(figure, "savefig", kept)
    demo.main([*TINY, "--config", "plain", "fitted", "--out", str(tmp_path)])
    plain, fitted = _rows(tmp_path)
    assert fitted["losses"] == plain["losses"]
    assert fitted["peak_bytes"] < plain["peak_bytes"]
    costs, front = (each.axes[0] for each in drawn)
    assert "what each way costs" in costs.get_title() and "MiB" in costs.get_ylabel()
    assert "What memory buys" in front.get_title() and "MiB" in front.get_xlabel()
    (label,) = front.get_legend().get_texts()
    assert label.get_text().startswith("chosen: ") and label.get_text().endswith(" MiB")


def test_times_are_compared_within_a_turn(demo):
    """A machine that slows down halfway changes no ratio."""
    plain = demo.Row("plain", 0, 0, [1.0, 1.0, 1.0, 1.0, 9.0, 9.0], [], 0.0)
    other = demo.Row("other", 0, 0, [5.0, 5.0, 2.0, 2.0, 18.0, 18.0], [], 0.0)
    shown = importlib.import_module("compare_shown")
    assert shown.times_plain(other, [plain, other]) == (2.0, 2.0, 2.0)


def test_interrupt_keeps_finished_turns(demo, tmp_path, capsys, monkeypatch):
    """Ctrl-C in the third turn leaves two turns of both configurations on disk."""
    step = demo.Trainer.step

    def interrupted(self):
        if len(self.row.losses) == 2:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(demo.Trainer, "step", interrupted)
    with pytest.raises(SystemExit) as stop:
        demo.main([*TINY, "--config", "plain", "checkpointed", "--out", str(tmp_path)])
    assert stop.value.code == 130
    assert [len(row["losses"]) for row in _rows(tmp_path)] == [2, 2]
    assert "the turns finished so far are on disk" in capsys.readouterr().err


@pytest.mark.nightly
def test_short_script_trains_alone_and_on_two_ranks(tmp_path):
    """The script runs by the commands in its docstring, and stays short."""
    script = str(HERE / "train_gpt.py")
    options = [*SMALL, "--steps", "3"]
    torchrun = [*["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"], script]
    for command in ([script], [*torchrun, "--config", "sharded"]):
        done = subprocess.run(
            [sys.executable, *command, *options], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("loss ") == 3
    assert len(Path(script).read_text(encoding="utf-8").splitlines()) < 200
