"""Replay rules: each gives torch's own bits, or is not used."""

from __future__ import annotations

import dataclasses
import threading
from types import SimpleNamespace

import pytest
import torch

from sac_policies.engines.recipe import _replay
from sac_policies.engines.recipe.tables._replay_table import RULES


def test_rule_with_other_bits_is_not_used() -> None:
    """A rule that is off by one rounding fails its own check."""
    silu = RULES["SiluBackward0"]
    off = dataclasses.replace(silu, rebuild=lambda node: silu.rebuild(node) * (1 + 2**-23))
    assert silu.works(torch.float32, "cpu")
    assert not off.works(torch.float32, "cpu")


def test_rule_with_other_layout_is_not_used() -> None:
    """A rule whose output has other strides fails its own check, equal values or not."""
    silu = RULES["SiluBackward0"]
    turned = dataclasses.replace(silu, rebuild=lambda node: silu.rebuild(node).t().contiguous().t())
    assert not turned.works(torch.float32, "cpu")


def test_rule_with_missing_attribute_is_not_used() -> None:
    """A rule that reads what this torch's node does not have is dropped, not raised."""
    silu = RULES["SiluBackward0"]
    missing = dataclasses.replace(silu, rebuild=lambda node: node._saved_not_there)
    assert not missing.works(torch.float32, "cpu")


def test_rule_for_another_node_is_not_used() -> None:
    """A rule whose probe makes another node than it is for is dropped."""
    other = dataclasses.replace(RULES["SiluBackward0"], node="SeluBackward0")
    assert not other.works(torch.float32, "cpu")


def test_rule_that_gives_other_bits_through_edges_is_not_used() -> None:
    """It is held against torch's operator before it is used."""
    import dataclasses

    rule = RULES["AddBackward0"]
    assert rule.works_through(torch.float32, "cpu")
    off = dataclasses.replace(rule, through=lambda n, a, b: (a + b) * (1 + 2**-23))
    assert not off.works_through(torch.float32, "cpu")


def test_rule_is_tried_to_the_end_before_it_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that tries it comes to its verdict once it is waited for, and no sooner."""
    waited_for = threading.Event()

    class Waiting(threading.Thread):
        def join(self, timeout: float | None = None) -> None:
            waited_for.set()
            super().join(timeout)

    def tried(*_: object) -> str:
        assert waited_for.wait(30)
        return "its verdict"

    monkeypatch.setattr(_replay, "threading", SimpleNamespace(Thread=Waiting))
    monkeypatch.setattr(_replay, "_tried", tried)
    rule = dataclasses.replace(RULES["SiluBackward0"], node="OfThisTest")
    try:
        assert rule.why_off(torch.float32, "cpu") == "its verdict"
    finally:
        waited_for.set()
