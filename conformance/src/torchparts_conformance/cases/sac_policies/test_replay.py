"""What replaying single operators in backward has to get right."""

from __future__ import annotations

import gc
import weakref
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from torchparts_conformance import requirement

aten = torch.ops.aten


class Operators(TorchDispatchMode):
    """Counts operators, and watches the storages that silu makes."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.counts[func] += 1
        if func is aten.silu.default:
            self.made.append(weakref.ref(out.untyped_storage()))
        return out


def leaf(device, *shape):
    """Spread values of one shape that need a gradient."""
    numel = torch.Size(shape).numel()
    return torch.linspace(-1.3, 1.7, numel, device=device).reshape(shape).requires_grad_()


def replay(part, function, *args):
    """Call a region that keeps as little as the engine can."""
    return part.checkpoint(function, *args, policy=part.recompute_all())


def block(device):
    """A norm, attention, a gated product and dropout."""
    torch.manual_seed(0)
    norm, qkv, out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
    layers = nn.ModuleList([norm, qkv, out]).to(device)

    def function(x):
        q, k, v = (each.view(2, 5, 2, 8).transpose(1, 2) for each in qkv(norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 5, 16)
        return x + F.dropout(F.silu(out(y)) * y, 0.2)

    return function, list(layers.parameters())


@requirement(
    "SP-100",
    level="MUST",
    text=(
        "Gradients, and the state of the random generators after the step, MUST be bitwise "
        "those of no checkpointing."
    ),
    rationale="section 4.3: the aim of replaying single operators",
    since="0.1.0",
    profile="replay",
)
def test_gradients_and_random_state_are_those_of_no_checkpointing(part, device):
    """A block with attention and dropout, under two policies."""
    function, parameters = block(device)
    x = leaf(device, 2, 5, 16)
    inputs = [x, *parameters]
    torch.manual_seed(1)
    expected = torch.autograd.grad(function(x).square().sum(), inputs)
    draw = torch.rand(3, device=device)
    for policy in (part.recompute_all(), part.save_ops("aten.addmm")):
        torch.manual_seed(1)
        out = part.checkpoint(function, x, policy=policy)
        assert all(map(torch.equal, torch.autograd.grad(out.square().sum(), inputs), expected))
        assert torch.equal(torch.rand(3, device=device), draw)


@requirement(
    "SP-101",
    level="MUST",
    text=(
        "A graph MUST be freed without the garbage collector when its output goes, before and "
        "after backward."
    ),
    rationale="an own output saved as it is makes a cycle through the node; reproduced on 2.13",
    since="0.1.0",
    profile="replay",
)
@pytest.mark.parametrize("with_backward", [False, True])
def test_graph_goes_with_its_output(part, device, with_backward):
    """exp saves its own output, the classical cycle."""

    class Mark:
        """Lives in the graph."""

    def function(x):
        return F.silu(x * x).exp()

    x = leaf(device, 3, 4)
    replay(part, function, x).sum().backward()  # imports and first uses are not the subject
    gc.collect()
    gc.disable()
    try:
        out = replay(part, function, x)
        mark = weakref.ref(out.grad_fn.metadata.setdefault("mark", Mark()))
        if with_backward:
            out.sum().backward()
        del out
        assert mark() is None
    finally:
        gc.enable()


@requirement(
    "SP-102",
    level="MUST",
    text="Changing a kept tensor in place between forward and backward MUST raise.",
    rationale=(
        "autograd skips its version check where saved-tensor hooks are set; reproduced on 2.13"
    ),
    since="0.1.0",
    profile="replay",
)
@pytest.mark.parametrize("which", ["output", "input"])
def test_changed_tensor_is_noticed(part, device, which):
    """An own output and a region's input, each changed before backward."""
    x, scale = leaf(device, 3, 4), torch.ones(3, 4, device=device)
    policy = part.save_ops("aten.exp")
    out = part.checkpoint(lambda t, s: (t * s).exp(), x, scale, policy=policy)
    with torch.no_grad():
        (out if which == "output" else scale).add_(1)
    with pytest.raises(RuntimeError, match=r"changed in place|modified by an inplace"):
        out.sum().backward()


