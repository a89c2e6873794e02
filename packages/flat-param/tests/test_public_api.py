"""The public surface is what this test says it is."""

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
from dataclasses import is_dataclass
from pathlib import Path

import flat_param

SURFACE = [
    "Blocks",
    "CheckpointError",
    "CommError",
    "FlatParamError",
    "FlatParams",
    "LayoutError",
    "ParameterError",
    "ShardedModule",
    "StateError",
    "VectorError",
    "async_save_sharded",
    "by_name",
    "flat_params_of",
    "flatten",
    "full_state_dict",
    "fully_shard",
    "load_full_state_dict",
    "load_sharded",
    "offload_optimizer",
    "optimizer_state_by_position",
    "save_sharded",
    "unflatten",
]
MODULES = (flat_param, flat_param.plan, flat_param.handle)


def _value(name):
    """A public name of the package or of one of its submodules."""
    return next(getattr(each, name) for each in MODULES if hasattr(each, name))


def test_the_surface_is_frozen_and_sorted():
    """A name comes or goes with this list."""
    assert flat_param.__all__ == SURFACE
    for each in MODULES:
        assert sorted(each.__all__) == each.__all__
    assert flat_param.__version__


DEFAULTS = {
    "FlatParamHandle": {
        "device": None,
        "sharding_strategy": flat_param.handle.HandleShardingStrategy.FULL_SHARD,
        "offload_params": False,
        "mp_param_dtype": None,
        "mp_reduce_dtype": None,
        "keep_low_precision_grads": False,
        "process_group": None,
        "use_orig_params": False,
        "fsdp_extension": None,
    },
    "ParamSpec": {"stride": (), "requires_grad": True, "aliases": ()},
    "collect_params": {"ignored": ()},
    "flatten": {"align_bytes": 16},
    "full_state_dict": {"optimizer": None, "rank0_only": False, "offload_to_cpu": False},
    "fully_shard": {
        "mesh": None,
        "reshard_after_forward": True,
        "mp_policy": None,
        "offload_policy": None,
        "ignored_params": None,
        "boundary": "element",
        "init_fn": None,
        "sync_module_states": False,
        "shard_placement_fn": None,
    },
    "async_save_sharded": {"optimizer": None, "step": None},
    "by_name": {"default": "element", "missing_ok": False},
    "offload_optimizer": {"folder": None, "bucket_numel": 1 << 22},
    "load_full_state_dict": {"optimizer": None},
    "load_sharded": {"optimizer": None},
    "plan_layout": {"align_bytes": 16, "multiple": None},
    "plan_segments": {"align_bytes": 16},
    "plan_shard": {"boundary": "element"},
    "plan_training": {
        "replicas": 1,
        "reshard_after_forward": True,
        "mp_policy": None,
        "boundary": "element",
        "state_tensors": 2,
        "microbatches": 1,
    },
    "save_sharded": {"optimizer": None, "step": None},
    "unit_shapes": {"units": ()},
}


def test_options_left_out_mean_this():
    """A call that names none keeps its meaning; what has no default must be given."""
    for name, expected in DEFAULTS.items():
        parameters = inspect.signature(_value(name)).parameters.values()
        found = {p.name: p.default for p in parameters if p.default is not p.empty}
        assert found == expected, name
    optional = {
        name
        for each in MODULES
        for name, value in vars(each).items()
        if name in each.__all__
        and inspect.isfunction(value)
        and any(p.default is not p.empty for p in inspect.signature(value).parameters.values())
    }
    assert optional <= set(DEFAULTS)


def test_every_public_name_is_documented():
    """Classes, their public methods, and functions say what they are."""
    for name in (name for each in MODULES for name in each.__all__):
        value = _value(name)
        assert inspect.getdoc(value), name
        for member, method in vars(value).items() if inspect.isclass(value) else ():
            if inspect.isfunction(method) and not member.startswith("_"):
                assert inspect.getdoc(method), f"{name}.{member}"


def test_the_package_file_holds_no_logic():
    """A docstring, imports, `__all__` and the version."""
    tree = ast.parse(Path(flat_param.__file__).read_text(encoding="utf-8"))
    kinds = {type(node).__name__ for node in tree.body}
    assert kinds == {"Expr", "ImportFrom", "Assign"}


def test_plans_and_layouts_cannot_be_changed() -> None:
    """They are shared by units and ranks; what a rank does meanwhile is noted elsewhere."""
    found = set()
    for item in pkgutil.walk_packages(flat_param.__path__, "flat_param."):
        members = vars(importlib.import_module(item.name)).values()
        ours = (kind for kind in members if getattr(kind, "__module__", "") == item.name)
        found |= {kind for kind in ours if inspect.isclass(kind) and is_dataclass(kind)}
    changeable = {kind.__name__ for kind in found if not kind.__dataclass_params__.frozen}
    assert {
        flat_param.plan.TrainingPlan,
        flat_param.plan.FlatLayout,
        flat_param.plan.ShardPlan,
    } <= found
    assert changeable == {
        *("BackwardPass", "ForwardPass", "UnitBackward"),
        *("CommLog", "Pending", "Trail"),
    }


def test_import_loads_nothing_but_the_package():
    """Over `import torch`, and the standard library.

    DTensor and sympy, which come with torch.distributed.checkpoint, wait for a save.
    """
    code = (
        "import sys, torch; before = set(sys.modules); import flat_param\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    ).stdout.split()
    known = {"flat_param", *sys.stdlib_module_names}
    assert [name for name in loaded if name.partition(".")[0] not in known] == []
