"""Products that a policy saves are kept once, and what is made of them is not kept beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from sac_policies import ATTENTION, MATMULS, MutationError, report, save_ops
from sac_policies.engines.recipe._run import known_of
from sac_policies.engines.recipe._writes import habits_of
from sac_policies.engines.recipe.regions._followed import FollowedValues
from sac_policies.engines.recipe.regions._recorded import Later
from sac_policies.policies._unmatched import subject_of

from ._followed import ROWS, WEIGHTS, WIDTH, waiting
from ._recipe import (
    Counts,
    bytes_held,
    bytes_kept,
    is_plain,
    leaf,
    replays_products_with_numbers,
    run,
)

aten = torch.ops.aten


def _fused(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Attention of three projections in one, two of them rotated."""
    q, k, v = (x @ w).view(2, 32, 192).chunk(3, -1)
    q, k = (torch.cat([-t[..., 32:], t[..., :32]], -1) for t in (q, k))
    return F.scaled_dot_product_attention(q[None], k[None], v[None])


def test_one_projection_of_three_stands_for_all() -> None:
    """Its storage has the others; what is rotated of them is rebuilt."""
    x, w = leaf(64, 64), leaf(64, 192)
    policy = save_ops(MATMULS, ATTENTION)
    told = report(_fused, x, w, policy=policy, engine="recipe")
    assert [each.replayed for each in told.saved if each.made_by == "CatBackward0"] == [True, True]
    assert is_plain(_fused, x, w, policy=policy)


def test_a_product_that_is_written_to_stands_for_nothing() -> None:
    """What was made of it before is kept; only the reader of the product itself is refused."""
    x, w = leaf(64, 64), leaf(64, 64)

    def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        made = x @ w
        gate = torch.sigmoid(1.7 * made)
        unread = made * gate
        made.mul_(0.5)
        return gate.sin() + 0.0 * unread.detach()

    assert is_plain(block, x, w, policy=save_ops("aten.mm"))


