"""The scenarios of torch's own `test_fsdp_flatten_params.py`, and what torch gets wrong."""

import copy
import io
from itertools import pairwise

import pytest
import torch
from torch import nn

from flat_param import FlatParameter, FlatParamHandle, FlatParamShardMetadata, ParameterError
from flat_param import HandleShardingStrategy as Strategy

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")


class Group:
    """Stands for a process group where only rank and size are asked for."""

    def __init__(self, rank, size):
        self._rank, self._size = rank, size

    def rank(self):
        return self._rank

    def size(self):
        return self._size


def _linears(*sizes):
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(sizes)))


def _transformer(*, tied=False, half=False):
    torch.manual_seed(0)
    model = nn.Transformer(16, 4, 2, 2, 32, 0.0)
    model.register_buffer("dummy_buffer", torch.tensor(1.0))
    if tied:
        for encoder, decoder in zip(model.encoder.layers, model.decoder.layers, strict=True):
            decoder.linear1.weight = encoder.linear1.weight
            decoder.linear2.weight = encoder.linear2.weight
    return model.half() if half else model


def _flatten(module, **changes):
    return FlatParamHandle(list(module.parameters()), module, **changes)


def _output(model):
    torch.manual_seed(1)
    dtype = next(iter(model.state_dict().values())).dtype
    return model(torch.rand(5, 2, 16).to(dtype), torch.rand(3, 2, 16).to(dtype))


@pytest.mark.parametrize("half", [False, True])
def test_partial_flattening(half):
    """Flattened layers have one parameter, the others keep theirs, and `.to` reaches all."""
    model = _transformer(half=half)
    numel = sum(param.numel() for param in model.parameters())
    flats = []
    for layer in (model.encoder.layers[1], model.decoder.layers[0]):
        layer.register_parameter("_flat_param", _flatten(layer).flat_param)
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
def test_numel_and_output_survive(tied, half):
    """Tied or not, in half precision or not: as many elements, the same output."""
    model = _transformer(tied=tied, half=half)
    numel = sum(param.numel() for param in model.parameters())
    expected = _output(model)
    handle = _flatten(model)
    assert handle.flat_param.numel() == numel
    assert torch.equal(_output(model), expected)


def test_a_step_moves_tied_parameters_once():
    """The norm after a step of SGD is that of the plain model."""
    plain, model = _transformer(tied=True), _transformer(tied=True)
    handle = _flatten(model)
    for one, params in ((plain, list(plain.parameters())), (model, [handle.flat_param])):
        optimizer = torch.optim.SGD(params, lr=0.01)
        _output(one).sum().backward()
        optimizer.step()
    expected = torch.cat([param.detach().flatten() for param in plain.parameters()]).norm()
    torch.testing.assert_close(handle.flat_param.norm(), expected)


@pytest.mark.parametrize(
    ("start", "end", "names", "offsets"),
    [
        (0, 0, ["0.weight"], [(0, 0)]),
        (0, 50, ["0.weight"], [(0, 50)]),
        (50, 149, ["0.weight", "1.weight"], [(50, 99), (0, 49)]),
        (100, 1000, ["1.weight", "2.weight"], [(0, 99), (0, 99)]),
        (299, 299, ["2.weight"], [(99, 99)]),
    ],
)
def test_shard_metadata_unaligned(start, end, names, offsets):
    """300 elements without padding."""
    handle = _flatten(_linears(10, 10, 10, 10))
    handle.flat_param._shard_param_infos = handle._get_shard_metadata(start, end)
    shapes, numels = [(10, 10)] * len(names), [100] * len(names)
    expected = FlatParamShardMetadata(names, shapes, numels, offsets)
    assert handle.shard_metadata() == expected


@pytest.mark.parametrize(
    ("sizes", "dtype", "parts"),
    [
        (
            (3, 7, 5, 5),
            None,  # 21 + (3) + 35 + (1) + 25 = 85
            [(0, 42, [(0, 20), (0, 18)]), (43, 85, [(19, 34), (0, 24)])],
        ),
        (
            (2, 5, 5, 3),
            torch.float16,  # 10 + (6) + 25 + (7) + 15 = 63
            [(0, 31, [(0, 9), (0, 15)]), (32, 63, [(16, 24), (0, 14)])],
        ),
    ],
)
def test_shard_metadata_aligned(sizes, dtype, parts):
    """Padding counts for positions and appears in no field."""
    handle = _flatten(_linears(*sizes), use_orig_params=True, mp_param_dtype=dtype)
    for start, end, offsets in parts:
        handle.flat_param._shard_param_infos = handle._get_shard_metadata(start, end)
        assert handle.shard_metadata().param_offsets == tuple(offsets)


