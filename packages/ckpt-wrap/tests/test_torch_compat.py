"""Each private name of torch gives what its public fallback gives."""

from __future__ import annotations

import contextlib
import types
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.utils.checkpoint import (
    set_checkpoint_debug_enabled,
    set_checkpoint_early_stop,
)

from ckpt_wrap import _torch_compat as compat

SAVERS = [compat.save_tensor, compat.SavedByNode]


@pytest.mark.parametrize("save", SAVERS)
def test_a_saved_tensor_comes_back_with_its_graph(save):
    """The same storage, requires_grad and grad_fn."""
    leaf = torch.ones(2, requires_grad=True)
    for tensor in (leaf, leaf * 2, torch.ones(2)):
        back = save(tensor).unpack()
        assert back.data_ptr() == tensor.data_ptr()
        assert (back.requires_grad, back.grad_fn) == (tensor.requires_grad, tensor.grad_fn)


@pytest.mark.parametrize("save", SAVERS)
def test_a_saved_tensor_is_version_checked_and_seen_by_hooks(save):
    """In-place changes raise, and saved-tensor hooks around see the tensor."""
    tensor = torch.ones(2)
    saved = save(tensor)
    tensor.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.unpack()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: "away", lambda packed: tensor * 3):
        saved = save(tensor)
    assert torch.equal(saved.unpack(), tensor * 3)


def test_storage_keys_are_equal_for_views_only():
    """Views share a key; other tensors do not."""
    tensor, other = torch.ones(4), torch.ones(4)
    keys = [compat.storage_key(t) for t in (tensor, tensor[1:], other)]
    assert keys[0] == keys[1]
    assert hash(keys[0]) == hash(keys[1])
    assert keys[0] != keys[2]


def test_without_dynamo_names_frames_stay_as_they_are(monkeypatch):
    """Export is seen by the public name, and the decorators return the function."""
    monkeypatch.delattr(torch.compiler, "_is_exporting_flag")
    monkeypatch.setattr(torch._C, "_dynamo", None)
    assert compat._find_is_exporting() is torch.compiler.is_exporting
    monkeypatch.setattr(compat, "_skip_frames", compat._find_skip_frames())
    for decorate in (compat.never_compiled, compat.never_compiled_inside):
        assert decorate(contexts_off) is contexts_off


def contexts_off():
    """A function to decorate."""


def test_missing_private_names_leave_the_fallbacks(monkeypatch):
    """Without torch's names, the finders return the public versions."""
    monkeypatch.delattr(torch._C._autograd, "_make_saved_tensor", raising=False)
    assert compat._find_saver() is compat.SavedByNode
    monkeypatch.delattr(torch._C, "_DisableTorchDispatch", raising=False)
    assert compat._find_no_dispatch() is contextlib.nullcontext
    assert compat._always()
    assert compat._nothing() is None


def test_overrides_are_read():
    """The context managers of torch.utils.checkpoint are seen."""
    assert compat.early_stop_override() is None
    assert compat.debug_override() is None
    with set_checkpoint_early_stop(False), set_checkpoint_debug_enabled(True):
        assert compat.early_stop_override() is False
        assert compat.debug_override() is True


def test_function_modes_are_noticed():
    """A default device set by a context shows."""
    assert not compat.may_have_function_mode()
    with torch.device("meta"):
        assert compat.may_have_function_mode()


def test_transforms_are_noticed():
    """`torch.func` shows while it differentiates."""
    assert compat.active_transform() is None
    seen = []
    torch.func.vmap(lambda x: seen.append(compat.active_transform()) or x)(torch.ones(2))
    assert seen[0] is not None


def test_edges_list_every_alias():
    """A shared child is listed under each name; without torch's dict, under the first."""
    shared = nn.ReLU()
    model = nn.Sequential(shared, shared)
    assert [name for name, _ in compat.edges(model)] == ["0", "1"]

    class Plain:
        named_children = staticmethod(partial(iter, [("a", shared)]))

    assert list(compat.edges(Plain())) == [("a", shared)]


def test_torchs_policies_run():
    """A policy object of torch's is recognised and asked."""
    model = nn.Sequential(nn.ReLU())
    policy = CustomPolicy(lambda m: isinstance(m, nn.ReLU) and {"a": 1})
    assert compat.is_torch_policy(policy)
    assert not compat.is_torch_policy(len)
    assert compat.run_torch_policy(policy, model) == {model[0]: {"a": 1}}


def test_versions_and_parameter_views():
    """In-place changes count; views of parameters are told from other tensors."""
    tensor = torch.ones(2)
    before = compat.version_of(tensor)
    tensor.add_(1)
    assert compat.version_of(tensor.detach()) == before + 1
    weight = nn.Parameter(torch.ones(2, 2))
    assert compat.is_parameter_view(weight)
    assert compat.is_parameter_view(weight.t())
    assert not compat.is_parameter_view(weight * 1)


def test_tensors_that_count_no_changes_are_never_changed():
    """An inference tensor has no version; 0 stands for it."""
    with torch.inference_mode():
        tensor = torch.ones(2)
    assert compat.version_of(tensor) == 0
    changed = torch.ones(2).add_(1)
    assert compat.versions_of([tensor, changed]) == [0, compat.version_of(changed)]


def test_selective_contexts_bypass_hooks_where_torch_asks():
    """An answer that was given stays; a torch that does not ask is told nothing."""
    for given, expected in ((None, False), (True, True)):
        context = types.SimpleNamespace(respect_saved_tensors_hooks=given)
        compat.bypass_hooks(context)
        assert context.respect_saved_tensors_hooks is expected
    silent = types.SimpleNamespace()
    compat.bypass_hooks(silent)
    assert not vars(silent)


def test_what_fully_shard_makes_is_told_by_where_its_class_comes_from():
    """Without importing FSDP2."""
    sharded = type(
        "FSDPLinear", (nn.Linear,), {"__module__": "torch.distributed.fsdp._fully_shard"}
    )
    assert compat.is_sharded(sharded(1, 1))
    assert not compat.is_sharded(nn.Linear(1, 1))
