"""Names of a checkpoint: where each belongs in the nested state dict, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest

from flat_param import CheckpointError
from flat_param.dcp._saved_keys import GROUPS, MODEL, STATE, nested_path


@pytest.mark.parametrize(
    ("key", "path"),
    [
        ("model.0.weight", ("model", "0.weight")),
        ("model.model.w", ("model", "model.w")),
        ("model.optim.state", ("model", "optim.state")),
        ("optim.state.0.weight.exp_avg", ("optim", "state", "0.weight", "exp_avg")),
        ("optim.state.w.step", ("optim", "state", "w", "step")),
        ("optim.param_groups.0.lr", ("optim", "param_groups", 0, "lr")),
        ("optim.param_groups.12.a.b", ("optim", "param_groups", 12, "a.b")),
        ("optim.param_groups.999999999.lr", ("optim", "param_groups", 999_999_999, "lr")),
    ],
)
def test_key_of_ours_has_a_place(key: str, path: tuple[Any, ...]) -> None:
    """A parameter's name keeps its dots, a state's name is the last word, groups have numbers."""
    assert nested_path(key) == path


@pytest.mark.parametrize("key", ["weight", "", "models.w", "model", "optim", "optim.lr", "epoch.3"])
def test_any_other_key_is_its_own_place(key: str) -> None:
    """As a bare state dict has them."""
    assert nested_path(key) == (key,)


@pytest.mark.parametrize(
    "key",
    [
        "optim.state.",
        "optim.state.weight",
        "optim.param_groups",
        "optim.param_groups.",
        "optim.param_groups.0",
        "optim.param_groups.0.",
        "optim.param_groups.x.lr",
        "optim.param_groups.-1.lr",
        "optim.param_groups.1 .lr",
        "optim.param_groups..lr",
        "optim.param_groups.\N{ARABIC-INDIC DIGIT THREE}.lr",
        "optim.param_groups.\N{SUPERSCRIPT TWO}.lr",
        "optim.param_groups.1234567890.lr",
        "optim.param_groups_of_another.0.lr",
    ],
)
def test_half_a_key_of_an_optimizer_is_refused(key: str) -> None:
    """With the forms that there are, and what to do."""
    with pytest.raises(CheckpointError) as raised:
        nested_path(key)
    assert str(raised.value) == (
        f"flat_param.load: the checkpoint has the key '{key}', but optimizer state is under "
        "'optim.state.<parameter>.<name>' and options under "
        "'optim.param_groups.<number>.<option>'. It is damaged or foreign: load another one."
    )


def test_long_key_is_cut_in_the_error() -> None:
    """A file cannot make a message of megabytes."""
    with pytest.raises(CheckpointError) as raised:
        nested_path(STATE + "x" * 1_000_000)
    assert len(str(raised.value)) < 400
    assert f"'{STATE}{'x' * (80 - len(STATE))}'" in str(raised.value)


def test_names_that_others_read_are_these() -> None:
    """Checkpoints on disks have them."""
    assert (MODEL, STATE, GROUPS) == ("model.", "optim.state.", "optim.param_groups")