def test_shard_metadata_records_memory_format():
    """Channels-last kernels keep stride and the fact that they were not contiguous."""
    model = nn.Sequential(nn.Conv2d(10, 20, 1, bias=False)).to(memory_format=torch.channels_last)
    handle = _flatten(model)
    handle.shard()
    assert handle.shard_metadata().param_strides == ((10, 1, 10, 10),)
    assert handle.shard_metadata().param_contiguities == (False,)
    assert model[0].weight.stride() == (10, 1, 10, 10)


def test_gradients_reach_the_flat_parameter(mlp):
    """Bit for bit those of the plain module, one after another."""
    plain = copy.deepcopy(mlp)
    handle = _flatten(mlp)
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
def test_every_kind_of_tensor_keeps_its_values(holder, tensors, use_orig_params):
    """torch corrupts the first, and refuses the others or computes nonsense."""
    expected = [tensor.tolist() for tensor in tensors]
    module = holder(*tensors)
    _flatten(module, use_orig_params=use_orig_params)
    assert [getattr(module, f"p{i}").tolist() for i in range(len(tensors))] == expected


def test_padding_is_zero_and_out_of_the_norm(mlp):
    """The norm of the flat parameter is that of the parameters."""
    true = torch.cat([param.detach().flatten() for param in mlp.parameters()]).norm()
    handle = _flatten(mlp, use_orig_params=True, process_group=Group(0, 2))
    assert handle.flat_param.numel() == 72
    torch.testing.assert_close(handle.flat_param.norm(), true)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_shard_unshard_reshard_without_a_group(mlp, use_orig_params):
    """One rank alone goes through the whole cycle, twice each, and computes the same."""
    x = torch.randn(2, 5)
    expected = mlp(x)
    handle = _flatten(mlp, use_orig_params=use_orig_params, offload_params=True)
    handle.shard()
    handle.init_flat_param_attributes()
    for _ in range(2):
        assert handle.pre_unshard() is False
        handle.unshard()
        handle.post_unshard()
        assert torch.equal(mlp(x), expected)
        handle.reshard(True)
        handle.reshard(True)
        handle.post_reshard()
    assert not handle.needs_unshard()


@pytest.mark.parametrize("trained", [False, True])
def test_a_flat_parameter_is_trained_where_any_of_its_parameters_is(mlp, trained):
    """Frozen alone, it is frozen; with original parameters kept, one is enough."""
    mlp.requires_grad_(False)
    mlp[2].bias.requires_grad_(trained)
    assert _flatten(mlp, use_orig_params=True).flat_param.requires_grad is trained


def test_low_precision_is_for_the_whole_and_full_precision_for_the_shard(mlp):
    """Unsharded in bfloat16, sharded in float32."""
    handle = _flatten(mlp, mp_param_dtype=torch.bfloat16)
    handle.shard()
    handle.init_flat_param_attributes()
    assert handle.pre_unshard()
    handle.unshard()
    assert mlp[0].weight.dtype == torch.bfloat16
    handle.reshard(True)
    assert handle.flat_param.dtype == torch.float32


def test_shards_of_two_ranks_make_the_whole(mlp):
    """Each rank keeps its half, frees the rest, and names what it holds."""
    whole = torch.cat([param.detach().flatten() for param in mlp.parameters()])
    halves = []  # 66 elements: 33 of the first weight; its last 2, then 7, 21 and 3
    held = [["0.weight"], ["0.weight", "0.bias", "2.weight", "2.bias"]]
    for rank in range(2):
        model = copy.deepcopy(mlp)
        params = list(model.parameters())
        handle = _flatten(model, process_group=Group(rank, 2))
        handle.shard()
        halves.append(handle.flat_param.detach())
        assert handle.is_sharded(handle.flat_param)
        assert not any(param.numel() for param in params)
        assert handle._fqns_in_shard == held[rank]
    assert torch.equal(torch.cat(halves)[:66], whole)


def test_original_parameters_come_back_as_shards(mlp):
    """With `use_orig_params`, each parameter object holds its part, flat, or nothing."""
    params = list(mlp.parameters())
    handle = _flatten(mlp, use_orig_params=True, process_group=Group(0, 2))
    handle.shard()
    assert [param.numel() for param in params] == [35, 0, 0, 0]
    assert mlp[0].weight is params[0]


def test_no_shard_keeps_the_whole(mlp):
    """NO_SHARD has one shard, everything, on any number of ranks."""
    handle = _flatten(mlp, sharding_strategy=Strategy.NO_SHARD, process_group=Group(1, 4))
    handle.shard()
    handle.reshard(True)
    assert handle.shard_metadata().param_names == ("0.weight", "0.bias", "2.weight", "2.bias")
    assert not handle.is_sharded(handle.flat_param)


