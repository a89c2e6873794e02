"""Rules of the table give torch's bits, and are used where a node saved enough."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from sac_policies import checkpoint, recompute_all
from sac_policies.engines.recipe._replay import Rule
from sac_policies.engines.recipe.tables._replay_table import RULES
from sac_policies.engines.recipe.untracked import _call_table

from . import _attention  # noqa: F401  # kernels to try rules on

NOT_EVERYWHERE = {
    "GroupedMmBackward0",  # torch has it in few dtypes
    "FusedRmsNormBackward0",  # decomposed on the CPU, so the node never appears
    "NativeGroupNormBackward0",  # its node of torch 2.15 has no eps
}


def _rebuilt(made: torch.Tensor) -> torch.Tensor:
    """Rebuild what a node made from what it saved and its leaf."""
    rule = RULES[type(made.grad_fn).__name__]
    return rule.run(made.grad_fn, rule.leaf_of(made.grad_fn))


def _works(rule: Rule, dtype: torch.dtype) -> bool:
    """Whether the rule is used for what its first probe makes."""
    return (rule.works if rule.rebuild else rule.works_through)(dtype, "cpu")


class _Probe:
    """A rule's first probe as a region, whose reader saves the value that the rule is for."""

    def __init__(self, rule: Rule, dtype: torch.dtype) -> None:
        self._rule, self._dtype = rule, dtype
        self.leaves: list[torch.Tensor] = []
        self.replayed = False

    def make(self, *shape: int) -> torch.Tensor:
        spread = torch.linspace(0.25, 2, torch.Size(shape).numel(), dtype=self._dtype)
        self.leaves.append(spread.reshape(shape).requires_grad_())
        return self.leaves[-1]

    def __call__(self) -> torch.Tensor:
        probes = self._rule.probes or self._rule.edge_probes
        value = probes[0](self.make)
        self.storage = StorageWeakRef(value.untyped_storage())
        made_by = RULES.get(type(value.grad_fn).__name__)
        self.replayed = made_by is not None and _works(made_by, self._dtype)
        return value.cos()

    def gradients(self, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out.sum(), self.leaves, materialize_grads=True)


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.node)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rule_works_in_full_precision(rule: Rule, dtype: torch.dtype) -> None:
    """Every rule agrees with torch bit for bit, but for those that some torch has not."""
    assert rule.works(dtype, "cpu") or rule.node in NOT_EVERYWHERE
    through = rule.through is None or rule.works_through(dtype, "cpu")
    assert through or rule.node in NOT_EVERYWHERE


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.node)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_value_is_replayed_where_the_rule_works_and_kept_where_not(
    rule: Rule, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either way gradients are bitwise those of no checkpointing."""
    monkeypatch.setattr(_call_table, "LEAST_BYTES", 0)
    plain, probe = _Probe(rule, dtype), _Probe(rule, dtype)
    out = checkpoint(probe, policy=recompute_all(), engine="recipe")
    assert probe.storage.expired() is probe.replayed
    for wanted, got in zip(plain.gradients(plain()), probe.gradients(out), strict=True):
        assert torch.equal(wanted, got)


def test_layer_norm_in_bfloat16_is_kept() -> None:
    """Statistics rounded to bfloat16 do not give the output's bits, so that rule is off there."""
    assert not RULES["NativeLayerNormBackward0"].works(torch.bfloat16, "cpu")
    assert RULES["SiluBackward0"].works(torch.bfloat16, "cpu")


@pytest.mark.parametrize("eps", [1e-12, 1e-5, 0.3])
def test_layer_norm_is_rebuilt_for_any_eps(eps: float) -> None:
    """eps is no attribute of the node; the output is rebuilt without knowing it."""
    x = torch.randn(6, 33, generator=torch.Generator().manual_seed(0)).mul_(1e-3).requires_grad_()
    y = F.layer_norm(x, (33,), torch.linspace(0, 2, 33), torch.linspace(-1, 1, 33), eps)
    with torch.no_grad():
        assert torch.equal(_rebuilt(y), y)


@pytest.mark.parametrize(
    ("needs_left", "needs_right", "ready"),
    [(True, True, True), (True, False, False), (False, True, False)],
)
def test_product_is_ready_only_with_both_operands(
    needs_left: bool, needs_right: bool, ready: bool
) -> None:
    """A product saves an operand only where the other needs a gradient."""
    left = torch.ones(3, 3, requires_grad=needs_left)
    right = torch.ones(3, 3, requires_grad=needs_right)
    assert RULES["MulBackward0"].ready((left * right).grad_fn) is ready
    assert RULES["MmBackward0"].ready((left @ right).grad_fn) is ready
    assert RULES["DivBackward0"].ready((left / right).grad_fn) is ready
    assert RULES["BmmBackward0"].ready(torch.bmm(left[None], right[None]).grad_fn) is ready


def test_addmm_is_ready_only_with_a_leaf_bias() -> None:
    """The bias is saved by nobody; it is known only where it is a leaf that needs a gradient."""
    x, w = torch.ones(3, 3, requires_grad=True), torch.ones(3, 3, requires_grad=True)
    bias = torch.ones(3, requires_grad=True)
    rule = RULES["AddmmBackward0"]
    assert rule.ready(torch.addmm(bias, x, w).grad_fn)
    assert not rule.ready(torch.addmm(bias * 2, x, w).grad_fn)
    assert not rule.ready(torch.addmm(bias.detach(), x, w).grad_fn)


def test_convolution_without_bias_is_ready() -> None:
    """Whether there was a bias is an attribute of the convolution's node."""
    x, w = torch.ones(1, 2, 5, 5, requires_grad=True), torch.ones(3, 2, 3, 3, requires_grad=True)
    rule = RULES["ConvolutionBackward0"]
    assert rule.ready(F.conv2d(x, w).grad_fn)
    assert not rule.ready(F.conv2d(x, w, torch.ones(3)).grad_fn)


def test_group_norm_without_affine_is_not_ready() -> None:
    """Without the bias's edge nobody can tell an absent bias from a frozen one."""
    x = torch.ones(2, 4, 3, 3, requires_grad=True)
    assert not RULES["NativeGroupNormBackward0"].ready(F.group_norm(x, 2).grad_fn)


@pytest.mark.parametrize(
    "layer",
    [nn.GroupNorm(4, 16), nn.BatchNorm2d(16), nn.Conv2d(16, 16, 3, padding=1), nn.SiLU()],
    ids=lambda layer: type(layer).__name__,
)
def test_channels_last_is_replayed_in_its_own_order(layer: nn.Module) -> None:
    """What a layer made of a channels-last tensor is rebuilt with its bits and its strides."""
    x = torch.randn(2, 16, 32, 32).contiguous(memory_format=torch.channels_last).requires_grad_()
    y = layer(x)
    if isinstance(layer, nn.GroupNorm) and not hasattr(y.grad_fn, "_saved_eps"):
        pytest.skip("a group norm's node of torch 2.15 has no eps any more: the value is kept")
    with torch.no_grad():
        again = _rebuilt(y)
    assert torch.equal(again, y)
    assert again.stride() == y.stride()


def test_batch_norm_replay_leaves_running_statistics_alone() -> None:
    """Rebuilding a training batch norm does not update the running mean a second time."""
    bn = torch.nn.BatchNorm2d(3)
    y = bn(torch.arange(54.0).reshape(2, 3, 3, 3).requires_grad_())
    before = bn.running_mean.clone()
    with torch.no_grad():
        assert torch.equal(_rebuilt(y), y)
    assert torch.equal(bn.running_mean, before)
