"""Formulas compared with a calculation by hand: torch's, and ours for operators torch lacks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from mod_tracker import profile_flops
from mod_tracker.reports._formulas import FLEX, OWN, Amount, visible_pairs
from mod_tracker.reports._free_operators import is_free

ATEN = torch.ops.aten
RAISES = "raises"
RIGHT = "right"

B, H, S, T, D, V = 2, 4, 32, 24, 16, 8
"""Sizes that differ: batch, heads, queries, keys, channels of queries and keys, of values."""


def made(*shape, dtype=torch.float32):
    """A tensor without data."""
    return torch.empty(shape, device="meta", dtype=dtype)


def half(*shape):
    """A tensor without data in the dtype that attention kernels accept."""
    return made(*shape, dtype=torch.bfloat16)


def ints(*shape):
    """Integers."""
    return made(*shape, dtype=torch.int64)


def attention(heads_first=True, heads=H):
    """Queries, keys and values."""
    if heads_first:
        return half(B, H, S, D), half(B, heads, T, D), half(B, heads, T, V)
    return half(B, S, H, D), half(B, T, heads, D), half(B, T, heads, V)


def result(heads_first=True):
    """A result, or its gradient."""
    return half(B, H, S, V) if heads_first else half(B, S, H, V)


PAIRS = 2 * B * H * S * T
FORWARD = PAIRS * (D + V)
BACKWARD = PAIRS * (3 * D + 2 * V)
IMAGE, WEIGHT, GROUPED = (2, 4, 5, 6), (8, 4, 3, 3), (8, 2, 3, 3)
CONVOLVED = 2 * 2 * (3 * 4) * 8 * 4 * 9
PLAIN = ([1, 1], [0, 0], [1, 1], False, [0, 0])
FLAT = (None, None, S, T, 0.0, False, False)
EFFICIENT = (None, None, None, None, None, 0.0, 0, True)
LSE = (B, H, S)

# Name: operator, arguments, count by hand, and torch 2.13's count.
TORCHS = {
    "mm": (ATEN.mm, (made(3, 4), made(4, 5)), 2 * 3 * 4 * 5, RIGHT),
    "addmm": (ATEN.addmm, (made(5), made(3, 4), made(4, 5)), 2 * 3 * 4 * 5, RIGHT),
    "bmm": (ATEN.bmm, (made(2, 3, 4), made(2, 4, 5)), 2 * 2 * 3 * 4 * 5, RIGHT),
    "bmm, wider result": (
        ATEN.bmm,
        (half(2, 3, 4), half(2, 4, 5), torch.float32),
        2 * 2 * 3 * 4 * 5,
        RAISES,
    ),
    "addmm, wider result": (
        ATEN.addmm,
        (made(3, 5), half(3, 4), half(4, 5), torch.float32),
        2 * 3 * 4 * 5,
        RAISES,
    ),
    "baddbmm": (
        ATEN.baddbmm,
        (made(2, 3, 5), made(2, 3, 4), made(2, 4, 5)),
        2 * 2 * 3 * 4 * 5,
        RIGHT,
    ),
    "_scaled_mm": (
        ATEN._scaled_mm,
        (
            made(16, 32, dtype=torch.float8_e4m3fn),
            made(48, 32, dtype=torch.float8_e4m3fn).t(),
            made(1),
            made(1),
        ),
        2 * 16 * 32 * 48,
        RIGHT,
    ),
    "convolution": (
        ATEN.convolution,
        (made(*IMAGE), made(*WEIGHT), None, *PLAIN, 1),
        CONVOLVED,
        RIGHT,
    ),
    "convolution in groups": (
        ATEN.convolution,
        (made(*IMAGE), made(*GROUPED), None, *PLAIN, 2),
        CONVOLVED // 2,
        RIGHT,
    ),
    "convolution, transposed": (
        ATEN.convolution,
        (made(*IMAGE), made(4, 8, 3, 3), None, *PLAIN[:3], True, [0, 0], 1),
        2 * 2 * (5 * 6) * 8 * 4 * 9,
        RIGHT,
    ),
    "_convolution": (
        ATEN._convolution,
        (made(*IMAGE), made(*WEIGHT), None, *PLAIN, 1, False, False, False, False),
        CONVOLVED,
        RIGHT,
    ),
    "convolution_overrideable": (
        ATEN.convolution_overrideable,
        (made(*IMAGE), made(*WEIGHT), None, *PLAIN, 1),
        CONVOLVED,
        RIGHT,
    ),
    "cudnn_convolution": (
        ATEN.cudnn_convolution,
        (made(*IMAGE), made(*WEIGHT), [0, 0], [1, 1], [1, 1], 1, False, False, False),
        CONVOLVED,
        RIGHT,
    ),
    "cudnn_convolution, benchmark": (
        ATEN.cudnn_convolution,
        (made(*IMAGE), made(*WEIGHT), [0, 0], [1, 1], [1, 1], 1, True, False, False),
        CONVOLVED,
        CONVOLVED // (3 * 4) * (5 * 6),
    ),
    "_slow_conv2d_forward": (
        ATEN._slow_conv2d_forward,
        (made(*IMAGE), made(*WEIGHT), [3, 3], None, [1, 1], [0, 0]),
        CONVOLVED,
        RAISES,
    ),
    "convolution_backward": (
        ATEN.convolution_backward,
        (made(2, 8, 3, 4), made(*IMAGE), made(*WEIGHT), None, *PLAIN, 1, [True, True, False]),
        2 * CONVOLVED,
        RIGHT,
    ),
    "convolution_backward in groups": (
        ATEN.convolution_backward,
        (made(2, 8, 3, 4), made(*IMAGE), made(*GROUPED), None, *PLAIN, 2, [True, True, False]),
        CONVOLVED,
        CONVOLVED // 2 + CONVOLVED,
    ),
    "flash attention": (
        ATEN._scaled_dot_product_flash_attention,
        attention(),
        FORWARD,
        RIGHT,
    ),
    "efficient attention": (
        ATEN._scaled_dot_product_efficient_attention,
        (*attention(), None, True),
        FORWARD,
        RIGHT,
    ),
    "cudnn attention": (
        ATEN._scaled_dot_product_cudnn_attention,
        (*attention(), None, True),
        FORWARD,
        RIGHT,
    ),
    "flash attention, backward": (
        ATEN._scaled_dot_product_flash_attention_backward,
        (
            *(result(), *attention(), result(), made(*LSE), ints(3), ints(3), S, T, 0.0, False),
            *(ints(2), ints(0)),
        ),
        BACKWARD,
        RIGHT,
    ),
    "efficient attention, backward": (
        ATEN._scaled_dot_product_efficient_attention_backward,
        (
            *(result(), *attention(), None, result(), made(*LSE), ints(), ints(), 0.0),
            *([True, True, True, False], False),
        ),
        BACKWARD,
        RIGHT,
    ),
    "cudnn attention, backward": (
        ATEN._scaled_dot_product_cudnn_attention_backward,
        (
            *(result(), *attention(), result(), made(*LSE), ints(), ints(), None, None, None),
            *(S, T, 0.0, False),
        ),
        BACKWARD,
        RIGHT,
    ),
    "_flash_attention_forward": (
        ATEN._flash_attention_forward,
        (*attention(heads_first=False), *FLAT),
        FORWARD,
        RAISES,
    ),
    "_efficient_attention_forward": (
        ATEN._efficient_attention_forward,
        (*attention(heads_first=False), *EFFICIENT),
        FORWARD,
        RAISES,
    ),
    "_flash_attention_backward": (
        ATEN._flash_attention_backward,
        (
            *(result(False), *attention(heads_first=False), result(False), made(*LSE)),
            *(None, None, S, T, 0.0, False, ints(2), ints(0)),
        ),
        BACKWARD,
        RAISES,
    ),
    "_efficient_attention_backward": (
        ATEN._efficient_attention_backward,
        (
            *(result(False), *attention(heads_first=False), None, result(False), None, None),
            *(S, T, made(*LSE), 0.0, ints(), ints(), 0, False),
        ),
        BACKWARD,
        RAISES,
    ),
}


def counted(operator, args, formula, out):
    """Return the count of torch's formula."""
    try:
        return int(formula(*args, out_val=out))
    except Exception:
        return RAISES