@requirement(
    "SP-103",
    level="MUST",
    text=(
        "A second backward over a retained graph, and a double backward, MUST give the "
        "gradients of no checkpointing."
    ),
    rationale="torch's selective checkpointing raises for both",
    since="0.1.0",
    profile="replay",
)
def test_graph_can_be_used_twice(part, device):
    """retain_graph and create_graph."""
    x, w = leaf(device, 5, 4), leaf(device, 4, 4)

    def function(t):
        return F.gelu(F.silu(t) @ w) * t

    def grads(out):
        (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        again = torch.autograd.grad(out.sum(), [x, w], retain_graph=True)
        return [first, *again, *torch.autograd.grad(first.square().sum(), [x, w])]

    assert all(map(torch.equal, grads(replay(part, function, x)), grads(function(x))))


@requirement("SP-104")
def test_shared_value_is_replayed_once_and_dropped(part, device):
    """Two products read one silu; one of two readers alone leaves nothing behind."""
    x, w1, w2 = leaf(device, 5, 4), leaf(device, 4, 4), leaf(device, 4, 4)

    def function(t):
        y = F.silu(t)
        return y @ w1, y @ w2

    one, two = replay(part, function, x)
    with Operators() as partial:
        torch.autograd.grad(one.sum(), w1, retain_graph=True)
        alive = [made() for made in partial.made]
    assert alive == [None]
    with Operators() as whole:
        torch.autograd.grad((one + two).sum(), [x, w1, w2])
    assert whole.counts[aten.silu.default] == 1


@requirement(
    "SP-105",
    level="MUST",
    text="A layer norm MUST be replayed bitwise for any eps.",
    rationale="eps is not among what the autograd node saves",
    since="0.1.0",
    profile="replay",
)
@pytest.mark.parametrize("eps", [1e-12, 1e-5, 0.3])
def test_layer_norm_is_replayed_for_any_eps(part, device, eps):
    """Small rows, so that eps matters."""
    x, w = leaf(device, 6, 32), leaf(device, 32, 4)

    def function(t):
        return F.layer_norm(t * 1e-3, (32,), w[:, 0], w[:, 1], eps) @ w

    expected = torch.autograd.grad(function(x).sum(), [x, w])
    found = torch.autograd.grad(replay(part, function, x).sum(), [x, w])
    assert all(map(torch.equal, found, expected))


@requirement(
    "SP-106",
    level="MUST",
    text=(
        "An operand that autograd did not save, because the other needs no gradient, MUST NOT "
        "be replayed from."
    ),
    rationale="MulBackward saves one side only",
    since="0.1.0",
    profile="replay",
)
@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen_operand_is_no_obstacle(part, device, frozen):
    """A product of which one side needs no gradient, read by something that saves it."""
    x = leaf(device, 4, 4)
    pair = [x, torch.linspace(0, 1, 16, device=device).reshape(4, 4)]
    left, right = pair[frozen], pair[1 - frozen]

    def function(t):
        del t
        return (left * right).sin() + (left @ right).cos()

    (expected,) = torch.autograd.grad(function(x).sum(), x)
    assert torch.equal(torch.autograd.grad(replay(part, function, x).sum(), x)[0], expected)


@requirement(
    "SP-107",
    level="MUST",
    text=(
        "Tensors that are kept MUST pass through the saved-tensor hooks around the region, and "
        "tensors saved under hooks inside it through these alone."
    ),
    rationale="pytorch#190581, pytorch#191205",
    since="0.1.0",
    profile="replay",
)
def test_hooks_of_the_user_are_respected(part, device):
    """Hooks around the region receive what it keeps; hooks inside keep what they pack."""
    x = leaf(device, 3, 4)
    around, inside = [], []

    def function(t):
        y = F.silu(t.exp())
        with saved_tensors_hooks(lambda s: inside.append(s.shape) or s * 1, lambda s: s):
            return F.silu(y)

    policy = part.save_ops("aten.exp")
    with saved_tensors_hooks(lambda s: around.append(s.shape) or s * 1, lambda s: s):
        out = part.checkpoint(function, x, policy=policy)
    (found,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(found, torch.autograd.grad(F.silu(F.silu(x.exp())).sum(), x)[0])
    assert inside == [(3, 4)]
    assert around == [(3, 4)]  # the output of exp


@requirement("SP-108")
def test_saved_product_runs_once(part, device):
    """Two gradients of the product in backward, and no product."""
    x, w = leaf(device, 5, 4), leaf(device, 4, 4)
    calls = []

    def function(t):
        calls.append(1)
        return F.silu(F.silu(t) @ w).sin()

    out = part.checkpoint(function, x, policy=part.save_ops("aten.mm"))
    with Operators() as backward:
        out.sum().backward()
    assert calls == [1]
    assert backward.counts[aten.mm.default] == 2
    assert backward.counts[aten.silu.default] == 2


@requirement(
    "SP-110",
    level="MUST",
    text=(
        "A value that an inner region saves MUST NOT be replayed because an outer region saves "
        "nothing."
    ),
    rationale="pytorch#136433",
    since="0.1.0",
    profile="replay",
)
def test_inner_region_decides(part, device):
    """The inner product is not run again, whatever the outer region saves."""
    x, w = leaf(device, 5, 4), leaf(device, 4, 4)

    def inner(t):
        return (t @ w).sin()

    def outer(t):
        saved = part.save_ops("aten.mm")
        return part.checkpoint(inner, t, policy=saved).cos()

    out = replay(part, outer, x)
    with Operators() as backward:
        out.sum().backward()
    assert backward.counts[aten.mm.default] == 2


@requirement(
    "SP-111",
    level="MUST",
    text=(
        "A normalization of a channels-last input MUST be replayed in that memory format: the "
        "gradients have the bits of no checkpointing."
    ),
    rationale=(
        "reproduced: kernels sum in another order for channels-last, and a replay of a "
        "contiguous copy gave other last bits"
    ),
    since="0.1.0",
    profile="replay",
)
@pytest.mark.parametrize("kind", [nn.GroupNorm, nn.BatchNorm2d])
def test_channels_last_is_replayed_as_it_was(part, device, kind):
    """A normalization whose result the next operator saves."""
    norm = kind(*((4, 16) if kind is nn.GroupNorm else (16,))).to(device)
    torch.manual_seed(0)
    x = torch.randn(2, 16, 32, 32).to(device, memory_format=torch.channels_last).requires_grad_()
    inputs = [x, *norm.parameters()]

    def function(t):
        return F.silu(norm(t))

    expected = torch.autograd.grad(function(x).square().sum(), inputs)
    found = torch.autograd.grad(replay(part, function, x).square().sum(), inputs)
    assert all(map(torch.equal, found, expected))
    assert found[0].stride() == expected[0].stride()


class Branches(nn.Module):
    """Two branches whose products no node saves; the first has a name."""

    def __init__(self, part):
        super().__init__()
        self.part = part
        self.attn = nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x):
        """(rows, 16) in and out."""
        x = x + self.part.name(self.attn(x), "attn").sigmoid()
        return x + self.mlp(F.silu(x)).sigmoid()


def _held_and_again(part, function, x, policy):
    """Bytes that hooks around the region are given, its input and parameters apart; products."""
    sizes = {}

    def pack(tensor):
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = part.checkpoint(function, x, policy=policy)
    for each in (x, *function.parameters()):
        sizes.pop(each.untyped_storage().data_ptr(), None)
    with Operators() as ran:
        grads = torch.autograd.grad(out.sum(), [x, *function.parameters()])
    return sum(sizes.values()), ran.counts[aten.addmm.default], grads


@requirement(
    "SP-181",
    level="MUST",
    text=(
        "`checkpoint` MUST follow policies that read names of tensors and paths of "
        "modules: what they keep MUST NOT be made again, what they do not keep MUST NOT be "
        "held, and gradients MUST be those of no checkpointing, bitwise."
    ),
    rationale="whoever names a value should not pay for a second forward because of it",
    since="0.1.0",
    profile="replay",
)
@pytest.mark.parametrize("kind", ["name", "module", "operators of a module"])
def test_names_and_modules_are_followed(part, device, kind):
    """One product more is held than under a policy that keeps nothing, and one less is made."""
    policy, numel = {
        "name": (part.save_named("attn"), 8 * 16),
        "module": (part.save_modules("mlp.0"), 8 * 32),
        "operators of a module": (part.scoped(part.save_ops("aten.addmm"), "attn"), 8 * 16),
    }[kind]
    torch.manual_seed(0)
    function, x = Branches(part).to(device), leaf(device, 8, 16)
    plain = torch.autograd.grad(function(x).sum(), [x, *function.parameters()])
    least, most, _ = _held_and_again(part, function, x, part.recompute_all())
    held, again, grads = _held_and_again(part, function, x, policy)
    assert all(map(torch.equal, grads, plain))
    assert (held - least, most - again) == (4 * numel, 1)
