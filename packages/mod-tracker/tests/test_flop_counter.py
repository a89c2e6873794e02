"""Counting from shapes: what an amount depends on, and formulas."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils.flop_counter import FlopCounterMode

from mod_tracker import profile_flops
from mod_tracker._attribution import Attribution
from mod_tracker._record import Path
from mod_tracker.reports._flop_counter import (
    Counts,
    FlopCounter,
    attention,
    attention_backward,
    convolution_backward,
    grouped_products,
    shape_key,
    with_shapes,
)

KERNELS = {
    "flash_attention": (),
    "efficient_attention": (None, True),
    "cudnn_attention": (None, True),
    "fused_attention_overrideable": (),
}


@pytest.mark.parametrize("heads", [4, 2], ids=["own keys", "shared keys"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_attention_of_each_kernel_is_counted(kernel, heads):
    """Where no device is needed: values have fewer channels than queries and keys."""
    if kernel == "efficient_attention" and heads < 4:
        pytest.skip("torch's shapes of its gradients are wrong for shared keys")

    class Attention(nn.Module):
        def forward(self, *given):
            return getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}")(*given)[0]

    def given(count, channels):
        made = torch.ones(2, count, 16, channels, device="meta", dtype=torch.bfloat16)
        return made.requires_grad_()

    with profile_flops() as report:
        out = Attention()(given(4, 32), given(heads, 32), given(heads, 24), *KERNELS[kernel])
        out.sum().backward()
    scores, result = (2 * (2 * 4) * 16 * 16 * channels for channels in (32, 24))
    found = report["Attention"]
    assert (found.forward, found.backward) == (scores + result, 3 * scores + 2 * result)


def test_flops_of_different_shapes_are_not_mixed_up():
    """The count kept per shape is used for that shape only."""
    layer = nn.Linear(4, 4, bias=False)
    with profile_flops() as report:
        for rows in (1, 2, 3, 2, 1):
            layer(torch.ones(rows, 4))
    assert report["Linear"].forward == 2 * 16 * (1 + 2 + 3 + 2 + 1)


GROUPED = {
    "rows in groups": ((8, 16), (2, 16, 32), [3, 8], 8 * 16 * 32),
    "pairs": ((2, 8, 16), (2, 16, 32), None, 2 * 8 * 16 * 32),
    "columns in groups": ((2, 8, 16), (16, 32), [16, 32], 8 * 16 * 32),
    "what is summed in groups": ((8, 16), (16, 32), [8, 16], 8 * 16 * 32),
}


@pytest.mark.skipif(
    not hasattr(torch.nn.functional, "grouped_mm"),
    reason="torch 2.9 has no public products of groups",
)
@pytest.mark.parametrize("fake", [False, True], ids=["data", "fake"])
@pytest.mark.parametrize("name", GROUPED)
def test_products_of_groups_are_counted_as_what_they_are(name, fake):
    """Forward and the gradients of both matrices, which are such products again."""
    first, second, ends, pairs = GROUPED[name]
    with FakeTensorMode() if fake else nullcontext():
        ends = ends and torch.tensor(ends, dtype=torch.int32)
        one, other = (
            torch.ones(shape, dtype=torch.bfloat16, requires_grad=True) for shape in (first, second)
        )
        with profile_flops() as report:
            nn.functional.grouped_mm(one, other, offs=ends).square().sum().backward()
    assert report.by_operator == {"aten._grouped_mm.default": 3 * 2 * pairs}


def test_flops_of_a_list_of_tensors_are_counted_each_time():
    """What a list holds is not in the arguments' shapes, so nothing is taken from before."""
    formulas = {torch.ops.aten.cat: lambda tensors, *_, out_shape: out_shape[0]}
    with profile_flops(formulas=formulas) as report:
        for size in (2, 3):
            torch.cat([torch.ones(size), torch.ones(size)])
    assert report.total == 4 + 6


