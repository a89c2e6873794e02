"""Modules changed in place."""

from __future__ import annotations

import copy
import inspect
import itertools
import pickle
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from torchparts_conformance import requirement


@dataclass
class Batch:
    """Two tensors."""

    x: torch.Tensor
    scale: torch.Tensor


class Block(nn.Module):
    """Takes and gives nested tensors; random."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, batch, *, extra=None):
        """Run."""
        y = torch.tanh(self.linear(batch.x)) * batch.scale
        y = nn.functional.dropout(y + extra["t"][0], 0.5)
        return {"batch": Batch(y, batch.scale * 2)}


class Double(nn.Module):
    """A parametrization."""

    def forward(self, weight):
        """Run."""
        return weight * 2


def leaf(device, *shape):
    """A random leaf that requires grad."""
    return torch.randn(*shape, device=device, requires_grad=True)


@requirement(
    "CW-060",
    level="MUST",
    text=(
        "`checkpoint_` and `offload_` MUST return the module itself with its names, class "
        "relations, repr and signature unchanged."
    ),
    rationale="no other implementation offers it; measured benefit in the package's documentation",
    since="0.1.0",
    profile="in-place",
)
def test_the_module_stays_what_it_is(part, device):
    """Identity, names, classes, repr and signature."""
    for change in (part.checkpoint_, part.offload_):
        plain = nn.Sequential(Block(), nn.BatchNorm1d(2)).to(device)
        changed = copy.deepcopy(plain)
        assert change(changed[0]) is changed[0]
        change(changed)
        for names in ("named_parameters", "named_buffers", "named_modules", "named_children"):
            expected = [name for name, _ in getattr(plain, names)()]
            assert [name for name, _ in getattr(changed, names)()] == expected
        assert changed.state_dict()._metadata == plain.state_dict()._metadata
        assert isinstance(changed[0], Block)
        assert len(changed) == 2
        assert repr(changed) == repr(plain)
        assert inspect.signature(changed[0].forward) == inspect.signature(plain[0].forward)


@requirement(
    "CW-061",
    level="MUST",
    text="A module changed in place MUST deepcopy and pickle, with weights of its own.",
    rationale="no other implementation offers it; measured benefit in the package's documentation",
    since="0.1.0",
    profile="in-place",
)
def test_copies_are_independent(part, device):
    """They have the behaviour and their own weights."""
    original = part.checkpoint_(nn.Linear(4, 4, device=device))
    for twin in (copy.deepcopy(original), pickle.loads(pickle.dumps(original))):
        twin(leaf(device, 2, 4)).sum().backward()
        assert type(twin) is type(original)
        assert twin.weight.grad is not None
        assert original.weight.grad is None


@requirement(
    "CW-062",
    level="MUST",
    text="Hooks of a module changed in place MUST fire once per step.",
    rationale="no other implementation offers it; measured benefit in the package's documentation",
    since="0.1.0",
    profile="in-place",
)
def test_hooks_fire_once(part, device):
    """Forward hooks on the module, over forward and backward."""
    module = part.checkpoint_(nn.Linear(4, 4, device=device))
    seen = []
    module.register_forward_pre_hook(lambda m, args: seen.append("pre"))
    module.register_forward_hook(lambda m, args, result: seen.append("post"))
    torch.tanh(module(leaf(device, 2, 4))).sum().backward()
    assert seen == ["pre", "post"]


@requirement(
    "CW-063",
    level="MUST",
    text="`unwrap` MUST give back the same object with its own class and instance attributes.",
    rationale="no other implementation offers it; measured benefit in the package's documentation",
    since="0.1.0",
    profile="in-place",
)
def test_unwrap(part, device):
    """Class and instance attributes are those from before."""
    module = nn.Linear(4, 4, device=device)
    before = set(vars(module))
    assert part.unwrap(part.offload_(part.checkpoint_(module))) is module
    assert type(module) is nn.Linear
    assert set(vars(module)) == before


@requirement(
    "CW-064",
    level="MUST",
    text=(
        "Layers swapped, pruned or parametrized after the change MUST be those that run and are"
        " saved."
    ),
    rationale="no other implementation offers it; measured benefit in the package's documentation",
    since="0.1.0",
    profile="in-place",
)
def test_later_changes_count(part, device):
    """A swapped layer, a parametrized and a pruned weight."""
    model = part.checkpoint_(nn.Sequential(nn.Linear(3, 3), nn.Tanh()).to(device))
    x = leaf(device, 1, 3)
    zero = nn.Linear(3, 3, device=device)
    nn.init.zeros_(zero.weight)
    nn.init.zeros_(zero.bias)
    model.set_submodule("0", zero)
    assert not model(x).any()
    assert not model.state_dict()["0.weight"].any()
    linear = part.checkpoint_(nn.Linear(3, 3, bias=False, device=device))
    weight = linear.weight.detach().clone()
    parametrize.register_parametrization(linear, "weight", Double())
    assert torch.equal(linear(x), nn.functional.linear(x, weight * 2))
    pruned = part.checkpoint_(nn.Linear(4, 4, device=device))
    prune.l1_unstructured(pruned, "weight", amount=0.5)
    pruned(leaf(device, 1, 4)).sum().backward()
    assert (pruned.weight == 0).sum() == 8


@requirement(
    "CW-065",
    level="MUST",
    text=(
        "Gradients MUST equal the plain module's bit for bit under both implementations, with "
        "dropout, for nested and dataclass arguments and results."
    ),
    rationale="no other implementation offers it; measured benefit in the package's documentation",
    since="0.1.0",
    profile="in-place",
)
def test_gradients_are_the_plain_ones(part, device):
    """Dataclass and nested arguments, dict and dataclass results, dropout."""
    plain = Block().to(device)
    batch, extra = Batch(leaf(device, 3, 6), leaf(device, 3, 6)), {"t": [leaf(device, 3, 6)]}
    tensors = [batch.x, batch.scale, extra["t"][0]]

    def gradients(module):
        torch.manual_seed(0)
        for tensor in (*tensors, *module.parameters()):
            tensor.grad = None
        result = module(batch, extra=extra)["batch"]
        (result.x.sum() + result.scale.sum()).backward()
        return [t.grad.clone() for t in (*tensors, *module.parameters())]

    expected = gradients(plain)
    for impl in part.CheckpointImpl:
        changed = part.checkpoint_(copy.deepcopy(plain), checkpoint_impl=impl)
        for one, other in zip(expected, gradients(changed), strict=True):
            assert torch.equal(one, other), impl


@requirement(
    "CW-066",
    level="MUST",
    text="`is_recomputing()` MUST be True in the second run of a forward only.",
    rationale="no other implementation offers it; measured benefit in the package's documentation",
    since="0.1.0",
    profile="in-place",
)
def test_is_recomputing(part, device):
    """False, True, and False after."""
    seen = []
    module = nn.Sequential(nn.Linear(2, 2), nn.Tanh()).to(device)
    module[0].register_forward_hook(lambda *args: seen.append(part.is_recomputing()))
    part.checkpoint_(module)(leaf(device, 1, 2)).sum().backward()
    assert seen == [False, True]
    assert not part.is_recomputing()


@requirement(
    "CW-107",
    level="MUST",
    text=(
        "`is_checkpointing()` MUST be True in both runs of a checkpointed forward, and False "
        "outside of it and where gradients are off."
    ),
    rationale=(
        "no other implementation offers it; a module that keeps or sends something of its own "
        "has to know that what it saves is not kept"
    ),
    since="0.1.0",
    profile="in-place",
)
def test_is_checkpointing(part, device):
    """In both runs, with either implementation; not outside, and not without gradients."""
    for impl in part.CheckpointImpl:
        seen = []
        module = nn.Sequential(nn.Linear(2, 2), nn.Tanh()).to(device)
        module[0].register_forward_hook(
            lambda *args, seen=seen: seen.append(part.is_checkpointing())
        )
        part.checkpoint_(module, checkpoint_impl=impl)(leaf(device, 1, 2)).sum().backward()
        with torch.no_grad():
            module(leaf(device, 1, 2))
        assert seen == [True, True, False], impl
        assert not part.is_checkpointing()


@requirement(
    "CW-067",
    level="MUST",
    text="State dicts that carry the wrapper's prefix MUST load into a module changed in place.",
    rationale="no other implementation offers it; measured benefit in the package's documentation",
    since="0.1.0",
    profile="in-place",
)
def test_old_state_dicts_load(part, device):
    """Keys with the wrapper's prefix."""
    model = nn.Sequential(part.checkpoint_(nn.Linear(2, 2, device=device)))
    old = {f"0._checkpoint_wrapped_module.{k[2:]}": v + 1 for k, v in model.state_dict().items()}
    model.load_state_dict(old)
    assert torch.equal(model[0].weight, old["0._checkpoint_wrapped_module.weight"])