def ours(operator, args, out):
    """FLOPs by our formula or, without one, by torch's."""
    own = OWN.get(operator)
    if own is None:
        return counted(operator, args, flop_registry[operator], out)
    overload = next(
        each
        for name in operator.overloads()
        if len((each := getattr(operator, name))._schema.arguments) >= len(args)
        and not any(argument.is_out for argument in each._schema.arguments)
    )
    if any(isinstance(arg, torch.dtype) for arg in args):
        overload = operator.dtype
    return own(overload, args, {}, out).total


def out_of(name, operator, args):
    """Return the result's shape; some kernels have no meta implementation."""
    if "conv" in name and "backward" in name:
        return args[1], args[2], None
    if "conv" in name:
        spatial = (10 - 5 + 1, 10 - 6 + 3) if "transposed" in name else (3, 4)
        return made(2, 8, *spatial)
    return None


@pytest.mark.parametrize("name", TORCHS)
def test_formula_equals_a_calculation_by_hand(name):
    """Covers every operator in torch's registry."""
    operator, args, by_hand, _ = TORCHS[name]
    assert ours(operator, args, out_of(name, operator, args)) == by_hand


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="verdicts are of 2.13")
@pytest.mark.parametrize("name", TORCHS)
def test_formula_of_torch_is_judged(name):
    operator, args, by_hand, verdict = TORCHS[name]
    found = counted(operator, args, flop_registry[operator], out_of(name, operator, args))
    assert found == (by_hand if verdict == RIGHT else verdict)


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="verdicts are of 2.13")
def test_every_formula_of_torch_is_judged():
    judged = {operator for operator, *_ in TORCHS.values()}
    left = {str(operator) for operator in flop_registry if operator not in judged}
    own = {name for name in left if "mod_tracker" in name}
    assert left - own == {"flex_attention", "flex_attention_backward"}