def test_what_could_hold_a_tensor_is_no_key():
    """Plain values and shapes are; a tensor itself would be compared element by element."""
    tensor = torch.ones(2, 3)
    key = shape_key((tensor, None, 1, [2, 3]), {"n": 0.5})
    assert key == ((2, 3), None, 1, (2, 3), 0.5, "n")
    for value in ((tensor,), [tensor], object(), torch.float32):
        assert shape_key((value,), {}) is None


@pytest.mark.parametrize(
    ("first", "second", "amount"),
    [
        ((8, 16), (2, 16, 32), 2 * 8 * 16 * 32),
        ((2, 8, 16), (2, 16, 32), 2 * 2 * 8 * 16 * 32),
        ((2, 8, 16), (16, 32), 2 * 8 * 16 * 32),
        ((8, 16), (16, 32), 2 * 8 * 16 * 32),
        ((0, 8, 16), (0, 16, 32), 0),
        ((0, 8, 16), (16, 32), 2 * 8 * 16 * 32),
        ((0, 16), (2, 16, 32), 0),
    ],
)
def test_groups_may_be_of_any_number(first, second, amount):
    """None among them: nothing is divided by how many there are."""
    assert grouped_products(first, second, offs=None, out_shape=None) == amount


def test_symbolic_sizes_are_no_key():
    """They cannot be keys, so the formula is asked each time."""
    symbols = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    trace = FakeTensorMode(shape_env=ShapeEnv())
    traced = trace.from_tensor(torch.ones(41), symbolic_context=symbols)
    assert shape_key((traced,), {}) is None


def test_keys_differ_by_name_and_place():
    """The same value as another argument, positional or by keyword, is another amount."""
    one = torch.ones(2)
    keys = [
        *(shape_key((one, 1), {}), shape_key((1, one), {}), shape_key((torch.ones(2, 1), 1), {})),
        *(shape_key((one,), {"a": 1}), shape_key((one,), {"b": 1})),
    ]
    assert None not in keys
    assert len(set(keys)) == len(keys)


def test_formula_is_given_shapes_in_place_of_tensors():
    """In lists and tuples, by keyword, and of results, too; all else as it is."""
    given = []

    def formula(*args, out_shape=None, **kwargs):
        given.append((args, out_shape, kwargs))
        return 7

    one, two = torch.ones(1, 2), torch.ones(3)
    count = with_shapes(formula)
    assert count([one, None], (two, 5), "text", mask=one, out_val=(one, two)) == 7
    assert given == [
        (([(1, 2), None], ((3,), 5), "text"), ((1, 2), (3,)), {"mask": (1, 2)}),
    ]


class Work:
    """A counter over one operator of formula `formula`."""

    def __init__(self, formula):
        self.counter = FlopCounter(Attribution(limit=9), {len: formula})

    def run(self, *args, **kwargs):
        """Do as the watch does; return whether the formula was needed."""
        begun = self.counter.begins(len, args, kwargs)
        if begun is not None:
            self.counter.ends(begun, len, args, kwargs, None)
        return begun is not None