def test_unflatten_as_params_is_a_parenthesis(mlp):
    """Inside there are parameters, outside there are tensors."""
    handle = _flatten(mlp)
    with handle.unflatten_as_params():
        assert [name for name, _ in mlp.named_parameters()] == list(handle.flat_param._fqns)
    assert list(mlp.named_parameters()) == []


def test_flatten_tensors_lays_out_like_the_parameter(mlp):
    """A state of the parameters' shapes is flattened to the flat parameter's layout."""
    tensors = [param.detach().clone() for param in mlp.parameters()]
    handle = _flatten(mlp, use_orig_params=True)
    assert torch.equal(handle.flatten_tensors(tensors, 4)[:71], handle.flat_param[:71])
    made = handle.flatten_tensors_into_flat_param(tensors, 0, requires_grad=False)
    assert isinstance(made, FlatParameter)
    assert made.shape == (66,)


def test_moving_the_flat_parameter_moves_the_views(mlp):
    """`flat_param_to` renews what the module sees."""
    handle = _flatten(mlp)
    handle.flat_param_to(torch.float64)
    assert mlp[0].weight.dtype == torch.float64


def test_tied_places_are_listed():
    """Names of first and further places."""
    model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 4, bias=False))
    model[1].weight = model[0].weight
    handle = _flatten(model)
    assert list(handle.param_module_names()) == [("weight", "0"), ("weight", "1")]
    assert list(handle.shared_param_module_names()) == [("weight", "1")]
    assert model[1].weight is model[0].weight
    assert repr(handle) == "FlatParamHandle(flat_param.fqns=('0.weight',))"


def test_a_deep_copy_is_flat_and_apart(mlp):
    """torch refuses to copy a flattened module."""
    handle = _flatten(mlp)
    mlp.register_parameter("_flat_param", handle.flat_param)
    twin = copy.deepcopy(mlp)
    x = torch.randn(2, 5)
    assert torch.equal(twin(x), mlp(x))
    twin(x).sum().backward()
    assert twin._flat_param.grad is not None
    assert mlp._flat_param.grad is None


def test_a_saved_flat_parameter_knows_its_parts(mlp):
    """Names, shapes and layout survive saving and copying."""
    flat = _flatten(mlp).flat_param
    file = io.BytesIO()
    torch.save(flat, file)
    file.seek(0)
    for copied in (torch.load(file, weights_only=False), copy.deepcopy(flat)):
        assert isinstance(copied, FlatParameter)
        assert copied._fqns == flat._fqns
        assert copied._layout == flat._layout
        assert torch.equal(copied, flat)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("by", ["data", "object"])
def test_replaced_original_parameters_are_taken_in(mlp, world_size, by):
    """A value put in a parameter's place between steps is there when the module is whole again."""
    strategy = Strategy.NO_SHARD if world_size == 1 else Strategy.FULL_SHARD
    handle = _flatten(
        mlp, sharding_strategy=strategy, use_orig_params=True, process_group=Group(0, world_size)
    )
    handle.shard()
    handle.init_flat_param_attributes()
    held = mlp[0].weight
    value = torch.full_like(held, 2.0)
    if by == "data":
        held.data = value
    else:
        mlp[0].weight = nn.Parameter(value)
    assert handle._writeback_orig_params()
    assert not handle._writeback_orig_params()
    assert torch.equal(handle.flat_param[: value.numel()], value.flatten())
    handle.flat_param.data.mul_(2)
    assert torch.equal(mlp[0].weight, 2 * value)


def test_unshard_takes_in_what_was_replaced(mlp):
    """The forward computes with it."""
    handle = _flatten(mlp, sharding_strategy=Strategy.NO_SHARD, use_orig_params=True)
    handle.shard()
    mlp[2].weight.data = torch.zeros(3, 7)
    handle.unshard()
    assert torch.equal(mlp(torch.ones(1, 5))[0], mlp[2].bias)


def test_a_replaced_parameter_of_another_shape_is_refused(mlp):
    """In the source's words, and with its name; the flat parameter keeps its values."""
    handle = _flatten(mlp, sharding_strategy=Strategy.NO_SHARD, use_orig_params=True)
    handle.shard()
    before = handle.flat_param.detach().clone()
    mlp[0].weight = nn.Parameter(torch.ones(2))
    with pytest.raises(
        ParameterError, match=r"Cannot writeback when the parameter shape changes\n.*0\.weight"
    ):
        handle.unshard()
    assert torch.equal(handle.flat_param, before)
