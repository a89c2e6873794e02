"""The manual's table of FLOPs, compared with torch's counter and a calculation by hand.

Every number of the table is measured here and calculated from sizes. Each new case needs a row in
the manual.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

from mod_tracker import profile_flops

PAGE = Path(__file__).parents[3] / "docs" / "mod-tracker" / "manual.md"
RAISES = "raises"

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),  # compile anew under each mode
    pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the table is of 2.13"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
    pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype:UserWarning"),
]


class Wrapper(torch.Tensor):
    """A subclass that holds a tensor and runs every operator on it."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def inner(value):
            return value.inner if isinstance(value, Wrapper) else value

        out = func(*tree_map(inner, args), **tree_map(inner, kwargs or {}))
        return tree_map(lambda value: cls(value) if isinstance(value, torch.Tensor) else value, out)


@torch.library.custom_op("mod_tracker_comparison::square", mutates_args=())
def square(x: torch.Tensor) -> torch.Tensor:
    """An operator without a formula."""
    return torch.mm(x, x)


@torch.library.custom_op("mod_tracker_comparison::known", mutates_args=())
def known(x: torch.Tensor) -> torch.Tensor:
    """An operator whose formula returns 777."""
    return torch.mm(x, x)


@register_flop_formula(torch.ops.mod_tracker_comparison.known)
def _of_known(shape, *rest, out_shape=None, **more):
    return 777


def leaf(*shape: int) -> torch.Tensor:
    """A tensor that gets a gradient."""
    return torch.ones(*shape, requires_grad=True)


def ragged(*shape: int, layout: torch.layout = torch.jagged) -> torch.Tensor:
    """A batch of a sequence of 2 and one of 3."""
    pieces = [torch.ones(length, *shape) for length in (2, 3)]
    return torch.nested.nested_tensor(pieces, layout=layout, requires_grad=layout is torch.jagged)


def ragged_attention() -> torch.Tensor:
    """Two heads of four channels."""
    query, key, value = (ragged(2, 4).transpose(1, 2) for _ in range(3))
    return nn.functional.scaled_dot_product_attention(query, key, value).values()


def chosen(operator: Callable, predicate: bool) -> torch.Tensor:
    """Two products if the condition is true, else one."""
    w = torch.ones(4, 4)
    return operator(torch.tensor(predicate), lambda x: x @ w @ w, lambda x: x @ w, (leaf(3, 4),))


def scanned() -> torch.Tensor:
    """Five products."""
    w = torch.ones(4, 4)
    return scan(lambda carry, x: (carry @ w, carry + x), torch.ones(3, 4), torch.ones(5, 3, 4))[0]


def looped() -> torch.Tensor:
    """Three products."""
    start, w = (torch.tensor(0), torch.ones(3, 4)), torch.ones(4, 4)
    return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x @ w), start)[1]


def attended(function: Callable, queries: int = 2, **options: bool) -> torch.Tensor:
    """Eight tokens of 16 channels, two key heads; without gradients for flex attention."""
    make = torch.ones if function is not nn.functional.scaled_dot_product_attention else leaf
    return function(make(1, queries, 8, 16), *(make(1, 2, 8, 16) for _ in range(2)), **options)


def convolved(kind: type, **options: int) -> torch.Tensor:
    """Two 5 x 6 images with four channels, and a 3 x 3 kernel."""
    return kind(4, kernel_size=3, bias=False, **options)(leaf(2, 4, 5, 6))


