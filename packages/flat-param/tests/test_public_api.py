"""The public surface is what this test says it is."""

import ast
import inspect
from pathlib import Path

import flat_param

SURFACE = [
    "CheckpointError",
    "CommCount",
    "CommError",
    "FlatLayout",
    "FlatParamError",
    "FlatParamHandle",
    "FlatParamShardMetadata",
    "FlatParameter",
    "FlatParams",
    "HandleShardingStrategy",
    "LayoutError",
    "MixedPrecision",
    "ParamInfo",
    "ParamSpec",
    "ParameterError",
    "RankBytes",
    "Segment",
    "ShardPart",
    "ShardPlan",
    "ShardedModule",
    "SharedParamInfo",
    "StateError",
    "Strategy",
    "TrainingPlan",
    "UnitShape",
    "VectorError",
    "collect_params",
    "flat_params_of",
    "flatten",
    "full_state_dict",
    "fully_shard",
    "load_full_state_dict",
    "load_sharded",
    "optimizer_state_by_position",
    "parts_between",
    "plan_layout",
    "plan_segments",
    "plan_shard",
    "plan_training",
    "reshard_checkpoint",
    "save_sharded",
    "unflatten",
    "unit_shapes",
]


def test_the_surface_is_frozen_and_sorted():
    """A name comes or goes with this list."""
    assert flat_param.__all__ == SURFACE
    assert sorted(SURFACE) == SURFACE
    assert flat_param.__version__


def test_every_public_name_is_documented():
    """Classes, their public methods, and functions say what they are."""
    for name in SURFACE:
        value = getattr(flat_param, name)
        assert inspect.getdoc(value), name
        for member, method in vars(value).items() if inspect.isclass(value) else ():
            if inspect.isfunction(method) and not member.startswith("_"):
                assert inspect.getdoc(method), f"{name}.{member}"


def test_the_package_file_holds_no_logic():
    """A docstring, imports, `__all__` and the version."""
    tree = ast.parse(Path(flat_param.__file__).read_text(encoding="utf-8"))
    kinds = {type(node).__name__ for node in tree.body}
    assert kinds == {"Expr", "ImportFrom", "Assign"}
