"""Each kind of node has one entry under a policy: a view, a rule, or why it is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from sac_policies import (
    offload,
    recompute_all,
    report,
    save_all,
    save_by_bytes,
    save_every_nth,
    save_ops,
)
from sac_policies.engines.recipe._replay import output_facts
from sac_policies.engines.recipe._replay_entries import (
    VIEW,
    ReplayEntry,
    ReplayTable,
    Why,
    every_rule,
)
from sac_policies.engines.recipe.tables._replay_table import RULES

from ._recipe import is_plain, leaf

X, Y = leaf(3, 3), leaf(3, 3)


def _entry(made: torch.Tensor, policy: Any = None) -> Any:
    return ReplayTable(policy or recompute_all())[type(made.grad_fn)]


@pytest.mark.parametrize("made", [X.t(), X[0], X.view(9), X.unsqueeze(0)])
def test_node_of_a_view_is_one(made: torch.Tensor) -> None:
    """Whatever the policy says: views are taken again."""
    assert _entry(made) is VIEW
    assert _entry(made, save_ops("aten.*")) is VIEW


def test_leaf_is_kept_as_it_is() -> None:
    """What needs no gradient has no node at all."""
    edges = (X * torch.ones(3)).grad_fn.next_functions
    table = ReplayTable(recompute_all())
    assert table[type(edges[0][0])] is Why.LEAF
    assert table[type(edges[1][0])] is Why.LEAF


def test_node_that_no_rule_is_for_is_kept() -> None:
    """As a cumulative product's."""
    assert _entry(X.cumprod(0)) is Why.NO_RULE


@pytest.mark.parametrize(
    ("policy", "found"),
    [
        (save_ops("aten.mm"), Why.POLICY),
        (save_ops("aten.bmm"), ReplayEntry),
        (recompute_all(), ReplayEntry),
        (save_every_nth("aten.mm", n=2), Why.CALLS),
        (save_by_bytes(), Why.CALLS),
        (offload("aten.bmm"), ReplayEntry),
    ],
    ids=str,
)
def test_policy_says_whether_a_rule_is_used(policy: Any, found: Any) -> None:
    """Hooks see no order of calls, so a policy that decides these keeps all."""
    entry = _entry(X @ Y, policy)
    assert (type(entry) if found is ReplayEntry else entry) is found


def test_entry_is_of_the_rule_and_the_policy() -> None:
    """Each kind of node is looked up once."""
    policy = recompute_all()
    table = ReplayTable(policy)
    entry = table[type((X @ Y).grad_fn)]
    assert entry.rule is RULES["MmBackward0"]
    assert entry.policy is policy
    assert table[type((Y @ X).grad_fn)] is entry


def test_every_rule_asks_no_policy() -> None:
    """A plan decides itself."""
    assert every_rule.policy is None
    assert every_rule[type((X @ Y).grad_fn)].policy is None


def test_output_is_replayed_on_its_device() -> None:
    """By the name of its kind."""
    made = X @ Y
    assert _entry(made).device(made, made.grad_fn) == "cpu"


def test_output_of_a_node_that_saved_too_little_is_kept() -> None:
    """Another output of the same kind of node is not."""
    entry = _entry(X @ Y)
    frozen = X @ Y.detach()
    assert entry.device(frozen, frozen.grad_fn) is Why.NOT_SAVED
    made = X @ Y
    assert entry.device(made, made.grad_fn) == "cpu"


def test_output_of_a_dtype_without_its_rule_is_kept() -> None:
    """Statistics in bfloat16 do not give a norm's bits; those in float32 do."""
    half = X.detach().bfloat16().requires_grad_()
    found = []
    for x in (X, half):
        made = F.layer_norm(x, (3,))
        found.append(_entry(made).device(made, made.grad_fn))
    assert found == ["cpu", Why.RULE_IS_OFF]


def test_output_of_a_subclass_is_kept() -> None:
    """What it does in a replay, nobody knows; a parameter is a tensor like any other."""

    class Mine(torch.Tensor):
        pass

    made = X.sin()
    entry = _entry(made)
    assert entry.device(made.detach().as_subclass(Mine), made.grad_fn) is Why.SUBCLASS
    assert entry.device(torch.nn.Parameter(made.detach()), made.grad_fn) == "cpu"


def test_fake_output_is_judged_by_the_cpu() -> None:
    """Its own device need not be here."""
    made = X.sin()
    with FakeTensorMode():
        elsewhere = torch.empty(3, device="cuda")
    assert _entry(made).device(elsewhere, made.grad_fn) == "cuda"
    assert _entry(made).device(made.to("meta"), made.grad_fn) == "cpu"


def test_rule_is_judged_without_a_tensor_too() -> None:
    """By what the node knows of its output, each way for itself."""
    made = X @ Y
    entry, facts = _entry(made), output_facts(made.grad_fn)
    assert entry.works_for(facts, False, True)
    assert entry.works_for(facts, True, False)
    norm = F.layer_norm(X, (3,))
    entry, facts = _entry(norm), output_facts(norm.grad_fn)
    assert entry.works_for(facts, False, False)
    assert not entry.works_for(facts, False, True)


def _sparse(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Saves a sparse tensor without a gradient, and one with."""
    eye = torch.eye(32).to_sparse()
    return torch.sparse.mm(torch.sparse.mm(eye, (x @ w).tanh()).to_sparse(), w.exp()).sin()


def _csr(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.mv(torch.eye(32).to_sparse_csr(), (x @ w).tanh()[0]).sigmoid()


def _onednn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).to_mkldnn().relu().to_dense().tanh()


def _nested(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    rows = torch.nested.as_nested_tensor([x[:10], x[10:]])
    return torch.nested.to_padded_tensor(F.gelu(F.linear(rows, w)), 0.0).tanh()


def _tangents(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.silu(torch.func.jvp(lambda t: (t @ w).tanh(), (x,), (w,))[1])


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning")
@pytest.mark.parametrize("policy", [recompute_all(), save_ops("aten.mm"), save_all()])
@pytest.mark.parametrize("function", [_sparse, _csr, _onednn, _nested, _tangents])
def test_tensors_that_lie_in_no_storage_are_kept(function: Any, policy: Any) -> None:
    """Beside dense ones that are rebuilt; in a first forward and in those that follow it."""
    x, w = leaf(32, 32), leaf(32, 32)
    for _ in range(4):
        assert is_plain(function, x, w, policy=policy)


@pytest.mark.parametrize("engine", ["recipe", "contexts"])
def test_report_of_a_tensor_that_lies_in_no_storage_says_so(engine: str) -> None:
    """Its bytes are those of what it is made of."""
    found = report(_onednn, leaf(32, 32), leaf(32, 32), policy=recompute_all(), engine=engine)
    assert any(each.why.startswith("sparse, nested or of oneDNN") for each in found.saved)
    assert str(found)
