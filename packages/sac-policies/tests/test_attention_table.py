"""Attention in one kernel is made again, whichever kernel; what it drew is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from sac_policies import ATTENTION, profile, recompute_all, report, save_ops, solve
from sac_policies.engines.recipe.tables import _attention_table
from sac_policies.engines.recipe.tables._attention_table import ATTENTION_RULES
from sac_policies.engines.recipe.tables._replay_table import RULES

from ._attention import KERNELS, KIND, attend
from ._recipe import bytes_held, is_same, leaf, run

aten = torch.ops.aten
pytestmark = pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning")

SIZE = 2 * 2 * 40 * 64 * 4
MASK = torch.linspace(-1, 1, 40 * 40).view(40, 40)


def read() -> list[torch.Tensor]:
    """Query, key and value."""
    return [leaf(2, 2, 40, 64).mul(by).detach().requires_grad_() for by in (0.5, 0.7, 0.9)]


def gradients(body: Any, given: list[torch.Tensor], how: Any) -> tuple[torch.Tensor, ...]:
    """With the same random numbers each time."""
    torch.manual_seed(0)
    return torch.autograd.grad(how(body, *given).sum(), given)


def plain(body: Any, *given: torch.Tensor) -> torch.Tensor:
    """No checkpointing."""
    return body(*given)


class Body:
    """A region with attention, whose result is read once."""

    def __init__(self, end: str, **given: Any) -> None:
        self.end, self.given = end, given

    def __call__(self, *read: torch.Tensor) -> torch.Tensor:
        query, key, value = read
        return attend(self.end, query.sin(), key.cos(), value.sin(), **self.given).sin()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.1},
        {"attn_mask": torch.linspace(-1, 1, 15).view(3, 5)},
    ],
    ids=["plain", "causal", "scale", "mask"],
)
def test_attention_of_the_cpu_runs_again_on_what_it_saved(options: dict[str, Any]) -> None:
    """With its mask and its scale; the node knows both."""
    query, key, value = leaf(1, 2, 3, 8), leaf(1, 2, 5, 8).detach() / 2, leaf(1, 2, 5, 8)
    made = F.scaled_dot_product_attention(query, key.requires_grad_(), value, **options)
    rule = RULES[type(made.grad_fn).__name__]
    assert rule.op is aten._scaled_dot_product_flash_attention_for_cpu.default
    assert rule.ready(made.grad_fn)
    with torch.no_grad():
        assert is_same(rule.run(made.grad_fn, None), made.detach())


@pytest.mark.parametrize("end", KERNELS)
@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"scale": 0.1}, {"mask": MASK}], ids=str
)
def test_result_is_made_again(end: str, options: dict[str, Any]) -> None:
    """Nothing of its size is held; gradients are those of no checkpointing, in each forward."""
    if end == "flash_attention" and "mask" in options:
        pytest.skip("takes no mask")
    body, given = Body(end, **options), read()
    assert bytes_held(body, *given) < SIZE // 8
    expected = gradients(body, given, plain)
    for _ in range(4):
        assert all(map(torch.equal, gradients(body, given, run), expected))


@pytest.mark.parametrize("end", KERNELS)
def test_result_of_a_dropout_is_kept_and_why_is_said(end: str) -> None:
    """What a kernel drew in itself no operator draws again; its state is there for backward."""
    body, given = Body(end, dropout_p=0.2), read()
    told = report(body, *given, policy=recompute_all(), engine="recipe")
    assert SIZE <= told.held_bytes < SIZE + SIZE // 8
    (reason,) = {each.why for each in told.saved if "Attention" in each.made_by}
    node, _, said = reason.partition(" ")
    assert node == f"ScaledDotProduct{_camel(end)}Backward0"
    assert said == "drew its dropout in a kernel that takes no random state"
    expected = gradients(body, given, plain)
    for _ in range(3):
        assert all(map(torch.equal, gradients(body, given, run), expected))


@pytest.mark.parametrize("end", KERNELS)
def test_dropout_that_begins_later_is_noticed(end: str) -> None:
    """Forwards that follow those before them look at the share that is dropped."""
    body, given = Body(end, dropout_p=0.0), read()
    for share in (0.0, 0.0, 0.0, 0.3, 0.3, 0.0, 0.3):
        body.given["dropout_p"] = share
        expected = gradients(body, given, plain)
        assert all(map(torch.equal, gradients(body, given, run), expected))


@pytest.mark.parametrize("end", KERNELS)
def test_policies_and_plans_decide_about_it(end: str) -> None:
    """It is kept where attention is saved; a plan without bytes makes it again."""
    body, given = Body(end), read()
    assert bytes_held(body, *given, policy=save_ops(ATTENTION)) >= SIZE
    plan = solve(profile(body, *given), 0)
    plan = plan or solve(profile(body, *given), plan.smallest_bytes)
    assert plan.kept_bytes < SIZE // 8
    expected = gradients(body, given, plain)
    for _ in range(3):
        found = gradients(body, given, lambda b, *g: run(b, *g, policy=plan))
        assert all(map(torch.equal, found, expected))


def test_there_is_a_rule_for_each_kernel_of_torch() -> None:
    """Under the name of its node."""
    ends = ("flash_attention_for_cpu", *KERNELS)
    nodes = {f"ScaledDotProduct{_camel(end)}Backward0" for end in ends}
    assert {rule.node for rule in ATTENTION_RULES if rule.op is not None} == nodes
    assert nodes <= set(dir(torch._C._functions))
    assert all(rule.keeps_result for rule in ATTENTION_RULES)


def test_operator_with_another_argument_has_no_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows what it makes of that."""
    assert _attention_table._rule("flash_attention", "", {}).op is not None
    monkeypatch.setattr(_attention_table, "_ALIKE", frozenset({"dropout_p"}))
    assert _attention_table._rule("flash_attention", "", {}).op is None


def _camel(name: str) -> str:
    return "".join(map(str.capitalize, name.split("_")))


@pytest.mark.accelerator
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("end", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("share", [0.0, 0.3])
def test_result_on_a_device_is_made_again(end: str, dtype: torch.dtype, share: float) -> None:
    """What multiplies it has it for its gradient; backward of attention may add in any order."""
    given = [each.detach().to(KIND, dtype).requires_grad_() for each in read()]
    factor = torch.ones(2, 2, 40, 64, device=KIND, dtype=dtype, requires_grad=True)
    try:
        attend(end, *given)
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"not here: {error}".partition("\n")[0])

    def body(*read: torch.Tensor) -> torch.Tensor:
        *read, factor = read
        return attend(end, *(each * 2 for each in read), dropout_p=share) * factor

    size = factor.numel() * factor.element_size()
    held = bytes_held(body, *given, factor)
    assert held < size if share == 0 else size <= held
    for _ in range(3):
        torch.manual_seed(1)
        (expected,) = torch.autograd.grad(body(*given, factor).sum(), factor)
        torch.manual_seed(1)
        (found,) = torch.autograd.grad(run(body, *given, factor).sum(), factor)
        assert torch.equal(found, expected)
