"""The one file with private torch names."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import mod_tracker._torch_compat as compat


class Refuses(TorchFunctionMode):
    """Raises at every function of torch."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        raise ZeroDivisionError


def test_function_modes_do_not_see_hooks():
    x, calls = torch.ones(1, requires_grad=True), []
    y = x * 2
    node = y.grad_fn
    with Refuses():
        compat.hook_gradient(node, 0, compat.new_carrier(), calls.append)
    y.backward()
    assert len(calls) == 1


def in_hook(run):
    """Call a function in the middle of a backward."""
    y = torch.ones(1, requires_grad=True) * 2
    y.register_hook(lambda _: run() and None)
    y.backward()


def inside(context):
    """Return a function that runs another one inside a context."""

    def enter(run):
        with context():
            run()

    return enter


WAYS = {
    "inference": inside(torch.inference_mode),
    "no_grad": inside(torch.no_grad),
    "fake": inside(FakeTensorMode),
    "meta": inside(lambda: torch.device("meta")),
    "refusing": inside(lambda: Refuses()),
    "backward": in_hook,
    "vmap": lambda run: torch.func.vmap(lambda x: (run(), x)[1])(torch.ones(2)),
    "grad": lambda run: torch.func.grad(lambda x: (run(), x)[1])(torch.tensor(1.0)),
}


@pytest.mark.parametrize("way", WAYS)
def test_first_carrier_is_a_plain_tensor_under_any_mode(way):
    compat._empty.cache_clear()
    found = []
    WAYS[way](lambda: found.append(compat._empty()))
    assert type(found[0]) is torch.Tensor
    assert not found[0].is_inference()
    assert not found[0].is_meta


def traced():
    """A graph that the user traced."""
    return torch.fx.symbolic_trace(nn.Linear(2, 2))


@pytest.mark.parametrize("mark", ["id", "reason", "boxed"])
def test_compiler_made_graph_is_recognized_by_each_mark(mark):
    """Dynamo's graph has an id or a reason; AOTAutograd's takes its inputs in a list."""
    graph = traced()
    if mark == "id":
        graph.meta["dynamo_compile_id"] = None
    elif mark == "reason":
        graph.compile_subgraph_reason = None
    else:
        graph.graph.set_codegen(type("_BoxedCodeGen", (torch.fx.graph.CodeGen,), {})())
    assert compat.is_compiled_graph(graph)


def test_graphs_of_the_compiler_are_recognized(fresh_compiler):
    given = []

    def backend(graph, inputs):
        given.append(graph)
        return graph.forward

    torch.compile(nn.Linear(2, 2), backend=backend)(torch.ones(1, 2))
    assert [compat.is_compiled_graph(graph) for graph in given] == [True]


ATEN = torch.ops.aten


@pytest.mark.parametrize("in_python", [False, True])
def test_parts_give_the_operators_own_bits(in_python, monkeypatch):
    x, w, bias = torch.randn(3, 5), torch.randn(4, 5), torch.randn(4)
    if in_python:
        monkeypatch.setattr(compat, "_has_kernel", lambda *_: False)
    with torch.inference_mode():
        made = compat.run_parts(ATEN.linear.default, (x, w), {"bias": bias})
        assert torch.equal(made, torch.nn.functional.linear(x, w, bias))


class Inside(TorchDispatchMode):
    """Runs operators so that it sees the operators inside them."""

    def __init__(self):
        super().__init__()
        self.seen, self.results = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.overloadpacket.__name__)
        if func is torch.ops.aten._transformer_encoder_layer_fwd.default:
            ran = compat.run_inside(self, func, args, kwargs or {})
            self.results.append(ran)
            if ran is not None:
                return ran[0]
        return func(*args, **(kwargs or {}))


def _encode(device="cpu"):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True, device=device).eval()
    with torch.no_grad():
        return layer(torch.linspace(-1, 1, 2 * 5 * 8, device=device).reshape(2, 5, 8))


def test_operators_inside_a_fused_kernel_are_seen():
    plain = _encode()
    with Inside() as mode:
        seen = _encode()
    assert torch.equal(plain, seen)
    assert {"addmm", "bmm", "_addmm_activation"} & set(mode.seen)


def test_run_inside_refuses_tensors_without_data():
    with Inside() as mode, torch.no_grad():
        _encode("meta")
    with FakeTensorMode(), Inside() as other:
        _encode()
    assert set(mode.results + other.results) <= {None}
