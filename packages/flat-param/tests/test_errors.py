"""Every raise of the one-process side and the drop-in, by its text."""

import pytest
import torch
from torch import nn

import flat_param as fp
from flat_param.handle import HandleShardingStrategy as Strategy

F32 = torch.float32


def test_leaves_are_also_the_standard_errors():
    """Code that catches ValueError or RuntimeError keeps working."""
    for leaf in (fp.ParameterError, fp.LayoutError, fp.VectorError):
        assert issubclass(leaf, (fp.FlatParamError, ValueError))
        assert issubclass(leaf, ValueError)
    for leaf in (fp.StateError, fp.CommError, fp.CheckpointError):
        assert issubclass(leaf, RuntimeError)
        assert issubclass(leaf, fp.FlatParamError)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: fp.plan.plan_layout([]), "flat_param.plan_layout: specs is empty, but"),
        (
            lambda: fp.plan.plan_layout([fp.plan.ParamSpec("w", (1,), F32)], align_bytes=12),
            "align_bytes is 12, but it must be a power of two",
        ),
        (
            lambda: fp.plan.plan_layout(
                [fp.plan.ParamSpec("a", (1,), F32), fp.plan.ParamSpec("b", (1,), torch.float16)]
            ),
            "'b' is torch.float16 and 'a' torch.float32, but one buffer has one dtype",
        ),
        (
            lambda: fp.plan.plan_shard(
                fp.plan.plan_layout([fp.plan.ParamSpec("w", (1,), F32)]), world_size=0
            ),
            "world_size is 0, but at least one rank is needed",
        ),
        (
            lambda: fp.plan.plan_shard(
                fp.plan.plan_layout([fp.plan.ParamSpec("w", (1,), F32)]),
                world_size=1,
                boundary="col",
            ),
            "boundary is 'col', but it must be one of element, row, tensor, or Blocks",
        ),
    ],
)
def test_bad_plans_are_layout_errors(call, words):
    """A plan that cannot exist says what was asked for and what to do."""
    with pytest.raises(fp.LayoutError, match=words):
        call()


def test_flatten_refuses_a_module_without_parameters():
    """There is nothing to flatten in a ReLU."""
    with pytest.raises(fp.ParameterError, match=r"ReLU has no parameters, but at least"):
        fp.flatten(nn.ReLU())


def test_flatten_refuses_lazy_parameters():
    """They have no shape before the first forward."""
    with pytest.raises(fp.ParameterError, match=r"parameter '0\.weight' has no shape yet"):
        fp.flatten(nn.Sequential(nn.LazyLinear(3)))


@pytest.mark.parametrize("numel", [3, 80])
def test_functional_call_refuses_a_vector_of_another_size(mlp, numel):
    """Too short or too long, before anything is computed."""
    text = rf"shape \({numel},\), but segment 'float32' has \(72,\)"
    with pytest.raises(fp.VectorError, match=text):
        fp.flatten(mlp).functional_call(torch.ones(numel), torch.ones(1, 5))


def test_flatten_refuses_two_devices(mlp):
    """Both parameters and both devices are named, and nothing has moved."""
    mlp[2].to("meta")
    before = mlp[0].weight.data_ptr()
    with pytest.raises(fp.ParameterError, match=r"'2.weight' is on meta and '0.weight' on cpu"):
        fp.flatten(mlp)
    assert mlp[0].weight.data_ptr() == before


@pytest.mark.parametrize("again", [lambda m: m, lambda m: m[0], lambda m: nn.Sequential(m)])
def test_flatten_refuses_what_is_flat_already(mlp, again):
    """Neither the same module, nor a part of it, nor what contains it is flattened twice."""
    flat = fp.flatten(mlp)
    with pytest.raises(fp.StateError, match="is flattened already"):
        fp.flatten(again(mlp))
    assert flat.numel == 72


def test_vectors_of_another_size_are_refused_and_nothing_changes(mlp):
    """A wrong vector does not change the parameters."""
    flat = fp.flatten(mlp)
    before = flat.as_vector().clone()
    with pytest.raises(fp.VectorError, match=r"vector has shape \(3,\), but segment 'float32'"):
        flat.load_vector(torch.ones(3))
    assert torch.equal(flat.as_vector(), before)


def test_an_ambiguous_or_unknown_segment_is_refused(mlp):
    """The message lists what there is."""
    mlp[2].bfloat16()
    flat = fp.flatten(mlp)
    with pytest.raises(
        fp.VectorError, match=r"segment None matches 2 of \['float32', 'bfloat16'\]"
    ):
        flat.as_vector()
    with pytest.raises(fp.VectorError, match="segment 'int8' matches 0"):
        flat.as_vector("int8")
    with pytest.raises(fp.VectorError, match="got 1 vectors, but the module has 2 trainable"):
        flat.functional_call(torch.ones(3), torch.ones(1, 5))


