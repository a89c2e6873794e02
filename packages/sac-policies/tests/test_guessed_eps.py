"""Layer norm is replayed as one operator where its eps can be guessed, and right where not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from sac_policies import MATMULS, MutationError, save_ops
from sac_policies.engines.recipe import _proof
from sac_policies.engines.recipe._proof import proof_of
from sac_policies.engines.recipe._rebuilt import rebuilt
from sac_policies.engines.recipe._shared_values import SharedValue
from sac_policies.engines.recipe.tables._guessed_eps import EpsGuess, from_statistics
from sac_policies.engines.recipe.tables._replay_table import RULES

from ._recipe import Counts, is_plain, leaf, run

ROWS, WIDTH = 5, 12


@pytest.fixture
def guess(monkeypatch: pytest.MonkeyPatch) -> EpsGuess:
    """The rule's, which knows of no norm yet."""
    found: Any = RULES["NativeLayerNormBackward0"].guess
    monkeypatch.setattr(found, "_eps", {})
    return found


def _norm(eps: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x, weight, bias = (leaf(*shape).to(dtype) for shape in ((ROWS, WIDTH), (WIDTH,), (WIDTH,)))
    return F.layer_norm(x, (WIDTH,), weight, bias, eps)


def _rebuilt(made: torch.Tensor) -> torch.Tensor:
    cell = SharedValue()
    cell.proof = proof_of(made)
    with torch.no_grad():
        return rebuilt(made.grad_fn, cell, AssertionError)


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 1e-12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_usual_eps_is_found_and_the_operator_called(
    guess: EpsGuess, eps: float, dtype: torch.dtype
) -> None:
    """It gives the output's bits and layout, the first time and later."""
    made = _norm(eps, dtype)
    for _ in range(2):
        found = guess(made.grad_fn)
        assert found is not None
        assert torch.equal(found, made)
        assert found.stride() == made.stride()
        assert torch.equal(_rebuilt(made), made)


def test_replay_is_one_operator(guess: EpsGuess) -> None:
    """Once eps is known."""
    made = _norm(1e-5)
    _rebuilt(made)
    with Counts() as counts:
        _rebuilt(made)
    assert counts.ops == {torch.ops.aten.native_layer_norm.default: 1}


def test_other_eps_is_not_guessed(guess: EpsGuess) -> None:
    """The output is continued from the statistics that the node saved."""
    made = _norm(0.03)
    assert guess(made.grad_fn) is None
    assert torch.equal(from_statistics(made.grad_fn), made)
    assert torch.equal(_rebuilt(made), made)


def test_wrong_guess_is_not_used_and_not_made_again(guess: EpsGuess) -> None:
    """Two norms of one shape have each an eps of its own."""
    one, other = _norm(1e-5), _norm(1e-3)
    assert torch.equal(_rebuilt(one), one)
    wrong = guess(other.grad_fn)
    assert wrong is not None
    assert not torch.equal(wrong, other)
    assert torch.equal(_rebuilt(other), other)
    assert guess(other.grad_fn) is None
    assert torch.equal(_rebuilt(one), one)


def test_nothing_is_guessed_where_nobody_knows_at_once_whether_it_is_right(
    guess: EpsGuess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an accelerator proofs are compared when backward ends."""
    made = _norm(1e-5)
    monkeypatch.setattr(_proof, "is_immediate", lambda tensor: False)
    monkeypatch.setattr(EpsGuess, "__call__", lambda *_: pytest.fail("guessed"))
    assert torch.equal(_rebuilt(made), made)


@pytest.mark.parametrize("eps", [(1e-5, 1e-5), (1e-5, 1e-3), (0.03, 1e-6)])
def test_gradients_are_plain_whatever_eps_is(guess: EpsGuess, eps: tuple[float, float]) -> None:
    """In the first backward and in those that follow."""
    scales = [leaf(WIDTH) for _ in range(4)]

    def body(x: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        y = F.layer_norm(x, (WIDTH,), *scales[:2], eps[0]) @ one
        return F.layer_norm(y.sin(), (WIDTH,), *scales[2:], eps[1]) @ other

    products = leaf(WIDTH, WIDTH), leaf(WIDTH, WIDTH)
    for _ in range(3):
        assert is_plain(body, leaf(ROWS, WIDTH), *products, policy=save_ops(MATMULS))


def test_weight_written_past_its_version_is_no_guess(guess: EpsGuess) -> None:
    """Too large to be copied: what is made of it is another value, whichever way."""
    width = 20000
    weight, product = leaf(width), leaf(width, 2)

    def body(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (width,), weight) @ product

    out = run(body, leaf(2, width), policy=save_ops(MATMULS))
    weight.data.mul_(2)
    with pytest.raises(MutationError, match="gives other values"):
        out.sum().backward()


@pytest.mark.parametrize("eps", [1e-5, 0.5, 0.037, 0.0301987])
def test_bias_without_a_weight(guess: EpsGuess, eps: float) -> None:
    """With an eps of few digits it has the output's bits, compared or not; else nearly."""
    made = F.layer_norm(leaf(ROWS, WIDTH), (WIDTH,), None, leaf(WIDTH), eps)
    with torch.no_grad():
        found = from_statistics(made.grad_fn)
    torch.testing.assert_close(found, made)
    assert torch.equal(found, made) or eps == 0.0301987