def under_autocast() -> torch.Tensor:
    """A layer in the dtype that autocast chooses."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return nn.Linear(4, 8, bias=False)(leaf(3, 4))


def compiled(function: Callable) -> Callable:
    """A freshly compiled layer."""
    torch.compiler.reset()
    return torch.compile(function, backend="aot_eager")


SDPA = nn.functional.scaled_dot_product_attention
SCORES = 2 * 8 * 8 * 16
"""Operations of one product of eight queries and keys."""
BRANCH = 2 * 3 * 4 * 4
CONV, UP = nn.Conv2d, nn.ConvTranspose2d

CASES: dict[str, tuple[Callable[[], torch.Tensor], int, int | str]] = {
    "linear layer of jagged tensors": (
        lambda: nn.Linear(4, 8)(ragged(4)).values(),
        3 * 2 * (2 + 3) * 4 * 8,
        RAISES,
    ),
    # On the CPU torch pads the shorter sequence in all products of forward and backward.
    "attention of jagged tensors": (ragged_attention, 6 * 2 * (2 * 2) * 3 * 3 * 4, RAISES),
    "linear layer of strided nested tensors, forward": (
        lambda: nn.Linear(4, 8)(ragged(4, layout=torch.strided)).detach(),
        2 * (2 + 3) * 4 * 8,
        RAISES,
    ),
    "a tensor subclass that wraps another": (
        lambda: torch.mm(Wrapper(torch.ones(3, 4)), torch.ones(4, 5)),
        2 * 3 * 4 * 5,
        120,
    ),
    # torch's backward of it runs the branch again.
    "`torch.cond`, forward and backward": (lambda: chosen(torch.cond, True), 6 * BRANCH, RAISES),
    "`torch.cond` in a traced graph, the smaller branch": (
        lambda: chosen(torch.no_grad()(torch.ops.higher_order.cond), False),
        BRANCH,
        2 * BRANCH,
    ),
    "flex attention": (lambda: attended(flex_attention), 2 * 2 * SCORES, RAISES),
    "flex attention, compiled": (
        lambda: attended(compiled(flex_attention)),
        2 * 2 * SCORES,
        RAISES,
    ),
    "`scan`": (scanned, 5 * BRANCH, RAISES),
    "`while_loop`": (looped, 3 * BRANCH, RAISES),
    "an operator of your own without a formula": (
        lambda: square(torch.ones(4, 4)),
        2 * 4 * 4 * 4,
        0,
    ),
    "an operator of your own with a formula": (lambda: known(torch.ones(4, 4)), 777, 777),
    "attention's CPU kernel": (lambda: attended(SDPA), 2 * (2 + 5) * SCORES, 0),
    "attention's CPU kernel, heads share keys": (
        lambda: attended(SDPA, 4, enable_gqa=True).detach(),
        4 * 2 * SCORES,
        0,
    ),
    "convolution": (
        lambda: convolved(CONV, out_channels=8),
        3 * 2 * 2 * (3 * 4) * 4 * 8 * 9,
        41472,
    ),
    "convolution in 2 groups": (
        lambda: convolved(CONV, out_channels=8, groups=2),
        3 * 2 * 2 * (3 * 4) * 4 * 8 * 9 // 2,
        27648,
    ),
    "convolution of each channel": (
        lambda: convolved(CONV, out_channels=4, groups=4),
        3 * 2 * 2 * (3 * 4) * 4 * 9,
        10368,
    ),
    "transposed convolution": (
        lambda: convolved(UP, out_channels=8, stride=2),
        3 * 2 * 2 * (5 * 6) * 4 * 8 * 9,
        103680,
    ),
    "transposed convolution in 2 groups": (
        lambda: convolved(UP, out_channels=8, groups=2),
        3 * 2 * 2 * (5 * 6) * 4 * 8 * 9 // 2,
        69120,
    ),
    "a layer under autocast": (under_autocast, 3 * 2 * 3 * 4 * 8, 576),
}
"""What runs, its operations by hand, and what torch's counter says."""


def run(case: str) -> None:
    """Run forward, and backward if the output requires a gradient."""
    output = CASES[case][0]()
    if output.requires_grad:
        output.sum().backward()


def rows() -> dict[str, list[str]]:
    """Return the rows of the manual's table by case."""
    table = PAGE.read_text("utf-8").partition("| case | ours | by hand |")[2].partition("\n\n")[0]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    return {case: [cell.replace(",", "") for cell in rest] for case, *rest in cells}


def test_every_case_has_its_row_and_no_other():
    assert list(rows()) == list(CASES)


@pytest.mark.parametrize("case", CASES)
def test_our_counter_gives_the_numbers_by_hand(case):
    with profile_flops() as report:
        run(case)
    by_hand = CASES[case][1]
    assert report.total == report.sum("self_total") == by_hand
    assert rows()[case][:2] == [str(by_hand)] * 2


@pytest.mark.parametrize("case", CASES)
def test_torchs_counter_gives_the_numbers_of_the_page(case):
    """Torch's number, or an error that stops the model."""
    theirs = CASES[case][2]
    with FlopCounterMode(display=False) as counter:
        if theirs is RAISES:
            with pytest.raises(Exception):  # noqa: B017 - of any kind
                run(case)
        else:
            run(case)
    if theirs is not RAISES:
        assert counter.get_total_flops() == theirs
    assert rows()[case][2] == str(theirs)


@pytest.mark.parametrize(
    ("name", "mean"), [("ours", lambda row: row[0]), ("torch's", lambda row: row[2])]
)
def test_page_names_the_right_counters(name, mean):
    wrong = [case for case, row in rows().items() if (mean(row) == row[1]) != (name in row[3])]
    assert wrong == []