def test_formula_of_flex_attention_is_right():
    given = attention(heads=2)
    more = (result(), made(*LSE), result())
    assert FLEX["flex_attention"](None, given, {}, None) == Amount(FORWARD)
    backward = FLEX["flex_attention_backward"](None, (*given, *more), {}, None)
    assert (backward.total, backward.again) == (BACKWARD, PAIRS * D)


def _flops(function):
    with profile_flops() as report:
        out = function()
        if isinstance(out, torch.Tensor) and out.requires_grad:
            out.sum().backward()
    return report


@pytest.mark.parametrize("heads", [H, 2], ids=["own keys", "shared keys"])
@pytest.mark.parametrize("kernel", ["flash_attention", "cudnn_attention", "efficient_attention"])
def test_attention_kernels_are_counted_alike(kernel, heads):
    more = () if kernel == "flash_attention" else (None, True)
    operator = getattr(ATEN, f"_scaled_dot_product_{kernel}")
    assert _flops(lambda: operator(*attention(heads=heads), *more)[0]).total == FORWARD


def test_packed_sequences_count_their_own_pairs():
    """Lengths are data, so two calls with the same shapes differ."""
    totals = []
    count = OWN[ATEN._flash_attention_forward]
    for lengths in ([0, 3, 10], [0, 5, 10]):
        starts = torch.tensor(lengths, dtype=torch.int32)
        given = [torch.empty(10, H, D) for _ in range(3)]
        args = (*given, starts, starts, 7, 7, 0.0, False, False)
        amount = count(ATEN._flash_attention_forward.default, args, {}, None)
        totals.append(amount.total)
    assert totals == [2 * H * (9 + 49) * 2 * D, 2 * H * (25 + 25) * 2 * D]


def test_packed_sequences_without_data_have_the_longest_length():
    args = (*(half(10, H, D) for _ in range(3)), ints(3), ints(3), 7, 7, 0.0, False, False)
    amount = OWN[ATEN._flash_attention_forward](ATEN._flash_attention_forward.default, args, {}, 0)
    assert amount.total == 2 * H * 2 * (7 * 7) * 2 * D


