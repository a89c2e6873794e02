"""How a checkpoint was cut comes back from JSON, and what is no such JSON is refused."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flat_param import Blocks, CheckpointError, ParamSpec, plan_layout
from flat_param.dcp._saved_layout import SavedSegment, decode, encode
from flat_param.layout._boundary import Boundary, PerParameter

DTYPES = (torch.float32, torch.bfloat16, torch.complex64, torch.int8, torch.bool)
FIELDS = {
    "dtype": "float32",
    "boundary": "row",
    "params": [{"names": ["w", "tied"], "shape": [3, 2], "stride": [1, 3]}],
}


@st.composite
def segments(draw: Any) -> SavedSegment:
    """Parameters of any shape and order in memory, some tied."""
    dtype, specs = draw(st.sampled_from(DTYPES)), []
    for index, shape in enumerate(
        draw(st.lists(st.lists(st.integers(0, 5), max_size=4), min_size=1, max_size=5))
    ):
        stride = tuple(draw(st.integers(0, 9)) for _ in shape)
        aliases = tuple(draw(st.lists(st.sampled_from(["tied", "\N{SNOWMAN}.x", ""]), max_size=2)))
        specs.append(ParamSpec(f"p{index}", tuple(shape), dtype, stride, aliases=aliases))
    boundary = draw(st.sampled_from(["element", "row", "tensor", Blocks(3), Blocks((2, 2))]))
    if draw(st.booleans()):
        each = st.sampled_from(["element", "row", Blocks(3)])
        boundary = PerParameter(tuple((spec.name, draw(each)) for spec in specs))
    return SavedSegment(plan_layout(specs), cast(Boundary, boundary))


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.lists(segments(), max_size=3))
def test_layout_comes_back_from_json(saved: list[SavedSegment]) -> None:
    """Names, shapes, strides, offsets, dtype and boundary; of no segments, none."""
    assert decode(json.loads(json.dumps(encode(saved)))) == tuple(saved)


def test_fields_are_these() -> None:
    """Checkpoints on disks have them."""
    spec = ParamSpec("w", (3, 2), torch.float32, (1, 3), aliases=("tied",))
    saved = [SavedSegment(plan_layout([spec]), "row")]
    assert encode(saved) == [FIELDS]
    assert decode([FIELDS]) == tuple(saved)
    for blocks, written in ((Blocks(32), 32), (Blocks((4, 2)), [4, 2])):
        assert encode([SavedSegment(plan_layout([spec]), blocks)])[0]["boundary"] == {
            "blocks": written
        }


def test_fields_of_a_later_version_are_passed_over() -> None:
    """What is not known here changes nothing."""
    later = {**FIELDS, "new": 1, "params": [{**FIELDS["params"][0], "new": None}]}  # type: ignore[dict-item]
    assert decode([later]) == decode([FIELDS])


REFUSED: tuple[tuple[tuple[Any, ...], Any, str], ...] = (
    ((), None, "TypeError"),
    ((), {}, "TypeError"),
    ((), "x", "TypeError"),
    ((), (FIELDS,), "TypeError"),
    ((0,), None, "TypeError"),
    ((0,), [], "TypeError"),
    ((0, "dtype"), 3, "TypeError"),
    ((0, "dtype"), None, "TypeError"),
    ((0, "dtype"), "nothing", "AttributeError"),
    ((0, "dtype"), "Tensor", "TypeError"),
    ((0, "dtype"), "inf", "TypeError"),
    ((0, "dtype"), "", "AttributeError"),
    ((0, "boundary"), "col", "LayoutError"),
    ((0, "boundary"), None, "TypeError"),
    ((0, "boundary"), ["row", "row"], "ValueError"),
    ((0, "boundary"), [["row"]], "TypeError"),
    ((0, "boundary"), {}, "KeyError"),
    ((0, "boundary"), {"blocks": 0}, "LayoutError"),
    ((0, "boundary"), {"blocks": []}, "LayoutError"),
    ((0, "boundary"), {"blocks": [2, "2"]}, "LayoutError"),
    ((0, "boundary"), {"blocks": "2"}, "TypeError"),
    ((0, "params"), [], "LayoutError"),
    ((0, "params"), {}, "TypeError"),
    ((0, "params"), "w", "TypeError"),
    ((0, "params", 0), 5, "TypeError"),
    ((0, "params", 0, "names"), [], "ValueError"),
    ((0, "params", 0, "names"), "w", "TypeError"),
    ((0, "params", 0, "names"), [3], "TypeError"),
    ((0, "params", 0, "names"), ["w", None], "TypeError"),
    ((0, "params", 0, "shape"), [3], "ValueError"),
    ((0, "params", 0, "shape"), [3, -2], "ValueError"),
    ((0, "params", 0, "shape"), [3, 2.0], "TypeError"),
    ((0, "params", 0, "shape"), [3, True], "TypeError"),
    ((0, "params", 0, "shape"), [3, "2"], "TypeError"),
    ((0, "params", 0, "shape"), None, "TypeError"),
    ((0, "params", 0, "stride"), [1, 3, 1], "ValueError"),
    ((0, "params", 0, "stride"), [-1, 3], "ValueError"),
    ((0, "params", 0, "stride"), [None, 3], "TypeError"),
)


@pytest.mark.parametrize(("at", "wrong", "kind"), REFUSED)
def test_anything_else_is_refused(at: tuple[Any, ...], wrong: Any, kind: str) -> None:
    """With the kind of error alone, since its words may be the file's."""
    fields: Any = {"": [deepcopy(FIELDS)]}
    owner, last = fields, ""
    for step in at:
        owner, last = owner[last], step
    owner[last] = wrong
    with pytest.raises(CheckpointError) as raised:
        decode(fields[""])
    assert str(raised.value) == (
        f"flat_param.load: the layout in the metadata cannot be read ({kind}), but it describes "
        "how the checkpoint is divided. It is damaged: load another one."
    )


@pytest.mark.parametrize("name", ["dtype", "boundary", "params"])
def test_missing_field_is_refused(name: str) -> None:
    """Nothing has a default."""
    with pytest.raises(CheckpointError, match=r"cannot be read \(KeyError\)"):
        decode([{key: value for key, value in FIELDS.items() if key != name}])
