"""The place of what is traced: the path of its module, and the labels of spans."""

from __future__ import annotations

import pytest
import torch

from sac_policies._torch_compat import annotated, node_meta, place_of, running_modules


def test_a_place_is_a_path_and_the_labels_of_spans() -> None:
    """Of which there may be none."""
    assert place_of("a.b", []) == "a.b"
    assert place_of("a.b", ["s", "t"]) == "a.b | s.t"
    assert place_of("", ["s"]) == " | s"


@pytest.mark.skipif(
    not hasattr(torch.fx.traceback, "annotate"), reason="torch.fx has no annotations before 2.10"
)
def test_traced_code_knows_its_spans_while_they_run() -> None:
    """Inside one another, and none afterwards; annotations of others are none."""
    with torch.fx.traceback.annotate({"other": 1}):
        assert running_modules() == ""
        with annotated("outer"), annotated("inner"):
            assert running_modules() == " | outer.inner"
        assert running_modules() == ""
    node_meta()["nn_module_stack"] = {"at": ("L.block.up", torch.nn.Linear)}
    try:
        with annotated("act"):
            assert running_modules() == "L.block.up | act"
    finally:
        del node_meta()["nn_module_stack"]


def test_a_torch_without_annotations_finds_no_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """And runs on."""
    monkeypatch.delattr(torch.fx.traceback, "annotate", raising=False)
    with annotated("act"):
        assert running_modules() == ""
