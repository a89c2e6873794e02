"""Properties of all public names, and the cost of importing them."""

from __future__ import annotations

import inspect
import subprocess
import sys

import torch.distributed.algorithms._checkpoint.checkpoint_wrapper as source

import ckpt_wrap


def test_every_public_name_is_documented():
    """Each has a docstring."""
    assert all(getattr(ckpt_wrap, name).__doc__ for name in ckpt_wrap.__all__)


def test_constants_that_code_takes_from_torchs_module_are_here():
    """FSDP and trainers clean names with them."""
    assert ckpt_wrap._CHECKPOINT_PREFIX == source._CHECKPOINT_PREFIX
    assert ckpt_wrap._CHECKPOINT_WRAPPED_MODULE == source._CHECKPOINT_WRAPPED_MODULE


def test_options_are_named_and_have_these_defaults():
    """Options are keyword-only and have the defaults listed in the manual."""
    for name, expected in {
        "offload_": {"to": "cpu", "min_bytes": 1024, "max_bytes_away": None},
        "checkpoint_": {"preserve_rng_state": True, "early_stop": True},
    }.items():
        for function in (name, f"{name.rstrip('_')}_wrapper"):
            parameters = inspect.signature(getattr(ckpt_wrap, function)).parameters
            for option, default in expected.items():
                assert parameters[option].default == default
                assert parameters[option].kind is inspect.Parameter.KEYWORD_ONLY


def test_drop_in_names_have_the_sources_parameters():
    """Parameters have the names, order and defaults of torch's functions."""
    for name in (
        "checkpoint_wrapper",
        "offload_wrapper",
        "apply_activation_checkpointing",
        "CheckpointWrapper",
        "OffloadWrapper",
    ):
        ours = inspect.signature(getattr(ckpt_wrap, name)).parameters
        theirs = inspect.signature(getattr(source, name)).parameters
        named = [p for p in theirs.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        assert list(ours)[: len(named)] == [p.name for p in named], name
        for parameter in named:
            assert ours[parameter.name].kind is parameter.kind, name


def test_import_loads_only_the_package_and_does_no_work():
    """It starts no autograd thread and no device context, and replaces nothing in torch."""
    code = """
import os, sys, threading, torch, torch.utils.checkpoint
def state():
    places = [torch, torch.nn.Module, torch.Tensor, torch.autograd, torch.autograd.graph,
              torch.utils.checkpoint, torch.nn.modules.module]
    tables = [dict(vars(place)) for place in places]
    tasks = "/proc/self/task"
    native = len(os.listdir(tasks)) if os.path.isdir(tasks) else 0
    nodes = torch.autograd._get_sequence_nr()  # grows with each node of a graph
    return tables, native, threading.active_count(), nodes
before, loaded = state(), set(sys.modules)
import ckpt_wrap
[getattr(ckpt_wrap, name) for name in ckpt_wrap.__all__]
new = {name.partition('.')[0] for name in set(sys.modules) - loaded}
assert new == {"ckpt_wrap"}, new  # no FSDP, no dynamo
after = state()
assert before[1:] == after[1:], (before[1:], after[1:])
for then, now in zip(before[0], after[0]):
    changed = [n for n in then.keys() | now.keys() if then.get(n) is not now.get(n)]
    assert not changed, changed
assert not torch.cuda.is_initialized()
"""
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
