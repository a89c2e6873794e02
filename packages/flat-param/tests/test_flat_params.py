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


def test_as_vector_is_the_parameters_without_a_copy(mlp):
    """Writing to the vector writes to the module."""
    flat = flatten(mlp, align_bytes=1)
    assert torch.equal(flat.as_vector(), nn.utils.parameters_to_vector(mlp.parameters()))
    flat.as_vector().zero_()
    assert not any(param.any() for param in mlp.parameters())


def test_outputs_and_gradients_are_bitwise_those_of_the_plain_module(mlp):
    """Flattening changes where values lie, not what they are."""
    plain = copy.deepcopy(mlp)
    flat = flatten(mlp, align_bytes=1)
    x = torch.randn(4, 5)
    for model in (mlp, plain):
        model(x).pow(2).sum().backward()
    assert torch.equal(mlp(x), plain(x))
    grads = torch.cat([param.grad.flatten() for param in plain.parameters()])
    assert torch.equal(flat.grad_vector(), grads)


def test_an_optimizer_built_before_still_trains(mlp):
    """Parameters keep their identity."""
    optimizer = torch.optim.SGD(mlp.parameters(), lr=0.1)
    flat = flatten(mlp)
    before = flat.as_vector().clone()
    mlp(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    assert not torch.equal(flat.as_vector(), before)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).view(4, 6)[:, :3],
        torch.arange(24.0).view(4, 6).t(),
        torch.ones(1).expand(4),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.tensor(3.0),
        torch.ones(0, 3),
        torch.randn(3, dtype=torch.complex64),
        torch.randn(5, dtype=torch.float64),
        torch.randn(6).to(torch.float8_e4m3fn),
        torch.arange(5, dtype=torch.int8),
    ],
    ids=lambda t: f"{t.dtype}-{tuple(t.shape)}-{t.stride()}",
)
def test_every_kind_of_tensor_keeps_its_values(holder, tensor):
    """Between two others, any stride and dtype survives bit for bit."""
    expected = tensor.clone()
    module = holder(torch.full((3,), 7.0), tensor, torch.full((5,), 9.0))
    flat = flatten(module)
    assert module.p1.tolist() == expected.tolist()
    assert module.p1.stride() == expected.stride()
    assert torch.equal(module.p0, torch.full((3,), 7.0))
    assert torch.equal(module.p2, torch.full((5,), 9.0))
    assert sum(layout.used_numel for layout in flat.layouts.values()) == 8 + tensor.numel()


def test_mixed_dtypes_and_frozen_parts_have_their_own_segments(mlp):
    """One buffer per (dtype, trainable); the frozen ones have no gradient memory."""
    mlp[2].bfloat16()
    mlp[0].bias.requires_grad_(False)
    flat = flatten(mlp)
    assert list(flat.layouts) == ["float32", "float32.frozen", "bfloat16"]
    mlp[0](torch.ones(1, 5)).sum().backward()
    assert flat.grad_vector("float32").numel() == 36


def test_load_vector_zeroes_what_lies_in_gaps(mlp):
    """A vector of ones loads as ones in parameters and zeros between them."""
    flat = flatten(mlp)
    flat.load_vector(torch.ones(flat.numel))
    assert int(flat.as_vector().sum()) == 66
    assert torch.equal(flat.norm(), torch.tensor(66.0).sqrt())


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


def test_norms_span_segments(mlp):
    """The norm of a model in two dtypes is the norm over both."""
    mlp[2].bfloat16()
    flat = flatten(mlp)
    squares = sum(param.detach().float().pow(2).sum() for param in mlp.parameters())
    torch.testing.assert_close(flat.norm(), squares.sqrt(), rtol=1e-2, atol=0)


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


def test_compiled_forward_has_no_break_and_keeps_gradients_flat(mlp, own_all):
    """`fullgraph=True` compiles, and gradients arrive in the flat gradient."""
    plain = copy.deepcopy(mlp)
    flat = flatten(mlp)
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 5)
    for _ in range(2):
        mlp.zero_grad()
        compiled(x).sum().backward()
    plain(x).sum().backward()
    assert own_all([param.grad for param in mlp.parameters()], flat.grad_vector())
    for ours, theirs in zip(mlp.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_a_failed_backward_does_not_stop_the_next(mlp, own_all):
    """After an error in the middle of a backward, the next one is settled as usual."""
    flat = flatten(mlp)
    bomb = mlp[0].weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        mlp(torch.ones(1, 5)).sum().backward()
    bomb.remove()
    mlp.zero_grad()
    mlp(torch.ones(1, 5)).sum().backward()
    grads = [param.grad for param in mlp.parameters()]
    assert own_all(grads, flat.grad_vector())


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