def _pairs_one_by_one(queries, keys, shift, left, right):
    left, right = math.inf if left is None else left, math.inf if right is None else right
    return sum(
        i + shift - left <= j <= i + shift + right for i in range(queries) for j in range(keys)
    )


@pytest.mark.parametrize("window", [(None, None), (None, 0), (2, 0), (2, 1), (0, None), (9, 9)])
@pytest.mark.parametrize("sizes", [(5, 5), (5, 8), (8, 5), (1, 7), (0, 3)])
def test_window_pairs_equal_a_count_one_by_one(sizes, window):
    queries, keys = sizes
    for shift in (0, keys - queries):
        found = visible_pairs(queries, keys, shift, *window)
        assert found == _pairs_one_by_one(queries, keys, shift, *window)


def test_window_of_a_kernel_is_counted_as_masked():
    """A sliding window of three keys, given by the kernel's own arguments."""
    given = tuple(half(1, S, H, D) for _ in range(3))
    options = {"window_size_left": 2, "window_size_right": 0}
    count = OWN[ATEN._flash_attention_forward]
    amount = count(ATEN._flash_attention_forward.default, (*given, *FLAT), options, None)
    seen = _pairs_one_by_one(S, S, 0, 2, 0)
    assert amount.total - amount.masked == 2 * H * seen * 2 * D


LAYERS = {
    "LSTM": (lambda: nn.LSTM(6, 5), (7, 3, 6), 2 * 7 * 3 * 4 * 5 * (6 + 5)),
    "LSTM of two layers": (
        lambda: nn.LSTM(6, 5, num_layers=2, batch_first=True),
        (3, 7, 6),
        2 * 7 * 3 * 4 * 5 * (6 + 5 + 5 + 5),
    ),
    "LSTM in both directions": (
        lambda: nn.LSTM(6, 5, bidirectional=True),
        (7, 3, 6),
        2 * (2 * 7 * 3 * 4 * 5 * (6 + 5)),
    ),
    "GRU": (lambda: nn.GRU(6, 5), (7, 3, 6), 2 * 7 * 3 * 3 * 5 * (6 + 5)),
    "LSTM cell": (lambda: nn.LSTMCell(6, 5), (3, 6), 2 * 3 * 4 * 5 * (6 + 5)),
    "encoder layer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True),
        (3, 5, 8),
        2 * 15 * 8 * (4 * 8 + 2 * 12) + 4 * 3 * 5 * 5 * 8,
    ),
    "attention": (
        lambda: _SelfAttention(),
        (3, 5, 8),
        2 * 15 * 8 * 4 * 8 + 4 * 3 * 5 * 5 * 8,
    ),
    "bilinear": (lambda: _Bilinear(), (3, 4), 2 * 3 * 6 * 4 * 5 + 2 * 3 * 6 * 5),
}


NO_GRADIENT = {"GRU": 2 * 3 * (3 * 5) * 5, "LSTM cell": 2 * 3 * (4 * 5) * 5}
"""Of the first hidden state, which is zeros: what one product by one is carried out for it."""


class _SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.inner(x, x, x, need_weights=False)[0]


class _Bilinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Bilinear(4, 5, 6, bias=False)

    def forward(self, x):
        return self.inner(x, torch.ones(3, 5))


@pytest.mark.parametrize("mode", ["train", "eval", "inference"])
@pytest.mark.parametrize("name", [name for name in LAYERS if name != "bilinear"])
def test_layers_count_products_in_fused_kernels(name, mode):
    make, shape, forward = LAYERS[name]
    layer = make().train(mode == "train")
    x = torch.randn(shape, requires_grad=mode == "train")
    with (
        torch.inference_mode(mode == "inference"),
        torch.set_grad_enabled(mode == "train"),
        profile_flops() as report,
    ):
        out = layer(x)
        out = out[0] if isinstance(out, tuple) else out
        if mode == "train":
            out.sum().backward()
    row = next(iter(report))
    assert row.forward == forward
    assert report.unknown == {}
    if mode == "train":
        repeated = report.total - report.model_flops  # by a kernel that saved no scores
        assert row.backward - repeated == 2 * forward - NO_GRADIENT.get(name, 0)


