"""Formulas: the floating-point operations of an operator, from its arguments and result.

A multiplication and an addition are two operations. Matrix products, convolutions and attention are
counted. Most formulas are torch's, from `torch.utils.flop_counter.flop_registry`. This file has
those that are missing there, or that differ from a calculation by hand. `test_formulas` compares
all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch

Formula = Callable[..., int]
"""A user's formula, called with shapes in place of tensors, and with `out_shape`."""


class Amount(NamedTuple):
    """Floating-point operations of one call of an operator.

    Attributes:
        total: all operations.
        again: part of `total` that repeats the forward. The backward of fused attention multiplies
            queries and keys once more, since the scores were not saved.
        masked: part of `total` that a causal mask or a window hides, by the operator's arguments.
            Masks that are tensors do not count as hiding anything.
        masked_again: part of `total` that is in both `again` and `masked`.
        assumed: 1 if sizes that only data would show were assumed to be the largest possible.
    """

    total: int
    again: int = 0
    masked: int = 0
    masked_again: int = 0
    assumed: int = 0


Count = Callable[[Any, tuple, Mapping[str, Any], Any], Amount]
"""Called with an operator, its arguments, its keyword arguments, and its result."""

_Given = dict[str, Any]  # arguments by name in the operator's schema, with defaults


def of_shapes(formula: Formula) -> Count:
    """Adapt a user's formula."""

    def count(operator: Any, args: tuple, kwargs: Mapping[str, Any], out: Any) -> Amount:
        named = {name: _shape(value) for name, value in kwargs.items()}
        return Amount(int(formula(*map(_shape, args), out_shape=_shape(out), **named)))

    return count


def of_torch(formula: Callable[..., int]) -> Count:
    """Adapt a formula of `torch.utils.flop_counter.flop_registry`."""

    def count(operator: Any, args: tuple, kwargs: Mapping[str, Any], out: Any) -> Amount:
        return Amount(int(formula(*args, **kwargs, out_val=out)))

    return count


def _by_name(formula: Callable[[_Given, Any], int | Amount]) -> Count:
    def count(operator: Any, args: tuple, kwargs: Mapping[str, Any], out: Any) -> Amount:
        names, defaults = _arguments(operator)
        given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        found = formula(given, out)
        amount = found if isinstance(found, Amount) else Amount(found)
        bounds = map(given.get, ("offs", "cum_seq_q", "cu_seqlens_q"))
        return amount._replace(assumed=int(any(_lacks_data(bound) for bound in bounds)))

    return count


@cache
def _arguments(operator: Any) -> tuple[tuple[str, ...], _Given]:
    if not hasattr(operator, "_schema"):  # flex attention, which takes functions
        return ("query", "key", "value"), {}
    arguments = operator._schema.arguments
    defaults = {each.name: each.default_value for each in arguments if each.has_default_value()}
    return tuple(each.name for each in arguments), defaults


def _shape(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)([_shape(item) for item in value])
    return value.shape if isinstance(value, torch.Tensor) else value


# Products of matrices.


_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)

COMPLEX = 4
"""Real products in a complex one; as many additions go with it."""


def _product(first: str, second: str) -> Count:
    """A product of two matrices, of two batches of matrices, or of a matrix and a vector.

    Of a sparse matrix only the stored elements are multiplied, of a block-sparse one whole blocks.
    """

    def count(given: _Given, out: Any) -> int:
        a, b = given[first], given[second]
        columns = b.shape[-1] if b.dim() > 1 else 1
        if _is_dense(b):
            pairs = _stored(a) * columns
        elif _is_dense(a):
            pairs = a.numel() // a.shape[-1] * _stored(b)
        else:
            pairs = _sparse_pairs(a, b)
        return 2 * pairs * (COMPLEX if a.is_complex() else 1)

    return _by_name(count)


def _is_dense(tensor: torch.Tensor) -> bool:
    return not (tensor.is_sparse or tensor.layout in _COMPRESSED)


def _stored(tensor: torch.Tensor) -> int:
    """Number of stored elements: all of a dense tensor."""
    if _is_dense(tensor):
        return tensor.numel()
    values = tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
    return values.numel()


def _sparse_pairs(a: torch.Tensor, b: torch.Tensor) -> int:
    """Number of pairs of stored elements, of a column of `a` and the same row of `b`."""
    inner = a.shape[-1]
    columns = a.to_sparse_coo().coalesce().indices()[1].bincount(minlength=inner)
    rows = b.to_sparse_coo().coalesce().indices()[0].bincount(minlength=inner)
    return int((columns * rows).sum())


