"""Rows of the tables are tried on sizes that tell kernels apart."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sac_policies.engines.recipe.tables._probes import ROWS, WIDE, WIDTH, matrix, of_one

SIN = torch.ops.aten.sin.default


@pytest.mark.parametrize("lanes", [2, 4, 8, 16, 32, 64])
def test_one_width_fills_vectors_and_one_does_not(lanes: int) -> None:
    """Kernels take the rest of a row another way; both are longer than any vector."""
    assert WIDE % lanes == 0
    assert WIDTH % lanes != 0
    assert min(WIDTH, WIDE) > lanes


def test_matrix_is_a_leaf_of_rows() -> None:
    """Made as the caller makes leaves."""
    asked: list[tuple[int, ...]] = []

    def make(*shape: int) -> torch.Tensor:
        asked.append(shape)
        return torch.ones(shape)

    assert matrix(make).shape == (ROWS, WIDTH)
    assert asked == [(ROWS, WIDTH)]


def test_row_of_one_operand_takes_it_at_the_first_edge() -> None:
    """Its function is given the node and the operand, and held against torch's operator."""
    nodes: list[str] = []

    def again(node: object, x: torch.Tensor) -> torch.Tensor:
        nodes.append(type(node).__name__)
        return x.sin()

    rule = of_one("SinBackward0", SIN, again, lambda make: matrix(make).sin())
    assert rule.works_through(torch.float32, "cpu")
    assert nodes == ["SinBackward0"]
    assert not rule.ready(torch.ones(1, requires_grad=True).sin().grad_fn)


def test_row_is_tried_on_each_of_its_probes() -> None:
    """One that fails is enough."""
    right, wrong = (lambda make: matrix(make).sin()), (lambda make: matrix(make).cos())
    rule = of_one("SinBackward0", SIN, lambda n, x: x.sin(), right, wrong)
    assert not rule.works_through(torch.float32, "cpu")
    assert dataclasses.replace(rule, edge_probes=(right,)).works_through(torch.float32, "cpu")


def test_row_may_say_more_of_its_nodes() -> None:
    """What else a rule has is given by name."""
    rule = of_one("SinBackward0", SIN, lambda n, x: x, keeps_result=True, unfit=str)
    assert rule.keeps_result
    assert rule.unfit is str