def test_products_of_a_bilinear_layer_are_counted():
    make, shape, _ = LAYERS["bilinear"]
    with torch.no_grad(), profile_flops() as report:
        make()(torch.randn(shape))
    assert report.total > 0
    assert report.unknown == {}


def test_vectors_and_sparse_matrices_are_counted():
    """Matrix-vector products, dot products, and products of the nonzero elements."""
    a = torch.randn(3, 4)
    for function, by_hand in (
        (lambda: torch.mv(a, a[0]), 2 * 3 * 4),
        (lambda: torch.dot(a[0], a[1]), 2 * 4),
        (lambda: torch.sparse.mm(torch.eye(4).to_sparse(), torch.randn(4, 5)), 2 * 4 * 5),
    ):
        assert _flops(function).total == by_hand


def test_products_in_place_are_counted():
    """torch's counter has no formula for them."""
    a, b = torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    for function, by_hand in (
        (lambda: torch.zeros(3, 5).addmm_(a[0], b[0]), 2 * 3 * 4 * 5),
        (lambda: torch.zeros(2, 3, 5).baddbmm_(a, b), 2 * 2 * 3 * 4 * 5),
        (lambda: torch.zeros(3).addmv_(a[0], b[0, :, 0]), 2 * 3 * 4),
        (lambda: torch.mm(a[0], b[0], out=torch.empty(3, 5)), 2 * 3 * 4 * 5),
    ):
        assert _flops(function).total == by_hand


def test_number_in_place_of_a_tensor_is_accepted():
    """torch passes it on as a number, which a direct call of the kernel would refuse."""
    with profile_flops() as report:
        made = torch.tensor([7, 3]).floor_divide(2)
        torch.linalg.vector_norm(made.float())
    assert made.tolist() == [3, 1]
    assert report.unknown == {}


def test_operators_that_may_multiply_are_named():
    with profile_flops() as report:
        torch.linalg.qr(torch.randn(4, 4).relu())
    assert report.unknown == {"aten.linalg_qr.default": 1}
    assert set(report.uncounted) >= {"aten.relu.default", "aten.linalg_qr.default"}
    assert "may multiply: aten.linalg_qr.default (1)" in str(report)


@torch.library.custom_op("mod_tracker_formulas::outer", mutates_args=())
def outer(x: torch.Tensor) -> torch.Tensor:
    """Multiplies, and calls an operator without a formula."""
    return torch.linalg.qr(torch.mm(x, x)).R


def test_operators_inside_a_user_operator_are_named():
    with profile_flops() as report:
        outer(torch.randn(4, 4))
    assert report.by_operator == {"aten.mm.default": 128}
    assert report.unknown == {"aten.linalg_qr.default": 1}


def test_no_operator_with_a_formula_is_called_free():
    """A name in the list of free operators could match one by mistake."""
    for operator in (*flop_registry, *OWN):
        names = operator.overloads() if hasattr(operator, "overloads") else ()
        assert not any(is_free(getattr(operator, name)) for name in names), operator


def test_common_operators_are_known():
    """A training step of a small model has no unknown operators."""
    model = nn.Sequential(
        nn.Embedding(8, 4), nn.Conv1d(5, 5, 1), nn.GroupNorm(5, 5), nn.GELU(), nn.Dropout(0.1)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    with profile_flops() as report:
        out = model(torch.randint(8, (2, 5))).flatten(1)
        nn.functional.cross_entropy(out, torch.tensor([0, 1])).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert report.unknown == {}


def test_torchs_counter_misses_operators():
    """Such as the fused LSTM, where torch counts 0."""
    layer, x = nn.LSTM(6, 5), torch.randn(7, 3, 6)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        layer(x)
    assert counter.get_total_flops() == 0