def _sampled(given: _Given, out: Any) -> int:
    """A dense product of which only the elements of a sparse matrix are computed."""
    a = given["mat1"]
    return 2 * _stored(given["self"]) * a.shape[-1] * (COMPLEX if a.is_complex() else 1)


def _layer(given: _Given, out: Any) -> int:
    """A linear layer. Its weight may be packed, so the number of columns comes from the result."""
    x = next(given[name] for name in ("input", "self", "inp") if name in given)
    return 2 * x.numel() * out.shape[-1]


def _layer_backward(given: _Given, out: Any) -> int:
    product = 2 * given["self"].numel() * given["grad_output"].shape[-1]
    return product * sum(given["output_mask"][:2])


def _list_of_products(given: _Given, out: Any) -> int:
    pairs = zip(given["self"], given["mat2"], strict=True)
    return sum(2 * a.numel() * b.shape[-1] for a, b in pairs)


def _groups(given: _Given, out: Any) -> int:
    """Grouped products, as in a mixture of experts.

    Two 3-d tensors are multiplied pairwise. Otherwise the groups divide a dimension of a matrix up
    to the last offset: with expert parallelism, the rows behind it are not multiplied.
    """
    a, b, offsets = given["self"].shape, given["mat2"].shape, given.get("offs")
    if len(a) == len(b) == 3:
        return 2 * math.prod(a) * b[-1]
    used = None if offsets is None or _lacks_data(offsets) else int(offsets[-1])
    if len(a) == 3:  # the groups divide the columns of the second matrix
        return 2 * math.prod(a[1:]) * (b[-1] if used is None else used)
    if len(b) == 3:  # the rows of the first
        return 2 * (a[0] if used is None else used) * a[1] * b[-1]
    return 2 * a[0] * (a[1] if used is None else used) * b[-1]


def _lacks_data(tensor: Any) -> bool:
    """Whether a tensor is fake, or on the meta device."""
    if tensor is None:
        return False
    return tensor.is_meta or type(tensor) not in (torch.Tensor, torch.nn.Parameter)


# Convolutions. A weight has the shape (channels, channels per group, *kernel size).


def _convolution(given: _Given, out: Any) -> int:
    x = given["input"] if "input" in given else given["self"]
    return _convolved(x, given["weight"], x if given.get("transposed") else out)


def _transposed_convolution(given: _Given, out: Any) -> int:
    return _convolved(given["self"], given["weight"], given["self"])


def _convolved(x: Any, weight: Any, places: Any) -> int:
    spatial = weight.dim() - 2  # an input without a batch has one dimension less
    batch = x.shape[0] if x.dim() > spatial + 1 else 1
    return 2 * int(batch * math.prod(places.shape[-spatial:]) * weight.numel())


def _convolution_backward(given: _Given, out: Any) -> int:
    """Each requested gradient costs as much as the forward."""
    x = given["input"] if "input" in given else given["self"]
    places = x if given.get("transposed") else given["grad_output"]
    return _convolved(x, given["weight"], places) * sum(given["output_mask"][:2])


# Attention. Several query heads may share a key head; query heads are counted.


class _Sizes(NamedTuple):
    """Sizes of attention: heads in all batches, queries, keys, channels of keys and of values."""

    heads: int
    queries: int
    keys: int
    channels: int
    values: int


def _heads_first(given: _Given) -> Iterator[_Sizes]:
    """Shapes are (batch, heads, tokens, channels)."""
    q, k, v = (given[name].shape for name in ("query", "key", "value"))
    yield _Sizes(math.prod(q[:-2]), q[-2], k[-2], q[-1], v[-1])


def _tokens_first(given: _Given) -> Iterator[_Sizes]:
    """Shapes are (batch, tokens, heads, channels); without a batch, sequences are concatenated."""
    q, k, v = (given[name].shape for name in ("query", "key", "value"))
    starts = given.get("cum_seq_q", given.get("cu_seqlens_q"))
    ends = given.get("cum_seq_k", given.get("cu_seqlens_k"))
    if starts is None or ends is None:
        yield _Sizes(q[0] * q[-2], q[-3], k[-3], q[-1], v[-1])
        return
    longest_q = given.get("max_q", given.get("max_seqlen_q")) or 0
    longest_k = given.get("max_k", given.get("max_seqlen_k")) or 0
    lengths = zip(_lengths(starts, longest_q), _lengths(ends, longest_k), strict=True)
    for queries, keys in lengths:
        yield _Sizes(q[-2], queries, keys, q[-1], v[-1])


def _lengths(starts: torch.Tensor, longest: int) -> list[int]:
    """Lengths of the sequences. Without data we assume that each has the maximal length."""
    if _lacks_data(starts):
        return [longest] * (len(starts) - 1)
    found: list[int] = starts.diff().tolist()
    return found


