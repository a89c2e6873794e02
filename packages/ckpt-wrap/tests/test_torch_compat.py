"""Each private name of torch behaves as its public fallback."""

from __future__ import annotations

import contextlib
import types

import pytest
import torch

from ckpt_wrap import _torch_compat as compat

SAVERS = [compat.save_tensor, compat.SavedByNode]


@pytest.mark.parametrize("save", SAVERS)
def test_a_saved_tensor_comes_back_with_its_graph(save):
    """It has the same storage, requires_grad and grad_fn."""
    leaf = torch.ones(2, requires_grad=True)
    for tensor in (leaf, leaf * 2, torch.ones(2)):
        back = save(tensor).unpack()
        assert back.data_ptr() == tensor.data_ptr()
        assert (back.requires_grad, back.grad_fn) == (tensor.requires_grad, tensor.grad_fn)


@pytest.mark.parametrize("save", SAVERS)
def test_a_saved_tensor_is_version_checked_and_seen_by_hooks(save):
    """In-place changes raise, and outer saved-tensor hooks see the tensor."""
    tensor = torch.ones(2)
    saved = save(tensor)
    tensor.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.unpack()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: "away", lambda packed: tensor * 3):
        saved = save(tensor)
    assert torch.equal(saved.unpack(), tensor * 3)


def test_missing_private_names_leave_the_fallbacks(monkeypatch):
    """Without torch's private names, the finders return the public versions."""
    monkeypatch.delattr(torch._C._autograd, "_make_saved_tensor", raising=False)
    assert compat._find_saver() is compat.SavedByNode
    monkeypatch.delattr(torch._C, "_DisableTorchDispatch", raising=False)
    assert compat._find_no_dispatch() is contextlib.nullcontext


def test_selective_contexts_bypass_hooks_where_torch_asks():
    """A context's existing setting is kept; a torch version without the setting is unaffected."""
    for given, expected in ((None, False), (True, True)):
        context = types.SimpleNamespace(respect_saved_tensors_hooks=given)
        compat.bypass_hooks(context)
        assert context.respect_saved_tensors_hooks is expected
    silent = types.SimpleNamespace()
    compat.bypass_hooks(silent)
    assert not vars(silent)
