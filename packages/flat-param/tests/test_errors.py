"""Every raise of the one-process side and the drop-in, by its text."""

import pytest
import torch
from torch import nn

import flat_param as fp
from flat_param.plan import ParamSpec, plan_layout, plan_shard

WEIGHT = ParamSpec("w", (1,), torch.float32)
X = torch.ones(1, 5)


def test_leaves_are_also_the_standard_errors():
    """Code that catches ValueError or RuntimeError keeps working."""
    for leaf in (fp.ParameterError, fp.LayoutError, fp.VectorError):
        assert issubclass(leaf, fp.FlatParamError)
        assert issubclass(leaf, ValueError)
    for leaf in (fp.StateError, fp.CommError, fp.CheckpointError):
        assert issubclass(leaf, fp.FlatParamError)
        assert issubclass(leaf, RuntimeError)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: plan_layout([]), "flat_param.plan_layout: specs is empty, but"),
        (
            lambda: plan_layout([WEIGHT], align_bytes=12),
            "align_bytes is 12, but it must be a power of two",
        ),
        (
            lambda: plan_layout([WEIGHT, ParamSpec("b", (1,), torch.float16)]),
            "'b' is torch.float16 and 'w' torch.float32, but one buffer has one dtype",
        ),
        (
            lambda: plan_shard(plan_layout([WEIGHT]), world_size=0),
            "world_size is 0, but at least one rank is needed",
        ),
        (
            lambda: plan_shard(plan_layout([WEIGHT]), world_size=1, boundary="col"),
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


SIZE = "has shape \\({},\\), but segment 'float32' has \\(72,\\)"
MISUSES = [
    *(
        (lambda flat, numel=n: flat.functional_call(torch.ones(numel), X), fp.VectorError, text)
        for n, text in ((3, SIZE.format(3)), (80, SIZE.format(80)))
    ),
    (lambda flat: flat.load_vector(torch.ones(3)), fp.VectorError, f"vector {SIZE.format(3)}"),
    (
        lambda flat: flat.lerp_(fp.flatten(nn.Linear(8, 8)), 0.5),
        fp.VectorError,
        "have different layouts, but they must match",
    ),
    *(
        (lambda flat, n=n: flat.chunks(n), fp.VectorError, f"numel is {n!r}, but a chunk has a")
        for n in (0, "big")
    ),
    *(
        (lambda flat, again=again: fp.flatten(again(flat.module)), fp.StateError, "is flattened a")
        for again in (lambda m: m, lambda m: m[0], nn.Sequential)
    ),
]


@pytest.mark.parametrize(("call", "error", "text"), MISUSES)
def test_misuse_of_a_flat_module_is_refused(mlp, call, error, text):
    """By what it is, before anything has changed."""
    flat = fp.flatten(mlp)
    before = flat.as_vector().clone()
    with pytest.raises(error, match=text):
        call(flat)
    assert flat.numel == 72
    assert torch.equal(flat.as_vector(), before)


def test_flatten_refuses_two_devices(mlp):
    """Both parameters and both devices are named, and nothing has moved."""
    mlp[2].to("meta")
    before = mlp[0].weight.data_ptr()
    with pytest.raises(fp.ParameterError, match=r"'2.weight' is on meta and '0.weight' on cpu"):
        fp.flatten(mlp)
    assert mlp[0].weight.data_ptr() == before


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


def test_chunks_refuse_another_plan():
    """The state of an optimizer would be of other elements; a new optimizer is needed."""
    layer = nn.Conv2d(4, 4, 3)
    optimizer = torch.optim.SGD(fp.flatten(layer).chunks(), momentum=0.9)
    for use in (lambda: layer.to(memory_format=torch.channels_last), optimizer.step):
        with pytest.raises(fp.StateError, match="segments changed, but chunks are in use"):
            use()


def _handle(**changes):
    layer = nn.Linear(2, 2)
    arguments = {"params": list(layer.parameters()), "fully_sharded_module": layer} | changes
    return fp.handle.FlatParamHandle(**arguments)


def test_the_handle_keeps_the_sentences_of_the_source(holder):
    """What torch says, word for word, where torch is right; others in the conformance suite."""
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


def test_fully_shard_without_a_process_group_names_the_other_way():
    """With one process, `flatten` is the function to call."""
    with pytest.raises(
        fp.StateError, match=r"there is no process group.*use flat_param\.flatten\."
    ):
        fp.fully_shard(nn.Linear(2, 2))
