"""Hooks that survive torch.compile."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from mod_tracker import ModTracker, _compile_hooks, compile_safe_hooks

pytestmark = pytest.mark.usefixtures("fresh_compiler")

ORDER = [
    *("pre_fw 0", "post_fw 0", "pre_fw 1", "post_fw 1", "pre_fw 2", "post_fw 2"),
    *("pre_bw 2", "post_bw 2", "pre_bw 1", "post_bw 1", "pre_bw 0", "post_bw 0"),
]


@pytest.fixture
def model():
    """Three layers."""
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


@pytest.fixture
def hooks():
    """All four hooks, and the list they write to."""
    log = []

    def write(kind):
        return lambda name, *_: log.append(f"{kind} {name}")

    kinds = ("pre_fw", "post_fw", "pre_bw", "post_bw")
    return {f"{kind}_hook": write(kind) for kind in kinds}, log


@pytest.mark.parametrize("compiled", [False, True])
def test_four_hooks_fire_in_order(compiled, model, x, hooks):
    """Forward and backward, eager and compiled: the same events; the root is not hooked."""
    given, log = hooks
    with ModTracker.compile_safe_hooks(model, **given):
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        run(x).sum().backward()
        assert log == ORDER
        run(x).sum().backward()
    assert log == ORDER * 2


@pytest.mark.parametrize("compiled", [False, True])
def test_values_and_gradients_are_bitwise_equal(compiled, model, x, hooks):
    """The passages copy, and change no bit."""
    leaves = [x, *model.parameters()]
    plain = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    expected = [plain(x), *torch.autograd.grad(plain(x).sum(), leaves)]
    with compile_safe_hooks(model, **hooks[0]):
        found = [plain(x), *torch.autograd.grad(plain(x).sum(), leaves)]
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_filter_chooses_modules(model, x):
    """Only modules for which the filter is true are hooked."""
    names = []
    with compile_safe_hooks(
        model,
        post_fw_hook=lambda name, inputs, outputs: names.append(name),
        module_filter=lambda name, module: isinstance(module, nn.Linear),
    ):
        model(x)
    assert names == ["0", "2"]


def test_post_forward_hook_gets_inputs_and_outputs(model, x):
    """Shapes of what goes in and comes out of each module."""
    shapes = {}

    def write(name, inputs, outputs):
        shapes[name] = [tuple(t.shape) for t in (*inputs, *outputs)]

    with compile_safe_hooks(model, post_fw_hook=write):
        torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    assert shapes == {"0": [(2, 4), (2, 8)], "1": [(2, 8), (2, 8)], "2": [(2, 8), (2, 2)]}


def test_nested_and_mixed_values_pass_through(x):
    """Tuples, lists, dicts, keywords and integers arrive as they were."""

    class Inner(nn.Module):
        def forward(self, pair, *, index, scale):
            return {"sum": (pair[0] + pair[1]["b"]) * scale, "index": index, "none": None}

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            return self.inner((x, {"b": x * 2}), index=torch.arange(2), scale=3)

    model, seen = Net(), []
    with compile_safe_hooks(model, pre_fw_hook=lambda name, inputs: seen.append(len(inputs))):
        output = model(x)
    assert torch.equal(output["sum"], (x + x * 2) * 3)
    assert torch.equal(output["index"], torch.arange(2))
    assert (output["none"], seen) == (None, [2])


def test_model_is_as_before_after_the_block(model, hooks):
    """No hook stays, even if the block ends with an error."""
    with pytest.raises(ZeroDivisionError), compile_safe_hooks(model, **hooks[0]):
        raise ZeroDivisionError
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class Keywords(nn.Module):
    """Takes a tensor by keyword, and a number."""

    def forward(self, x, *, scale, times):
        return x * scale["value"] * times


class CallsKeywords(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Keywords()

    def forward(self, x, scale):
        return self.inner(x, scale={"value": scale}, times=3)


def test_tensors_in_keywords_are_inputs_and_the_rest_is_passed_on():
    """Their gradients come with those of the others; values are what they are without hooks."""
    model, given = CallsKeywords(), []
    x, scale = torch.ones(2, requires_grad=True), torch.full((2,), 5.0, requires_grad=True)
    with compile_safe_hooks(model, post_bw_hook=lambda name, grads: given.append((name, grads))):
        y = model(x, scale)
        y.sum().backward()
    assert y.tolist() == [15.0, 15.0]
    assert [(name, [grad.tolist() for grad in grads]) for name, grads in given] == [
        ("inner", [[15.0, 15.0], [3.0, 3.0]])
    ]


def test_a_call_is_ended_by_its_module_in_its_thread_alone():
    """What another's hook has lost is the last call of this module here, and never another's."""
    running = _compile_hooks._Running()
    one, other = nn.Identity(), nn.Identity()
    given = {name: object() for name in ("one", "again", "other", "away")}
    running.add(one, given["one"])
    running.add(one, given["again"])
    running.add(other, given["other"])
    thread = threading.Thread(target=running.add, args=(one, given["away"]))
    thread.start()
    thread.join()
    assert running.remove(one, None) is given["again"]
    assert running.remove(one, given["one"]) is given["one"]
    assert running.remove(one, None) is None
    assert running.remove(one, given["other"]) is given["other"]
    assert running.remove(other, given["other"]) is given["other"]
    assert running.remove(other, None) is None