def test_formula_runs_once_for_each_shape():
    """After that the amount is looked up; with keyword arguments as well."""
    work = Work(lambda tensor, *, out_val, scale=1: tensor.numel() * scale)
    needed = [work.run(torch.ones(size)) for size in (2, 3, 2)]
    needed += [work.run(torch.ones(2), scale=scale) for scale in (5, 6, 5)]
    assert needed == [True, True, False] * 2
    counts = work.counter.counts
    assert counts.total == 2 + 3 + 2 + 10 + 12 + 10
    assert counts.by_operator() == {str(len): counts.total}
    assert counts.totals().total == counts.total


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_backward_of_a_convolution_takes_forwards_products_once_more(groups, transposed, wanted):
    """For each gradient that is asked for; a bias has no products."""
    small, large = (2, 4, 3, 4), (2, 8, 5, 6)
    given, grad = (small, large) if transposed else (large, small)
    weight = (given[1], grad[1] // groups, 3, 3) if transposed else (4, 8 // groups, 3, 3)
    arguments = ([4], [1, 1], [0, 0], [1, 1], transposed, [0, 0], groups, [*wanted, True])
    pairs = 2 * (3 * 4) * 9 * 4 * 8 // groups
    found = convolution_backward(grad, given, weight, *arguments, out_shape=None)
    assert found == sum(wanted) * 2 * pairs


def test_formula_that_raises_counts_nothing():
    """The call is listed as uncounted, the error kept, and the next call asks it again."""
    work = Work(lambda tensor, *, out_val: 1 // 0)
    for _ in range(2):
        assert work.run(torch.ones(2))
    assert (work.counter.counts.total, dict(work.counter.counts.amounts)) == (0, {})
    assert work.counter.counts.uncounted == {len: 2}
    assert type(work.counter.errors[len]) is ZeroDivisionError


def test_interrupt_in_a_formula_goes_through():
    """It is nobody's error."""

    def formula(tensor, *, out_val):
        raise KeyboardInterrupt

    work = Work(formula)
    with pytest.raises(KeyboardInterrupt):
        work.run(torch.ones(2))
    assert (work.counter.errors, work.counter.counts.uncounted) == ({}, {})


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)], ids=["each its own keys", "keys are shared"])
def test_operations_of_attention_are_those_of_its_products(heads):
    """Forward two products for each head of queries, backward five; widths may differ."""
    (of_queries, of_keys), batch, tokens, others, width, out = heads, 2, 5, 7, 8, 3
    query, key = (batch, of_queries, tokens, width), (batch, of_keys, others, width)
    value, grad = (batch, of_keys, others, out), (batch, of_queries, tokens, out)

    def product(rows, inner, columns):
        left, right = torch.ones(rows, inner), torch.ones(inner, columns)
        with FlopCounterMode(display=False) as counted:
            left @ right
        return batch * of_queries * counted.get_total_flops()

    scores, result = product(tokens, width, others), product(tokens, others, out)
    assert attention(query, key, value, 0.0, False) == scores + result
    for_scores, for_values = product(tokens, out, others), product(others, tokens, out)
    for_queries, for_keys = product(tokens, others, width), product(width, tokens, others)
    assert attention_backward(grad, query, key, value, grad) == (
        scores + for_scores + for_values + for_queries + for_keys
    )


def test_number_of_a_formula_becomes_an_int():
    """As of numpy, or a float of a large product."""
    work = Work(lambda tensor, *, out_val: 2.0e6)
    work.run(torch.ones(2))
    assert type(work.counter.counts.total) is int
    assert work.counter.counts.total == 2_000_000


def test_another_thread_of_the_users_is_not_counted():
    """Neither looked up nor begun."""
    work, found = Work(lambda tensor, *, out_val: 1), []
    work.run(torch.ones(2))
    thread = threading.Thread(target=lambda: found.append(work.run(torch.ones(2))))
    thread.start()
    thread.join()
    assert (found, work.counter.counts.total) == ([False], 1)


def test_counts_that_are_added_keep_their_places():
    """Total, amounts and what had no formula."""
    path, other = Path(lambda: None, name="a"), Path(lambda: None, name="b")
    found, more = Counts(), Counts()
    for counts, at, amount in ((found, path, 1), (more, path, 2), (more, other, 4)):
        counts.total += amount
        counts.amounts[at, "forward", len] += amount
        counts.uncounted[abs] += amount
    found.add(more)
    assert (found.total, found.uncounted, found.by_operator()) == (7, {abs: 7}, {len: 7})
    assert dict(found.amounts) == {(path, "forward", len): 3, (other, "forward", len): 4}
    assert (more.total, more.uncounted) == (6, {abs: 6})
