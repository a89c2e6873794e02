"""The flat view of a module of one process."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from flat_param import flatten

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.complex64])
FEW = settings(max_examples=40, deadline=None, derandomize=True)


def test_functional_call_matches_loading_each_vector(mlp):
    """A batch of vectors under vmap gives what the module gives with each loaded."""
    flat = flatten(mlp)
    vectors, x = torch.randn(3, flat.numel), torch.randn(4, 5)
    batch = torch.vmap(flat.functional_call, in_dims=(0, None))(vectors, x)
    for vector, out in zip(vectors, batch, strict=True):
        flat.load_vector(vector)
        torch.testing.assert_close(mlp(x), out)


def test_functional_gradient_matches_backward(mlp):
    """The gradient with respect to the vector is the flat gradient."""
    flat = flatten(mlp)
    x = torch.randn(4, 5)
    grad = torch.func.grad(lambda v: flat.functional_call(v, x).sum())(flat.as_vector().clone())
    mlp(x).sum().backward()
    torch.testing.assert_close(grad, flat.grad_vector())


def test_functional_call_takes_one_vector_per_segment(mlp):
    """With two dtypes, two vectors, in the order of `layouts`."""
    mlp[2].double()
    mlp[1].register_forward_hook(lambda module, args, out: out.double())
    flat = flatten(mlp)
    assert list(flat.layouts) == ["float32", "float64"]
    vectors = [flat.as_vector("float32") * 0, flat.as_vector("float64")]
    out = flat.functional_call(vectors, torch.ones(1, 5))
    assert torch.equal(out[0], mlp[2].bias)


@pytest.mark.parametrize("max_norm", [0.1, 1e9])
@pytest.mark.parametrize("ord", [2.0, 1.0, float("inf")])
def test_clip_matches_torch(mlp, max_norm, ord):
    """Same norm, same gradients as `clip_grad_norm_`, clipping or not."""
    plain = copy.deepcopy(mlp)
    flat = flatten(mlp)
    x = torch.randn(4, 5)
    for model in (mlp, plain):
        model(x).pow(2).sum().backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type=ord)
    torch.testing.assert_close(flat.clip_(max_norm, ord=ord), expected)
    for ours, theirs in zip(mlp.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_norm_of_many_elements_is_accurate():
    """Ten million squares in one float32 sum would be off by 3e-4."""
    layer = nn.Linear(1 << 12, 1 << 10, bias=False)
    true = layer.weight.detach().double().norm().float()
    torch.testing.assert_close(flatten(layer).norm(), true, rtol=1e-6, atol=0)


@pytest.mark.parametrize("ord", [0.0, 1.0, 2.0, float("inf"), -float("inf"), -1.0])
@pytest.mark.parametrize("sizes", [(7, 3, 1), (0,), (5, 0), (1 << 18,), ((1 << 18) + 1, 6)])
def test_norm_of_any_order_is_torchs(holder, sizes, ord):
    """Of one and of several dtypes, without elements, and around lengths of whole blocks."""
    tensors = [torch.rand(size) + 0.5 for size in sizes]
    tensors[0][:1] = 1000.0
    second = torch.tensor([300.0], dtype=torch.bfloat16)
    for parts in (tensors, [*tensors, second]):
        whole = torch.cat([part.double() for part in parts])
        norm = flatten(holder(*parts), align_bytes=1).norm(ord)
        expected = torch.linalg.vector_norm(whole, ord) if whole.numel() else torch.tensor(0.0)
        torch.testing.assert_close(norm.float(), expected.float(), rtol=1e-5, atol=0)


def test_norm_over_segments_is_as_exact_as_the_widest(holder):
    """Of float64 and bfloat16 parameters, in float64."""
    parts = [torch.full((3,), 1 / 3, dtype=torch.float64), torch.ones(4, dtype=torch.bfloat16)]
    expected = torch.cat([part.double() for part in parts]).norm()
    torch.testing.assert_close(flatten(holder(*parts)).norm(), expected, rtol=1e-15, atol=0)


def test_norm_of_complex_numbers_is_real(holder):
    """Beside real ones."""
    flat = flatten(holder(torch.full((1 << 18,), 3 + 4j), torch.ones(1)))
    assert (flat.norm(float("inf")).dtype, flat.norm(float("inf")).item()) == (torch.float32, 5.0)


def test_a_frozen_module_has_no_norm(mlp):
    """Nothing is trainable: the norm is zero, as torch's clipping of nothing is."""
    flat = flatten(mlp.requires_grad_(False))
    assert flat.norm() == flat.clip_(1.0) == 0


def test_lerp_is_the_moving_average(mlp):
    """`ema += w * (live - ema)`, on every parameter, gaps at zero."""
    ema = flatten(copy.deepcopy(mlp))
    live = flatten(mlp)
    live.load_vector(torch.randn(live.numel))
    expected = torch.lerp(ema.as_vector(), live.as_vector(), 0.25)
    ema.lerp_(live, 0.25)
    assert torch.equal(ema.as_vector(), expected)


def test_lerp_leaves_what_is_frozen_on_both_sides():
    """Quantized or frozen weights are not averaged."""
    models = [nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2)) for _ in "ab"]
    ema, live = (flatten(model) for model in models)
    before = ema.as_vector("float32.frozen").clone()
    ema.lerp_(live, 1.0)
    assert torch.equal(ema.as_vector("float32.frozen"), before)
    assert torch.equal(ema.as_vector(), live.as_vector())


def test_zero_grad_keeps_views_and_none(mlp):
    """One fill; a parameter without a gradient does not get one."""
    flat = flatten(mlp)
    mlp[2](torch.ones(1, 7)).sum().backward()
    view = mlp[2].weight.grad
    flat.zero_grad()
    assert mlp[2].weight.grad is view
    assert not view.any()
    assert mlp[0].weight.grad is None


def test_repr_says_what_is_flat(mlp):
    """Module type, segments and sizes."""
    assert repr(flatten(mlp)) == "FlatParams(Sequential, float32: 72)"


@st.composite
def modules(draw):
    """Parameters of any shape, permuted stride, dtype and trainability."""
    module = nn.Module()
    for index, shape in enumerate(draw(st.lists(SHAPES, min_size=1, max_size=5))):
        order = draw(st.permutations(range(len(shape))))
        values = torch.randn(shape).permute(order).to(draw(DTYPES))
        module.register_parameter(f"p{index}", nn.Parameter(values, draw(st.booleans())))
    return module


@FEW
@given(modules())
def test_flatten_changes_no_value_stride_or_identity(module):
    """Any module comes out of `flatten` as it went in, in one buffer per segment."""
    before = [(p, p.detach().clone(), p.stride()) for p in module.parameters()]
    flat = flatten(module)
    for (param, value, stride), now in zip(before, module.parameters(), strict=True):
        assert param is now
        assert torch.equal(param, value)
        assert param.stride() == stride
    assert sum(layout.used_numel for layout in flat.layouts.values()) == sum(
        p.numel() for p in module.parameters()
    )


@FEW
@given(modules())
def test_vectors_round_trip(module):
    """Loading a segment's vector into a copy gives the same parameters and clean gaps."""
    twin = copy.deepcopy(module)
    with torch.no_grad():
        for param in twin.parameters():
            param.zero_()
    flat, other = flatten(module), flatten(twin)
    for name, layout in flat.layouts.items():
        noisy = flat.as_vector(name).clone()
        for start, stop in layout.gaps:
            noisy[start:stop] = 1
        other.load_vector(noisy, name)
        assert torch.equal(other.as_vector(name), flat.as_vector(name))
