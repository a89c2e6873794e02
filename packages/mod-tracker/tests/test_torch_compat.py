"""The one file with private torch names."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import mod_tracker._torch_compat as compat


@pytest.mark.parametrize("in_mode", [True, False])
def test_gradient_hook_is_called_for_its_output_alone(monkeypatch, in_mode):
    """First, later and leaf outputs: each hook gets its own gradient once."""
    monkeypatch.setattr(compat, "in_function_mode", lambda: in_mode)
    x, grads = torch.ones(2, requires_grad=True), {}
    first, second = (x * 1).unbind()
    leaf = torch.autograd.graph.get_gradient_edge(x).node
    for name, node, output in (("0", first.grad_fn, 0), ("1", first.grad_fn, 1), ("x", leaf, 0)):
        grads[name] = []
        compat.hook_gradient(node, output, compat.new_carrier(), grads[name].append)
    (2 * first + 3 * second).backward()
    assert {name: [grad.tolist() for grad in given] for name, given in grads.items()} == {
        "0": [2.0],
        "1": [3.0],
        "x": [[2.0, 3.0]],
    }
    assert first._backward_hooks is None


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


def test_callback_runs_at_the_end_of_a_backward_only():
    """In a backward it is queued; outside it is refused."""
    x, calls = torch.ones(1, requires_grad=True), []
    assert not compat.at_backward_end(lambda: calls.append("never"))
    y = x * 2
    y.register_hook(lambda _: compat.at_backward_end(lambda: calls.append("end")) and None)
    x.register_hook(lambda _: calls.append("leaf"))
    y.sum().backward()
    assert calls == ["leaf", "end"]


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


def test_unwrap_returns_the_users_module():
    model, holder = nn.Linear(2, 2), nn.Module()
    holder.register_module("_orig_mod", model)
    assert compat.unwrap(torch.compile(model, backend="eager")) is model
    assert compat.unwrap(model) is model
    assert compat.unwrap(holder) is holder


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


def test_tensor_subclasses_are_plain_inside_the_context():

    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise ZeroDivisionError

    with compat.without_torch_function():
        assert not Loud(2).requires_grad


ATEN = torch.ops.aten


class Passes(TorchDispatchMode):
    """A mode that runs every operator unchanged."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("in_python", [False, True])
def test_parts_give_the_operators_own_bits(in_python, monkeypatch):
    x, w, bias = torch.randn(3, 5), torch.randn(4, 5), torch.randn(4)
    if in_python:
        monkeypatch.setattr(compat, "_has_kernel", lambda *_: False)
    with torch.inference_mode():
        made = compat.run_parts(ATEN.linear.default, (x, w), {"bias": bias})
        assert torch.equal(made, torch.nn.functional.linear(x, w, bias))


def test_higher_order_operators_are_recognized():
    """`torch.cond` is one, a matmul is not."""
    cond = torch.ops.higher_order.cond
    assert [compat.is_higher_order(each) for each in (cond, ATEN.mm.default, None)] == [
        *(True, False, False)
    ]


def test_leaving_a_mode_keeps_the_modes_on_top():
    below, left, above = Passes(), Passes(), Passes()
    with below:
        left.__enter__()
        with FakeTensorMode(), above:
            assert compat.mode_depth() == 4
            compat.leave_mode(left)
            compat.leave_mode(left)
            assert compat.mode_depth() == 3
    assert compat.mode_depth() == 0


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


shows_what_nodes_keep = pytest.mark.skipif(
    not hasattr(compat.SAVED, "data"), reason="a node of torch 2.9 does not show what it keeps"
)


class Packed:
    """The packed form of a tensor in saved-tensor hooks."""

    def __init__(self, tensor):
        self.tensor = tensor


def nodes_of(output):
    """Nodes of a tensor's graph, the last one first."""
    found, waiting = [], [output.grad_fn]
    for node in waiting:
        if node is not None:
            found.append(node)
            waiting += [reached for reached, _ in node.next_functions]
    return found


def kept_behind(output):
    """Types of the values saved in a tensor's graph, and who saved them: hooks or a checkpoint."""
    return [
        (type(data), hook is not None, of_checkpoint)
        for node in nodes_of(output)
        for data, hook, of_checkpoint in compat.saved_by(node)
    ]


@shows_what_nodes_keep
def test_saved_tensors_are_listed_until_backward():
    output = torch.ones(3, requires_grad=True).exp().sin()
    assert kept_behind(output) == [(torch.Tensor, False, False)] * 2
    output.sum().backward()
    assert kept_behind(output) == kept_behind(torch.ones(3)) == []


@shows_what_nodes_keep
def test_packed_values_are_listed_with_their_hook():
    with saved_tensors_hooks(lambda tensor: Packed(tensor.detach()), lambda kept: kept.tensor):
        output = torch.ones(3, requires_grad=True).exp()
    ((data, hook, _),) = compat.saved_by(output.grad_fn)
    assert type(data) is Packed
    assert hook(data) is data.tensor


@shows_what_nodes_keep
def test_a_reentrant_checkpoint_keeps_its_input_by_a_node():
    given = torch.ones(3, requires_grad=True) + 2
    assert kept_behind(checkpoint(torch.sin, given, use_reentrant=True)) == [
        (torch.Tensor, False, True)
    ]
