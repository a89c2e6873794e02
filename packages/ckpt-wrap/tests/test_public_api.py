"""The public surface, and what importing it costs."""

from __future__ import annotations

import inspect
import subprocess
import sys
import typing

import torch.distributed.algorithms._checkpoint.checkpoint_wrapper as source

import ckpt_wrap

PUBLIC = [
    "ActivationWrapper",
    "CheckpointImpl",
    "CheckpointWrapper",
    "CkptWrapError",
    "ModuleError",
    "ModuleInfo",
    "OffloadError",
    "OffloadOptions",
    "OffloadStats",
    "OffloadWrapper",
    "OptionError",
    "Plan",
    "Policy",
    "PolicyError",
    "RecomputeError",
    "Step",
    "apply_activation_checkpointing",
    "by_class",
    "by_function",
    "by_name",
    "by_size",
    "checkpoint_",
    "checkpoint_wrapper",
    "clean_name",
    "clean_state_dict",
    "every_nth",
    "is_recomputing",
    "make_plan",
    "offload_",
    "offload_stats",
    "offload_wrapper",
    "unwrap",
]


def test_the_surface_is_this():
    """`__all__` is sorted and has these names, each documented."""
    assert ckpt_wrap.__all__ == sorted(ckpt_wrap.__all__)
    assert sorted(PUBLIC) == sorted(ckpt_wrap.__all__)
    assert all(getattr(ckpt_wrap, name).__doc__ for name in PUBLIC)


def test_drop_in_names_have_the_sources_parameters():
    """Same parameter names in the same order, and the same defaults."""
    for name in (
        "checkpoint_wrapper",
        "offload_wrapper",
        "apply_activation_checkpointing",
        "CheckpointWrapper",
        "OffloadWrapper",
    ):
        ours = inspect.signature(getattr(ckpt_wrap, name)).parameters
        theirs = inspect.signature(getattr(source, name)).parameters
        assert list(ours) == list(theirs), name
        assert [p.kind for p in ours.values()] == [p.kind for p in theirs.values()], name


def test_public_functions_are_annotated():
    """Every parameter and result has a type."""
    for name in PUBLIC:
        function = getattr(ckpt_wrap, name)
        if inspect.isfunction(function):
            hints = typing.get_type_hints(function)
            assert "return" in hints, name
            assert set(inspect.signature(function).parameters) <= set(hints), name


def test_import_loads_nothing_but_the_package():
    """Over `import torch`: no module of anyone else's, so neither FSDP nor dynamo."""
    code = (
        "import sys, torch; before = set(sys.modules); import ckpt_wrap\n"
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    ).stdout.split()
    assert loaded == ["ckpt_wrap"]