def visible_pairs(queries: int, keys: int, shift: int, left: int | None, right: int | None) -> int:
    """Return the number of pairs of a query and a key in a window.

    Query i sees the keys from i + shift - left to i + shift + right; None means no limit.

    Example:
        >>> visible_pairs(4, 4, 0, None, 0), visible_pairs(4, 4, 0, 1, 0)
        (10, 7)
    """
    end = keys * queries if right is None else _clipped_sum(queries, shift + right + 1, keys)
    start = 0 if left is None else _clipped_sum(queries, shift - left, keys)
    return max(end - start, 0)


def _clipped_sum(count: int, first: int, top: int) -> int:
    """Sum of the `count` numbers from `first` on, each clipped to 0 and `top`."""
    low = min(max(-first, 0), count)
    high = min(max(top - first, low), count)
    rising = (high - low) * (2 * first + low + high - 1) // 2
    return rising + top * (count - high)


def _seen(given: _Given, sizes: _Sizes) -> int:
    """Visible pairs; torch's two kinds of kernel align causal masks differently."""
    queries, keys = sizes.queries, sizes.keys
    left, right = given.get("window_size_left"), given.get("window_size_right")
    left, right = (None if size is None or size < 0 else size for size in (left, right))
    shift = keys - queries if "window_size_left" in given else 0
    kind = given.get("custom_mask_type", 0)
    if given.get("is_causal") or kind:
        right = 0
        shift = keys - queries if kind == 2 else shift
        window = given.get("window_size")
        left = window - 1 if window else left
    return visible_pairs(queries, keys, shift, left, right)


_Layout = Callable[[_Given], Iterator[_Sizes]]


def _attention(layout: _Layout) -> Count:
    """One product of queries and keys, and one of scores and values."""

    def count(given: _Given, out: Any) -> Amount:
        total = masked = 0
        for sizes in layout(given):
            pair = 2 * sizes.heads * (sizes.channels + sizes.values)
            pairs = sizes.queries * sizes.keys
            total += pair * pairs
            masked += pair * (pairs - _seen(given, sizes))
        return Amount(total, masked=masked)

    return _by_name(count)


def _attention_backward(layout: _Layout) -> Count:
    """The product of queries and keys again, and two products for each product of the forward."""

    def count(given: _Given, out: Any) -> Amount:
        total = again = masked = masked_again = 0
        for sizes in layout(given):
            scores, result = 2 * sizes.heads * sizes.channels, 2 * sizes.heads * sizes.values
            pairs = sizes.queries * sizes.keys
            hidden = pairs - _seen(given, sizes)
            total += (3 * scores + 2 * result) * pairs
            again += scores * pairs
            masked += (3 * scores + 2 * result) * hidden
            masked_again += scores * hidden
        return Amount(total, again, masked, masked_again)

    return _by_name(count)


def _heads_and_projections(given: _Given, out: Any) -> int:
    """`nn.MultiheadAttention`, fused."""
    query, key, value = given["query"], given["key"], given["value"]
    width = given["embed_dim"]
    tokens = 2 * query.numel() + key.numel() + value.numel()  # the output projection
    return 2 * tokens * width + 4 * query.numel() * key.shape[1]


def _encoder_layer(given: _Given, out: Any) -> int:
    """`nn.TransformerEncoderLayer`, fused."""
    x = given["src"]
    weights = ("qkv_weight", "proj_weight", "ffn_weight_1", "ffn_weight_2")
    tokens = x.numel() // x.shape[-1]
    return 2 * tokens * sum(given[name].numel() for name in weights) + 4 * x.numel() * x.shape[1]


# Recurrent layers. Each token is multiplied by each matrix once, and twice in backward.


