"""The scenarios of torch's own `test_fsdp_flatten_params.py`, and what torch gets wrong."""

import copy
import io

import pytest
import torch
from torch import nn

from flat_param.handle import FlatParameter, FlatParamHandle

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")


def _transformer(*, tied=False, half=False):
    torch.manual_seed(0)
    model = nn.Transformer(16, 4, 2, 2, 32, 0.0)
    model.register_buffer("dummy_buffer", torch.tensor(1.0))
    if tied:
        for encoder, decoder in zip(model.encoder.layers, model.decoder.layers, strict=True):
            decoder.linear1.weight = encoder.linear1.weight
            decoder.linear2.weight = encoder.linear2.weight
    return model.half() if half else model


def _output(model):
    torch.manual_seed(1)
    dtype = next(iter(model.state_dict().values())).dtype
    return model(torch.rand(5, 2, 16).to(dtype), torch.rand(3, 2, 16).to(dtype))


@pytest.mark.parametrize("half", [False, True])
def test_partial_flattening(half, handle_of):
    """Flattened layers have one parameter, the others keep theirs, and `.to` reaches all."""
    model = _transformer(half=half)
    numel = sum(param.numel() for param in model.parameters())
    flats = []
    for layer in (model.encoder.layers[1], model.decoder.layers[0]):
        layer.register_parameter("_flat_param", handle_of(layer).flat_param)
        flats.append(layer._flat_param)
        assert len(list(layer.parameters())) == 1
    assert sum(param.numel() for param in model.parameters()) == numel
    assert len(list(model.encoder.layers[0].parameters())) == 12
    new = torch.float32 if half else torch.float16
    model.to(new)
    assert all(flat.dtype == new for flat in flats)


def test_flatten_nothing():
    """An empty list is refused, in the source's words."""
    with pytest.raises(ValueError, match="a FlatParamHandle with an empty parameter list"):
        FlatParamHandle([], _transformer())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_numel_and_output_survive(tied, half, handle_of):
    """Tied or not, in half precision or not: as many elements, the same output."""
    model = _transformer(tied=tied, half=half)
    numel = sum(param.numel() for param in model.parameters())
    expected = _output(model)
    handle = handle_of(model)
    assert handle.flat_param.numel() == numel
    assert torch.equal(_output(model), expected)


def test_a_step_moves_tied_parameters_once(handle_of):
    """The norm after a step of SGD is that of the plain model."""
    plain, model = _transformer(tied=True), _transformer(tied=True)
    handle = handle_of(model)
    for one, params in ((plain, list(plain.parameters())), (model, [handle.flat_param])):
        optimizer = torch.optim.SGD(params, lr=0.01)
        _output(one).sum().backward()
        optimizer.step()
    expected = torch.cat([param.detach().flatten() for param in plain.parameters()]).norm()
    torch.testing.assert_close(handle.flat_param.norm(), expected)


def test_gradients_reach_the_flat_parameter(mlp, handle_of):
    """Bit for bit those of the plain module, one after another."""
    plain = copy.deepcopy(mlp)
    handle = handle_of(mlp)
    x = torch.randn(4, 5)
    for model in (mlp, plain):
        model(x).pow(2).sum().backward()
    expected = torch.cat([param.grad.flatten() for param in plain.parameters()])
    assert torch.equal(handle.flat_param.grad, expected)


@pytest.mark.parametrize(
    "tensors",
    [
        (torch.arange(24.0).view(4, 6)[:, :3], torch.full((20,), -1.0)),
        (torch.tensor(1.0),),
        (torch.ones(3, dtype=torch.complex64),),
        (torch.ones(3).to(torch.float8_e4m3fn), torch.ones(5).to(torch.float8_e4m3fn)),
        (torch.ones(1).expand(4), torch.ones(0, 2)),
    ],
    ids=["column slice", "scalar", "complex", "float8", "expanded and empty"],
)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_every_kind_of_tensor_keeps_its_values(holder, tensors, use_orig_params, handle_of):
    """torch corrupts the first, and refuses the others or computes nonsense."""
    expected = [tensor.tolist() for tensor in tensors]
    module = holder(*tensors)
    handle_of(module, use_orig_params=use_orig_params)
    assert [getattr(module, f"p{i}").tolist() for i in range(len(tensors))] == expected


def test_padding_is_zero_and_out_of_the_norm(mlp, handle_of):
    """The norm of the flat parameter is that of the parameters."""
    true = torch.cat([param.detach().flatten() for param in mlp.parameters()]).norm()
    handle = handle_of(mlp, use_orig_params=True, rank=0, world=2)
    assert handle.flat_param.numel() == 72
    torch.testing.assert_close(handle.flat_param.norm(), true)


@pytest.mark.parametrize("trained", [False, True])
def test_a_flat_parameter_is_trained_where_any_of_its_parameters_is(mlp, trained, handle_of):
    """Frozen alone, it is frozen; with original parameters kept, one is enough."""
    mlp.requires_grad_(False)
    mlp[2].bias.requires_grad_(trained)
    assert handle_of(mlp, use_orig_params=True).flat_param.requires_grad is trained


def test_flatten_tensors_lays_out_like_the_parameter(mlp, handle_of):
    """A state of the parameters' shapes is flattened to the flat parameter's layout."""
    tensors = [param.detach().clone() for param in mlp.parameters()]
    handle = handle_of(mlp, use_orig_params=True)
    assert torch.equal(handle.flatten_tensors(tensors, 4)[:71], handle.flat_param[:71])
    made = handle.flatten_tensors_into_flat_param(tensors, 0, requires_grad=False)
    assert isinstance(made, FlatParameter)
    assert made.shape == (66,)


def test_a_deep_copy_is_flat_and_apart(mlp, handle_of):
    """torch refuses to copy a flattened module."""
    handle = handle_of(mlp)
    mlp.register_parameter("_flat_param", handle.flat_param)
    twin = copy.deepcopy(mlp)
    x = torch.randn(2, 5)
    assert torch.equal(twin(x), mlp(x))
    twin(x).sum().backward()
    assert twin._flat_param.grad is not None
    assert mlp._flat_param.grad is None


def test_a_saved_flat_parameter_knows_its_parts(mlp, handle_of):
    """Names, shapes and layout survive saving and copying."""
    flat = handle_of(mlp).flat_param
    file = io.BytesIO()
    torch.save(flat, file)
    file.seek(0)
    for copied in (torch.load(file, weights_only=False), copy.deepcopy(flat)):
        assert isinstance(copied, FlatParameter)
        assert copied._fqns == flat._fqns
        assert copied._layout == flat._layout
        assert torch.equal(copied, flat)