def test_a_frozen_segment_has_no_gradient(mlp):
    """Asking for it says so."""
    flat = fp.flatten(mlp.requires_grad_(False))
    with pytest.raises(fp.StateError, match=r"'float32.frozen' is frozen, but only a trainable"):
        flat.grad_vector()


def test_lerp_refuses_another_layout(mlp):
    """Nothing is averaged with a module of other parameters."""
    flat, other = fp.flatten(mlp), fp.flatten(nn.Linear(8, 8))
    before = flat.as_vector().clone()
    with pytest.raises(fp.VectorError, match="have different layouts, but they must match"):
        flat.lerp_(other, 0.5)
    assert torch.equal(flat.as_vector(), before)


def test_chunks_need_an_element(mlp):
    """A chunk of nothing is refused."""
    flat = fp.flatten(mlp)
    for numel in (0, "big"):
        with pytest.raises(fp.VectorError, match=f"numel is {numel!r}, but a chunk has a whole"):
            flat.chunks(numel)


def test_chunks_refuse_another_plan(mlp):
    """The state of an optimizer would be of other elements; a new optimizer is needed."""
    flat = fp.flatten(mlp)
    leaves = flat.chunks(16)
    mlp[0].requires_grad_(False)
    words = "segments changed, but chunks are in use"
    with pytest.raises(fp.StateError, match=words):
        mlp.double()
    assert len(leaves) == 5
    layer = nn.Conv2d(4, 4, 3)
    optimizer = torch.optim.SGD(fp.flatten(layer).chunks(), momentum=0.9)
    with pytest.raises(fp.StateError, match=words):
        layer.to(memory_format=torch.channels_last)
    with pytest.raises(fp.StateError, match=words):
        optimizer.step()


def _handle(**changes):
    layer = nn.Linear(2, 2)
    arguments = {"params": list(layer.parameters()), "fully_sharded_module": layer} | changes
    return fp.handle.FlatParamHandle(**arguments)


def test_the_handle_keeps_the_sentences_of_the_source(holder):
    """What torch says, word for word, where torch is right."""
    with pytest.raises(
        ValueError, match="Cannot construct a FlatParamHandle with an empty parameter list"
    ):
        _handle(params=[])
    mixed = holder(torch.ones(2), torch.ones(2, dtype=torch.float16))
    words = "uniform dtype but got torch.float32 and torch.float16"
    with pytest.raises(ValueError, match=words):
        fp.handle.FlatParamHandle(list(mixed.parameters()), mixed)
    ints = holder(torch.ones(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="Cannot flatten integer dtype tensors"):
        fp.handle.FlatParamHandle(list(ints.parameters()), ints)
    frozen = holder(torch.ones(2), nn.Parameter(torch.ones(2), requires_grad=False))
    with pytest.raises(ValueError, match="uniform `requires_grad` when `use_orig_params=False`"):
        fp.handle.FlatParamHandle(list(frozen.parameters()), frozen)
    devices = holder(torch.ones(2), torch.ones(2, device="meta"))
    with pytest.raises(ValueError, match="on the same device but got both cpu and meta"):
        fp.handle.FlatParamHandle(list(devices.parameters()), devices)
    handle = _handle()
    nest = nn.Module()
    nest.register_parameter("flat", handle.flat_param)
    with pytest.raises(ValueError, match="Cannot flatten a `FlatParameter`"):
        fp.handle.FlatParamHandle([handle.flat_param], nest)


def test_the_handle_refuses_an_extension():
    """Tensor-parallel hooks are not silently dropped."""
    with pytest.raises(fp.ParameterError, match="fsdp_extension is given, but"):
        _handle(fsdp_extension=object())


def test_a_sharded_module_is_not_copied():
    """A part of the parameters cannot make a whole copy."""
    import copy

    class Group:
        def rank(self):
            return 0

        def size(self):
            return 2

    handle = _handle(process_group=Group(), sharding_strategy=Strategy.FULL_SHARD)
    handle.shard()
    with pytest.raises(
        fp.StateError, match="the module is sharded, but unflatten_as_params needs whole"
    ):
        copy.deepcopy(handle._fully_sharded_module)


def test_fully_shard_without_a_process_group_names_the_other_way():
    """With one process, `flatten` is the function to call."""
    with pytest.raises(
        fp.StateError, match=r"there is no process group.*use flat_param\.flatten\."
    ):
        fp.fully_shard(nn.Linear(2, 2))
