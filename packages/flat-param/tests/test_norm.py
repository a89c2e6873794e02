"""Norms of long vectors, and of several as one."""

import pytest
import torch
from torch import nn

from flat_param import flatten
from flat_param.in_process._norm import _BLOCK, joint_norm


def test_norm_of_many_elements_is_accurate():
    """Ten million squares in one float32 sum would be off by 3e-4."""
    layer = nn.Linear(1 << 12, 1 << 10, bias=False)
    true = layer.weight.detach().double().norm().float()
    torch.testing.assert_close(flatten(layer).norm(), true, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_none_is_zero_without_dimensions(dtype):
    """The result is a 0-dim zero for no vector, and for one or several empty ones."""
    empty = torch.zeros(0, dtype=dtype)
    for vectors in ([], [empty], [empty, empty]):
        norm = joint_norm(vectors, 2.0)
        assert (norm.shape, norm.item()) == ((), 0.0)


@pytest.mark.parametrize("ord", [0.0, 0.5, 1.0, 2.0, 3.0, float("inf"), -float("inf")])
def test_several_vectors_have_the_norm_of_their_concatenation(ord):
    """For every order that torch knows, of vectors with zeros in them."""
    vectors = [torch.randn(7), torch.tensor([0.0, 2.0, -3.0]), torch.randn(1)]
    expected = torch.linalg.vector_norm(torch.cat(vectors), ord)
    torch.testing.assert_close(joint_norm(vectors, ord), expected)


@pytest.mark.parametrize("ord", [0.0, 1.0, 2.0, float("inf"), -float("inf"), -1.0])
@pytest.mark.parametrize("rest", [-1, 0, 1])
def test_a_vector_of_whole_blocks_has_the_norm_of_any_other(ord, rest):
    """Around the length at which blocks begin, with nothing left over too."""
    vector = torch.rand(4 * _BLOCK + rest) + 0.5
    vector[0], vector[-1] = 1000.0, 2000.0
    expected = torch.linalg.vector_norm(vector.double(), ord).float()
    torch.testing.assert_close(joint_norm([vector], ord), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("ord", [0.0, 2.0, float("inf"), -float("inf"), -1.0])
def test_an_empty_vector_changes_no_norm(ord):
    """Neither alone nor beside another does it raise."""
    vector = torch.tensor([3.0, -4.0])
    expected = torch.linalg.vector_norm(vector, ord)
    assert torch.equal(joint_norm([vector, torch.zeros(0)], ord), expected)
    assert joint_norm([torch.zeros(0)], ord) == 0


def test_the_largest_gradient_of_a_whole_number_of_blocks_is_clipped():
    """A layer of 512 by 512 is clipped by its largest element, as torch clips it."""
    layer = nn.Linear(512, 512, bias=False)
    flat = flatten(layer)
    layer(torch.ones(1, 512)).sum().backward()
    assert flat.clip_(0.5, ord=float("inf")) == 1
    assert layer.weight.grad.max() < 0.5001


def test_norms_of_two_dtypes_are_joined_in_float32():
    """A bfloat16 vector beside a float32 one does not round their norm to 8 bits."""
    vectors = [torch.tensor([300.0], dtype=torch.bfloat16), torch.tensor([1.001])]
    expected = torch.linalg.vector_norm(torch.cat([vector.float() for vector in vectors]), 1.0)
    norm = joint_norm(vectors, 1.0)
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm, expected)


def test_complex_vectors_have_a_real_norm():
    """Beside real ones, and in blocks."""
    wide = torch.full((4 * _BLOCK,), 3 + 4j)
    norm = joint_norm([wide, torch.tensor([1.0])], float("inf"))
    assert (norm.dtype, norm.item()) == (torch.float32, 5.0)
