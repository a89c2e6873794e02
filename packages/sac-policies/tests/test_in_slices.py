"""`in_slices`: exact gradients, one slice's intermediates at a time."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from sac_policies import MATMULS, SlicesError, checkpoint, in_slices, in_slices_, save_ops

VOCABULARY, WIDTH, TOKENS = 600, 16, 48


class Sizes(TorchDispatchMode):
    """Records the number of elements of the largest floating-point tensor."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = out if isinstance(out, (tuple, list)) else (out,)
        sizes = [t.numel() for t in made if isinstance(t, torch.Tensor) and t.is_floating_point()]
        self.largest = max(self.largest, *sizes, 0)
        return out


def inputs(dtype=torch.float64):
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY, dtype=dtype)
    hidden = torch.randn(TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    labels = torch.randint(VOCABULARY, (TOKENS,))
    labels[::5] = -100
    return head, hidden, labels


def losses(head):
    def loss_of(hidden, labels, scale=1.0):
        sums = F.cross_entropy(head(hidden) * scale, labels, reduction="sum")
        return sums, (labels != -100).sum()

    return loss_of


@pytest.mark.parametrize("chunks", [1, 3, 7, TOKENS, TOKENS + 5])
def test_loss_and_gradients_are_those_of_the_whole(chunks):
    """The function returns a sum and a count, by which the caller divides."""
    head, hidden, labels = inputs()
    wanted = [head.weight, head.bias, hidden]
    loss, count = losses(head)(hidden, labels)
    plain = torch.autograd.grad(loss / count, wanted)
    sliced, counted = in_slices(losses(head), chunks)(hidden, labels)
    grads = torch.autograd.grad(sliced / counted, wanted)
    assert counted == count
    torch.testing.assert_close(sliced, loss, rtol=1e-12, atol=0)
    for one, other in zip(grads, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_one_slice_is_the_function_bit_by_bit():
    """The order of summation is unchanged."""
    head, hidden, labels = inputs(torch.float32)
    wanted = [head.weight, head.bias, hidden]
    plain = torch.autograd.grad(losses(head)(hidden, labels)[0], wanted)
    grads = torch.autograd.grad(in_slices(losses(head), 1)(hidden, labels)[0], wanted)
    assert all(map(torch.equal, grads, plain))


def test_no_tensor_is_as_large_as_the_logits():
    """In forward and backward, one slice's logits are the largest tensor except the weight."""
    head, hidden, labels = inputs(torch.float32)
    with Sizes() as whole:
        losses(head)(hidden, labels)[0].backward()
    with Sizes() as sliced:
        in_slices(losses(head), 4)(hidden, labels)[0].backward()
    assert whole.largest == TOKENS * VOCABULARY
    assert sliced.largest == max(TOKENS * VOCABULARY // 4, WIDTH * VOCABULARY)


def test_nothing_but_arguments_and_results_is_kept():
    """Between forward and backward only views of the hidden states and labels are kept."""
    head, hidden, labels = inputs(torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        in_slices(losses(head), 4)(hidden, labels)
    given = {t.untyped_storage().data_ptr() for t in (hidden, labels, *head.parameters())}
    made = [t for t in kept if t.untyped_storage().data_ptr() not in given and t.numel() > 1]
    assert made == []


@pytest.mark.parametrize(("shape", "dim"), [((2, 12, WIDTH), 1), ((12, 2, WIDTH), -3)])
def test_what_is_as_long_as_its_slice_is_concatenated(shape, dim):
    """For example, a feed-forward layer over the sequence."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)).double()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    out, plain = in_slices(layer, 5, dim)(x), layer(x)
    torch.testing.assert_close(out, plain)
    wanted = [x, *layer.parameters()]
    grads = torch.autograd.grad(out.sin().sum(), wanted)
    for one, other in zip(grads, torch.autograd.grad(plain.sin().sum(), wanted), strict=True):
        torch.testing.assert_close(one, other)


def test_random_numbers_of_a_slice_are_drawn_once():
    """Forward and backward use the same dropout mask."""
    x = torch.ones(40, 8, requires_grad=True)
    out = in_slices(lambda t: F.dropout(t, 0.5), 4)(x)
    out.sum().backward()
    assert torch.equal(x.grad, out.detach())


@pytest.mark.parametrize(
    "around",
    [
        lambda function, *args: torch_checkpoint(function, *args, use_reentrant=False),
        lambda function, *args: checkpoint(function, *args, policy=save_ops(MATMULS)),
    ],
    ids=["torch", "policy"],
)
def test_slices_inside_a_region(around):
    """Inside torch's checkpoint, and inside a region with a policy."""
    head, hidden, labels = inputs()
    wanted = [head.weight, hidden]

    def step(hidden, labels):
        return in_slices(losses(head), 4)(hidden.sin(), labels)[0]

    plain = torch.autograd.grad(losses(head)(hidden.sin(), labels)[0], wanted)
    grads = torch.autograd.grad(around(step, hidden, labels), wanted)
    for one, other in zip(grads, plain, strict=True):
        torch.testing.assert_close(one, other)


def test_compiled_slices():
    """One graph, with equal gradients."""
    head, hidden, labels = inputs()
    step = torch.compile(in_slices(losses(head), 3), backend="aot_eager", fullgraph=True)
    wanted = [head.weight, hidden]
    plain = torch.autograd.grad(losses(head)(hidden, labels)[0], wanted)
    grads = torch.autograd.grad(step(hidden, labels)[0], wanted)
    for one, other in zip(grads, plain, strict=True):
        torch.testing.assert_close(one, other)


def test_without_gradients_nothing_is_kept():
    """Each slice gets the keyword arguments."""
    head, hidden, labels = inputs()
    with torch.no_grad():
        loss, _ = in_slices(losses(head), 4)(hidden, labels, scale=2.0)
    torch.testing.assert_close(loss, losses(head)(hidden, labels, scale=2.0)[0].detach())
    assert not loss.requires_grad


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: in_slices(3, 2), "must be callable"),
        (lambda: in_slices(torch.sin, 0), "chunks is 0, but it must be an int of at least 1"),
        (lambda: in_slices(torch.sin, 2.5), r"chunks is 2\.5"),
        (lambda: in_slices(torch.sin, 2, "a"), "dim is 'a'"),
        (lambda: in_slices(torch.sin, 2)(1.0), "no positional argument is a tensor"),
        (lambda: in_slices(torch.sin, 2, 1)(torch.ones(4)), r"shape \(4,\), which has no dim"),
        (
            lambda: in_slices(torch.add, 2)(torch.ones(4), torch.ones(3)),
            "argument 0 has 4, argument 1 has 3",
        ),
        (lambda: in_slices(lambda t: t.sum(0), 2)(torch.ones(4, 3)), "must be a sum"),
        (lambda: in_slices(lambda t: [t], 2)(torch.ones(4, 3)), "must be a sum"),
        (
            lambda: in_slices(lambda t: (t.sum(),) * (1 + len(t)), 2)(torch.ones(3)),
            r"returned \['tuple', 'tuple'\], but each result must be a sum",
        ),
    ],
)
def test_what_cannot_be_cut_is_an_error(make, message):
    """One sentence with a remedy."""
    with pytest.raises(SlicesError, match=message):
        make()


@pytest.mark.parametrize(
    "mean",
    [
        F.cross_entropy,
        lambda x, y: F.cross_entropy(x, y, reduction="none").mean() * 0.5,
        lambda x, y: (F.mse_loss(x, x.detach() + 1).float(), (y != -100).sum()),
    ],
)
def test_means_of_slices_are_refused(mean):
    """Their sum would be as many times too large as there are slices."""
    head, hidden, labels = inputs(torch.float32)
    with pytest.raises(
        SlicesError, match=r'returns a mean, but .* Return the sum \(reduction="sum"'
    ):
        in_slices(lambda x, y: mean(head(x), y), 3)(hidden, labels)
    assert in_slices(lambda x, y: mean(head(x), y), 1)(hidden, labels) is not None


def layer():
    """A module, and the same in slices."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
    return plain, nn.ModuleDict({"mlp": in_slices_(copy.deepcopy(plain), 3)})


def saved(module):
    """Through a file of `torch.save`."""
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)), saved]
)
@pytest.mark.parametrize("way", ["in_slices_", "in_slices"])
def test_copies_of_a_module_run_with_their_own_weights(again, way):
    """Copied, pickled or saved; gradients go to the copy."""
    _, parts = layer()
    if way == "in_slices":
        in_slices_(parts["mlp"], 1)
        parts["mlp"].forward = in_slices(parts["mlp"].forward, 3)
    other, x = again(parts), torch.randn(TOKENS, WIDTH)
    assert torch.equal(parts["mlp"](x), other["mlp"](x))
    with torch.no_grad():
        other["mlp"][2].weight.zero_()
    assert not torch.equal(parts["mlp"](x), other["mlp"](x))
    other["mlp"](x).sum().backward()
    assert all(p.grad is None for p in parts.parameters())
    assert all(p.grad is not None for p in other.parameters())


def test_module_in_slices_is_the_module():
    """The same object, names and results; one slice restores it."""
    plain, parts = layer()
    mlp, x = parts["mlp"], torch.randn(TOKENS, WIDTH)
    torch.testing.assert_close(mlp(x), plain(x))
    assert list(mlp.state_dict()) == list(plain.state_dict())
    assert in_slices_(in_slices_(mlp, 5), 1) is mlp
    assert "forward" not in vars(mlp)
    assert torch.equal(mlp(x), plain(x))
    with pytest.raises(SlicesError, match=r"module is <function .*, but its forward is"):
        in_slices_(losses, 3)