@requirement(
    "CW-068",
    level="MUST",
    text=(
        "A parametrization and a change in place MUST come off in either order and leave the "
        "module's own class."
    ),
    rationale="no other implementation offers it; measured benefit in the package's documentation",
    since="0.1.0",
    profile="in-place",
)
def test_a_parametrization_comes_off_in_either_order(part, device):
    """Registered before or after the change, removed before or after `unwrap`."""
    for first, change in itertools.product((True, False), (part.checkpoint_, part.offload_)):
        for unwrap_first in (True, False):
            linear = nn.Linear(3, 3, bias=False, device=device)
            if first:
                parametrize.register_parametrization(linear, "weight", Double())
            change(linear)
            if not first:
                parametrize.register_parametrization(linear, "weight", Double())
            linear(leaf(device, 1, 3)).sum().backward()
            if unwrap_first:
                part.unwrap(linear)
            parametrize.remove_parametrizations(linear, "weight")
            linear(leaf(device, 1, 3)).sum().backward()
            assert part.unwrap(linear) is linear
            assert type(linear) is nn.Linear


@requirement(
    "CW-104",
    level="MUST",
    text=(
        "A module changed in place inside another one, both with one selective `context_fn`, "
        "MUST have the plain gradients, whatever is saved, step after step."
    ),
    rationale=(
        "each region needs contexts of its own: with those of another it is handed that one's "
        "values"
    ),
    since="0.1.0",
    profile="in-place",
)
def test_one_inside_another_with_selective_contexts(part, device):
    """Products, functions, or both are saved; two steps."""
    aten = torch.ops.aten
    for saved in (
        [aten.addmm.default],
        [aten.tanh.default],
        [aten.addmm.default, aten.tanh.default],
    ):
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        plain = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), inner, nn.Tanh(), nn.Dropout()).to(device)
        changed = copy.deepcopy(plain)

        def contexts(saved=saved):
            return create_selective_checkpoint_contexts(saved)

        part.checkpoint_(changed[2], context_fn=contexts)
        part.checkpoint_(changed, context_fn=contexts)
        x = leaf(device, 3, 6)
        for step in range(2):
            found = []
            for model in (plain, changed):
                torch.manual_seed(step)
                found.append(torch.autograd.grad(model(x).exp().sum(), [x, *model.parameters()]))
            assert all(map(torch.equal, *found))
