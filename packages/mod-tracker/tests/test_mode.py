"""Reports of operators that reach a dispatch mode in an unusual way, or not at all."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._higher_order_ops.scan import scan, scan_op
from torch._higher_order_ops.while_loop import while_loop
from torch._subclasses import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from mod_tracker import profile_flops, profile_memory, profile_time, trace

REPORTS = [profile_flops, profile_time, profile_memory, trace]

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype:UserWarning"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
]

ASKED = {
    "sym_size": lambda tensor: tensor.size(),
    "size": lambda tensor: tensor.size(),
    "sym_stride": lambda tensor: tensor.stride(),
    "stride": lambda tensor: tensor.stride(),
    "sym_numel": lambda tensor: tensor.numel(),
    "numel": lambda tensor: tensor.numel(),
    "dim": lambda tensor: tensor.dim(),
    "is_contiguous": lambda tensor: tensor.is_contiguous(),
    "sym_is_contiguous": lambda tensor: tensor.is_contiguous(),
    "is_non_overlapping_and_dense": lambda tensor: True,
    "storage_offset": lambda tensor: tensor.storage_offset(),
    "sym_storage_offset": lambda tensor: tensor.storage_offset(),
}


class Wrapper(torch.Tensor):
    """A tensor that holds another one and answers size queries itself."""

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            dtype=held.dtype,
            requires_grad=held.requires_grad,
            dispatch_sizes_strides_policy="sizes",
        )

    def __init__(self, held):
        self.held = held.detach()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ASKED:
            return ASKED[name](args[0].held)
        args, kwargs = tree_map(
            lambda value: value.held if isinstance(value, Wrapper) else value, (args, kwargs or {})
        )
        if name == "relu":  # computed by a product, which only shows inside
            output = torch.mm(args[0], torch.eye(4)).clamp(min=0)
        else:
            output = func(*args, **kwargs)
        return tree_map(
            lambda value: Wrapper(value) if isinstance(value, torch.Tensor) else value, output
        )


def ragged(*shape):
    """Two pieces, of 3 and 4 rows."""
    pieces = [torch.randn(rows, *shape) for rows in (3, 4)]
    return torch.nested.nested_tensor(pieces, layout=torch.jagged, requires_grad=True)


def _multiply_ragged():
    (ragged(5) * 2).values().sum().backward()


def _linear_ragged():
    nn.Linear(5, 6)(ragged(5)).values().sum().backward()


def _attend_ragged():
    q = ragged(2, 8).transpose(1, 2)
    scaled_dot_product_attention(q, q, q).values().sum().backward()


def _multiply_wrapped():
    (Wrapper(torch.randn(4, 4)).requires_grad_() @ torch.randn(4, 4)).sum().backward()


def _work_inside_wrapped():
    torch.relu(Wrapper(torch.randn(4, 4)))


def _infer_wrapped():
    with torch.inference_mode():
        nn.Linear(4, 4, bias=False)(Wrapper(torch.randn(2, 4)))


def _choose():
    torch.cond(torch.tensor(True), lambda x: x @ x, lambda x: x.sin(), (torch.randn(4, 4),))


def _choose_the_other():
    torch.cond(torch.tensor(False), lambda x: x @ x, lambda x: x @ x @ x, (torch.randn(4, 4),))


def _choose_without_data():
    with FakeTensorMode() as fake:
        predicate, x = fake.from_tensor(torch.tensor(True)), torch.randn(4, 4)
        torch.ops.higher_order.cond(predicate, lambda x: x @ x, lambda x: x @ x @ x, (x,))


def _scan_rows():
    w = torch.randn(4, 4)
    scan(lambda carry, x: (carry @ w + x, carry.clone()), torch.randn(4, 4), torch.randn(3, 4, 4))


def _runs_of_scan() -> int:
    """How often torch runs the function for 3 rows: 2.9 runs it once more, to get shapes."""
    runs = []

    def add(carry, x):
        runs.append(x)
        return [carry + x, carry.clone()]

    scan_op(add, [torch.zeros(4)], [torch.zeros(3, 4)], ())
    return len(runs)


def _loop():
    while_loop(
        lambda i, x: i < 3, lambda i, x: (i + 1, x @ x), (torch.tensor(0), torch.randn(4, 4))
    )


def _attend_flexibly():
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.randn(1, 2, 16, 8)
    flex_attention(q, q, q)


@torch.library.custom_op("mod_tracker_tests::square", mutates_args=())
def _square(x: torch.Tensor) -> torch.Tensor:
    return x @ x


def _call_custom():
    _square(torch.randn(4, 4))


def _look_up_sparsely():
    nn.Embedding(5, 4, sparse=True)(torch.tensor([1, 2])).sum().backward()


def _multiply_sparse():
    torch.sparse.mm(
        torch.eye(4).to_sparse(), torch.randn(4, 3, requires_grad=True)
    ).sum().backward()


# A product of an n x k and a k x m matrix costs 2nkm.
CASES = {
    _multiply_ragged: 0,
    _linear_ragged: 3 * 2 * 7 * 5 * 6,
    _attend_ragged: None,
    _multiply_wrapped: 2 * 128,
    _work_inside_wrapped: 128,
    _infer_wrapped: 64,
    _choose: 128,
    _choose_the_other: 256,
    _choose_without_data: None,
    _scan_rows: _runs_of_scan() * 128,
    _loop: 3 * 128,
    _attend_flexibly: 2 * (2 * 2 * 16 * 8 * 16),
    _call_custom: 128,
    _look_up_sparsely: 0,
    _multiply_sparse: None,
}


def test_branches_that_both_run_are_noted():
    with profile_flops() as report:
        _choose_without_data()
    assert list(report.unknown) == ["cond"]
    with profile_flops() as report:
        _choose()
    assert not report.unknown


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.strip("_"))
def test_flops_are_those_of_the_products(case):
    with profile_flops() as report:
        case()
    assert CASES[case] is None or report.total == CASES[case]
    assert report.sum("self_total") == report.total


@pytest.mark.parametrize("report_of", REPORTS[1:])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.strip("_"))
def test_other_reports_survive(report_of, case):
    """Time, memory and timeline of the same models."""
    with report_of() as report:
        case()
    assert report.sum("self_total" if report_of is not profile_memory else "self_allocated") >= 0


def test_memory_of_ragged_tensors_is_that_of_their_values():
    x = ragged(5).detach()
    with torch.no_grad(), profile_memory() as report:
        y = x * 2
    assert report.totals["allocated"] == report.peak == y.values().untyped_storage().nbytes()


def test_custom_operator_is_listed():
    x = torch.randn(4, 4)
    with profile_flops() as report:
        _square(x)
    assert report.uncounted == {"mod_tracker_tests.square.default": 1}
    assert report.by_operator == {"aten.mm.default": 128}


def _compiled_in(contexts):
    """Call a compiled model under each context; return the results and the number of graphs."""
    compiled, given = [], []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    model = torch.compile(nn.Linear(4, 4, bias=False), backend=backend, fullgraph=True)
    for context in contexts:
        with context() as found:
            model(torch.randn(2, 4))
        given.append(found)
    return given, len(compiled)


class Ignored(TorchDispatchMode):
    """A mode that does nothing, and that the compiler ignores."""

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_compiled_model_stays_compiled_in_a_report(fresh_compiler):
    """A model first compiled inside a report is compiled once and has no graph breaks.

    Guards of torch 2.9 check whether a mode is on, even an ignored one, but no mode is on when they
    are made: each call under a mode compiles again (pytorch#164992). Two of the reports are modes.
    """
    _, graphs = _compiled_in([Ignored, Ignored])
    given, compiled = _compiled_in(REPORTS)
    assert given[0].compiled == ("Linear",)
    assert compiled == graphs
    assert graphs == 1 or torch.__version__.startswith("2.9.")


def test_products_of_strided_nested_tensors_are_counted():
    """They have no shape to count with, and are listed; torch pads the shorter sequence."""
    x = torch.nested.nested_tensor([torch.randn(3, 4), torch.randn(2, 4)])
    with profile_flops() as report, torch.no_grad():
        torch.matmul(x, torch.nested.nested_tensor([torch.randn(4, 4)] * 2))
    assert report.total == 2 * (2 * 3 * 4 * 4)
    assert any("matmul" in name or "mm" in name for name in report.uncounted)


@pytest.mark.parametrize("report_of", REPORTS)
def test_product_in_inference_mode_uses_the_same_kernel(report_of):
    """torch chooses the kernel by whether the weight, or a view of it, requires a gradient."""
    x = torch.randn(2, 6, 16).transpose(0, 1)
    for needs in (True, False):
        weight = nn.Parameter(torch.randn(48, 16), requires_grad=needs)
        ran = []
        for measure in (nullcontext, report_of):
            kinds = [ProfilerActivity.CPU]
            with (
                profile(activities=kinds, acc_events=True) as prof,
                measure(),
                torch.inference_mode(),
            ):
                nn.functional.linear(x, weight, torch.ones(48))
            names = {event.key for event in prof.key_averages()}
            ran.append(names & {"aten::mm", "aten::bmm", "aten::addmm"})
        assert ran[0] == ran[1] != set()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("report_of", REPORTS)
def test_fused_paths_are_kept(report_of, training):
    """A transformer's output and gradients are bit-identical under every mode."""
    layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, activation="gelu", batch_first=True)
    model, x, found = nn.TransformerEncoder(layer, 2).train(training), torch.randn(2, 6, 16), []
    for measure in (nullcontext, report_of):
        for grad_mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with measure(), grad_mode():
                output = model(x)
            found.append(output.clone().detach())
    assert all(torch.equal(a, b) for a, b in zip(found[:3], found[3:], strict=True))


FIRST = """
import gc, weakref
import torch
import mod_tracker

layer, x = torch.nn.Linear(4, 8), torch.ones(2, 4)
gc.collect()
gc.disable()
with mod_tracker.profile_memory(layer):
    output = layer(x)
    storage = weakref.ref(output.untyped_storage())
    del output
    assert storage() is None
"""


@pytest.mark.nightly
def test_first_report_of_a_process_keeps_nothing():
    """torch loads its compiler for a mode; this happens where no stack frame holds a tensor."""
    subprocess.run([sys.executable, "-c", FIRST], check=True, timeout=300)