class TestReconsidered:
    """What is kept in place of a product that is then kept as well is rebuilt from it after all."""

    @staticmethod
    def _quick(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        made = x @ w
        return (made * torch.sigmoid(1.7 * made)) @ w

    @replays_products_with_numbers
    def test_one_of_two_is_kept(self) -> None:
        """The sigmoid is saved before the product that it is made of."""
        x, w = leaf(64, 96), leaf(96, 96)
        policy = save_ops("aten.mm")
        assert bytes_held(self._quick, x, w, policy=policy) == 64 * 96 * 4
        assert is_plain(self._quick, x, w, policy=policy)
        told = report(self._quick, x, w, policy=policy, engine="recipe")
        made = [each.replayed for each in told.saved if each.made_by == "SigmoidBackward0"]
        assert made == [True, True]

    def test_where_nobody_keeps_the_product_the_value_is_kept(self) -> None:
        """It takes no more, and no replay."""
        x, w = leaf(64, 96), leaf(96, 96)

        def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return (1.5 * (x @ w)).sigmoid()

        with torch.no_grad():
            size = block(x, w).nbytes
        assert bytes_held(block, x, w, policy=save_ops("aten.mm")) in (0, size)
        ran = Counts()
        out = run(block, x, w, policy=save_ops("aten.mm"))
        with ran:
            torch.autograd.grad(out.sum(), (x, w))
        assert ran.ops[aten.sigmoid.default] == 0

    def test_a_value_that_was_written_to_is_kept(self) -> None:
        """After it was saved; backward refuses that as ever."""
        x, w = leaf(64, 96), leaf(96, 96)

        def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            made = x @ w
            gate = torch.sigmoid(1.7 * made)
            out = made * gate
            with torch.no_grad():
                gate.add_(1)
            return out

        out = run(block, x, w, policy=save_ops("aten.mm"))
        with pytest.raises(MutationError, match="was changed in place"):
            out.sum().backward()

    def test_hooks_around_hold_one_of_two(self) -> None:
        """What they were given of the other is dropped."""
        x, w = leaf(64, 96), leaf(96, 96)
        wanted = torch.autograd.grad(self._quick(x, w).sum(), (x, w))
        with torch.autograd.graph.save_on_cpu():
            out = run(self._quick, x, w, policy=save_ops("aten.mm"))
        assert all(map(torch.equal, wanted, torch.autograd.grad(out.sum(), (x, w))))


class TestLate:
    """Who follows steps has recipes for what waited when the forward has ended."""

    policy = save_ops(MATMULS)

    def known(self, function: Callable[..., torch.Tensor], x: torch.Tensor) -> Any:
        """What is known of a function's forwards."""
        repeats = known_of(self.policy).repeats
        return repeats._shape(subject_of(function), habits_of(function), (x,))

    def followed(self, function: Callable[..., torch.Tensor], x: torch.Tensor) -> None:
        """Have it followed once, with something that waits."""
        for _ in range(3):
            assert is_plain(function, x, policy=self.policy)
        shape = self.known(function, x)
        assert shape.followed == 1
        assert Later in {type(each) for _, _, each in shape.steps}

    def test_as_much_is_kept(self) -> None:
        """By a forward that decides, that is written down, and that follows; both backwards."""
        x = leaf(ROWS, WIDTH)

        def function(x: torch.Tensor) -> torch.Tensor:
            return waiting(x)

        kept = [bytes_kept(function, x, policy=self.policy) for _ in range(3)]
        shape = self.known(function, x)
        late = [each for _, _, each in shape.steps if isinstance(each, Later)]
        assert (shape.followed, len(late)) == (1, 4)
        assert kept == kept[:1] * 3
        expected = torch.autograd.grad(function(x).sum(), x)[0]
        out = run(function, x, policy=self.policy).sum()
        for retains in (True, False):
            assert torch.equal(torch.autograd.grad(out, x, retain_graph=retains)[0], expected)

    @pytest.mark.parametrize("follows", [False, True])
    def test_a_product_that_was_written_to_is_not_read(self, follows: bool) -> None:
        """What waited for it stays kept, and is right."""
        x, writes = leaf(ROWS, WIDTH), [not follows]

        def function(x: torch.Tensor) -> torch.Tensor:
            made = F.linear(x, torch.cat(WEIGHTS[:3]))
            one = torch.cat((-made[:, :8], made[:, 8:WIDTH]), -1)
            out = one.sin()
            unread = made.cos().mean().detach()
            if writes[0]:
                made.mul_(0.5)
            return out + 0.0 * unread

        if follows:
            self.followed(function, x)
        writes[0] = True
        assert is_plain(function, x, policy=self.policy)

    @pytest.mark.parametrize("follows", [False, True])
    def test_a_value_that_was_written_to_is_refused(self, follows: bool) -> None:
        """After it was saved; nothing is made in its place."""
        x, writes = leaf(ROWS, WIDTH), [not follows]

        def function(x: torch.Tensor) -> torch.Tensor:
            one, two, three = F.linear(x, torch.cat(WEIGHTS[:3])).chunk(3, -1)
            turned = torch.cat((-one, two), -1)
            out = turned.sin()[:, ::2] * three.sin()
            if writes[0]:
                with torch.no_grad():
                    turned.add_(1)
            return out

        if follows:
            self.followed(function, x)
        writes[0] = True
        out = run(function, x, policy=self.policy)
        with pytest.raises(MutationError, match="was changed in place"):
            out.sum().backward()

    def test_who_leaves_reads_what_waits(self) -> None:
        """As who decides does: what is made of it is not kept beside it."""
        x, more = leaf(ROWS, WIDTH), [False]

        def function(x: torch.Tensor) -> torch.Tensor:
            one, two, three = F.linear(x, torch.cat(WEIGHTS[:3])).chunk(3, -1)
            turned = torch.cat((-one, two), -1)
            out = turned.sin()
            if more[0]:
                out = out * (-turned).cos()
            return out[:, ::2] * three.sin()

        self.followed(function, x)
        more[0] = True
        left, decided = (bytes_kept(function, x, policy=self.policy) for _ in range(2))
        assert left == decided

    def test_what_is_not_as_it_was_stays_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """And takes its bytes."""
        x = leaf(ROWS, WIDTH)

        def function(x: torch.Tensor) -> torch.Tensor:
            return waiting(x)

        self.followed(function, x)
        plain = bytes_kept(function, x, policy=self.policy)
        monkeypatch.setattr(FollowedValues, "are_as_kept", lambda values: False)
        assert bytes_kept(function, x, policy=self.policy) == plain + 4 * 4 * ROWS * WIDTH
        assert is_plain(function, x, policy=self.policy)