def _onednn_layer(times: int, first: str, second: str) -> Count:
    def count(given: _Given, out: Any) -> int:
        x = given["input"]
        weights = given[first].numel() + given[second].numel()
        return 2 * times * (x.numel() // x.shape[-1]) * weights

    return _by_name(count)


def _recurrent(times: int) -> Count:
    def count(given: _Given, out: Any) -> int:
        x = given["input"]
        weights = sum(each.numel() for each in given["weight"] if each.dim() > 1)
        return 2 * times * (x.numel() // x.shape[-1]) * weights

    return _by_name(count)


_SDPA = [
    *("flash_attention", "efficient_attention", "cudnn_attention"),
    *("flash_attention_for_cpu", "fused_attention_overrideable", "attention_math_for_mps"),
]


def _attentions() -> Iterator[tuple[str, Count]]:
    for kernel in _SDPA:
        yield f"_scaled_dot_product_{kernel}", _attention(_heads_first)
        yield f"_scaled_dot_product_{kernel}_backward", _attention_backward(_heads_first)
    kernels = (("cudnn", _heads_first), ("flash", _tokens_first), ("efficient", _tokens_first))
    for kernel, layout in kernels:
        yield f"_{kernel}_attention_forward", _attention(layout)
        yield f"_{kernel}_attention_backward", _attention_backward(layout)
    yield "_flash_attention_forward_no_dropout_inplace", _attention(_tokens_first)


_CONVOLUTIONS = [
    *("convolution_overrideable", "cudnn_convolution", "cudnn_convolution_relu"),
    *("cudnn_convolution_add_relu", "miopen_convolution", "miopen_depthwise_convolution"),
    *("mkldnn_convolution", "_slow_conv2d_forward", "slow_conv3d_forward"),
    *("_conv_depthwise2d", "conv_depthwise3d"),
    *("slow_conv_dilated2d", "slow_conv_dilated3d", "_nnpack_spatial_convolution"),
    *("_mps_convolution", "miopen_convolution_relu", "miopen_convolution_add_relu"),
]
_TRANSPOSED = [
    *("cudnn_convolution_transpose", "miopen_convolution_transpose", "slow_conv_transpose2d"),
    *("slow_conv_transpose3d", "_mps_convolution_transpose"),
]
_BACKWARDS = [
    *("convolution_backward", "convolution_backward_overrideable", "_slow_conv2d_backward"),
    *("mps_convolution_backward",),
]
_LAYERS = [
    *("mkldnn_linear", "_weight_int8pack_mm"),
    *(
        "_weight_int4pack_mm",
        "_weight_int4pack_mm_for_cpu",
        "_weight_int4pack_mm_with_scales_and_zeros",
    ),
    "_dyn_quant_matmul_4bit",
]


def _own() -> Iterator[tuple[str, Count]]:
    yield from {
        "mm": _product("self", "mat2"),
        "addmm": _product("mat1", "mat2"),
        "_sparse_addmm": _product("mat1", "mat2"),
        "_sparse_sparse_matmul": _product("self", "other"),
        "_sparse_mm_reduce_impl": _product("self", "other"),
        "sparse_sampled_addmm": _by_name(_sampled),
        "_addmm_activation": _product("mat1", "mat2"),
        "bmm": _product("self", "mat2"),
        "baddbmm": _product("batch1", "batch2"),
        "addbmm": _product("batch1", "batch2"),
        "mv": _product("self", "vec"),
        "addmv": _product("mat", "vec"),
        "dot": _product("self", "tensor"),
        "vdot": _product("self", "other"),
        "_int_mm": _product("self", "mat2"),
        "_scaled_mm_v2": _product("self", "mat2"),
        "_foreach_mm": _by_name(_list_of_products),
        "linear_backward": _by_name(_layer_backward),
        "_grouped_mm": _by_name(_groups),
        "_scaled_grouped_mm": _by_name(_groups),
        "_scaled_grouped_mm_v2": _by_name(_groups),
        "_native_multi_head_attention": _by_name(_heads_and_projections),
        "_transformer_encoder_layer_fwd": _by_name(_encoder_layer),
        "mkldnn_rnn_layer": _onednn_layer(1, "weight0", "weight1"),
        "mkldnn_rnn_layer_backward": _onednn_layer(2, "weight1", "weight2"),
        "_cudnn_rnn": _recurrent(1),
        "_cudnn_rnn_backward": _recurrent(2),
        "miopen_rnn": _recurrent(1),
        "miopen_rnn_backward": _recurrent(2),
    }.items()
    yield from dict.fromkeys(_LAYERS, _by_name(_layer)).items()
    yield from dict.fromkeys(_CONVOLUTIONS, _by_name(_convolution)).items()
    yield from dict.fromkeys(_TRANSPOSED, _by_name(_transposed_convolution)).items()
    yield from dict.fromkeys(_BACKWARDS, _by_name(_convolution_backward)).items()
    yield from _attentions()


def _operators() -> Iterator[tuple[Any, Count]]:
    aten = torch.ops.aten
    for name, count in _own():
        for variant in (name, f"{name}_"):  # and the in-place variant
            if hasattr(aten, variant):
                yield getattr(aten, variant), count


OWN: dict[Any, Count] = dict(_operators())
"""Formulas that torch lacks, or has wrong."""

FLEX = {
    "flex_attention": _attention(_heads_first),
    "flex_attention_backward": _attention_backward(_heads_first),
}
"""Formulas of higher-order operators, by name: some exist only once they are imported."""
