import torch
from torch import nn

from flat_param.buffers._buffer import allocate, migrate, zero_gaps_
from flat_param.plan import collect_params, plan_layout


def test_migrate_keeps_identity_values_and_strides(mlp):
    """Parameters are the objects they were, with the values they had, in one buffer."""
    mlp[0].weight = nn.Parameter(torch.randn(5, 7).t())
    specs, params = collect_params(mlp)
    before = [(param, param.detach().clone(), param.stride()) for param in params]
    buffer = migrate(params, plan_layout(specs))
    for param, value, stride in before:
        assert torch.equal(param, value)
        assert param.stride() == stride
        assert param.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    assert all(now is then for now, (then, _, _) in zip(mlp.parameters(), before, strict=True))


def test_migrate_lets_go_of_each_original_before_the_next(mlp):
    """When a parameter is copied, those before it have given their memory back."""
    specs, params = collect_params(mlp)
    freed = []

    class Watched(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.copy_.default:
                freed.append(sum(p.untyped_storage().data_ptr() == home() for p in params))
            return func(*args, **(kwargs or {}))

    buffer = allocate(plan_layout(specs))
    home = buffer.untyped_storage().data_ptr
    with Watched():
        migrate(params, plan_layout(specs), buffer=buffer)
    assert freed == [0, 1, 2, 3]


def test_allocate_zeroes_gaps_and_what_a_shard_plan_adds(mlp):
    """Nothing that belongs to no parameter is left uninitialised."""
    specs, _ = collect_params(mlp)
    layout = plan_layout(specs)
    buffer = allocate(layout, numel=layout.numel + 5)
    assert all(not buffer[start:stop].any() for start, stop in layout.gaps)
    assert not buffer[layout.numel :].any()


def test_zero_gaps_leaves_parameters_alone(mlp):
    """Only what lies between parameters is written."""
    specs, _ = collect_params(mlp)
    layout = plan_layout(specs)
    buffer = zero_gaps_(torch.ones(layout.numel), layout)
    assert int(buffer.sum()) == layout.used_numel


def test_migrate_works_on_the_meta_device():
    """Shapes alone can be flattened, for planning."""
    with torch.device("meta"):
        layer = nn.Linear(3, 5)
    specs, params = collect_params(layer)
    assert migrate(params, plan_layout(specs)).is_meta
