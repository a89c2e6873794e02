"""Which functions of torch a piece answers, by name. Other functions need whole tensors."""

from __future__ import annotations

_BINARY = (
    *("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow"),
    *("and", "or", "xor", "lshift", "rshift"),
)
_OPERATORS = {
    *(f"__{prefix}{name}__" for name in _BINARY for prefix in ("", "i", "r")),
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"),
    *("__neg__", "__pos__", "__abs__", "__invert__"),
}

# Names with the tag `torch.Tag.pointwise`, without special functions, and their aliases.
_POINTWISE = """
abs absolute acos acosh add addcdiv addcmul angle arccos arccosh arcsin arcsinh arctan arctan2
arctanh asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or
bitwise_right_shift bitwise_xor bucketize ceil celu clamp clamp_max clamp_min clip conj
conj_physical copysign cos cosh deg2rad digamma div divide elu eq erf erfc erfinv exp exp2 expm1
fix float_power floor floor_divide fmax fmin fmod frac frexp gcd ge gelu greater greater_equal gt
hardshrink hardsigmoid hardswish hardtanh heaviside hypot i0 igamma igammac isclose isfinite isinf
isnan isneginf isposinf isreal lcm ldexp le leaky_relu lerp less less_equal lgamma log log10 log1p
log2 logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit lt masked_fill
maximum minimum mish mul multiply mvlgamma nan_to_num ne neg negative nextafter not_equal
polygamma positive pow rad2deg reciprocal relu relu6 remainder round rsqrt rsub searchsorted selu
sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink sqrt square sub subtract tan tanh
threshold true_divide trunc where xlogy
"""
_COPIES = """
bfloat16 bool byte cdouble cfloat chalf char clone contiguous copy cpu cuda detach double empty_like
fill float full_like half int int_repr long new_empty new_full new_ones new_tensor new_zeros
ones_like pin_memory requires_grad resolve_conj resolve_neg short to type type_as zero zeros_like
"""
_VIEWS = """
adjoint expand_as flatten imag moveaxis movedim permute ravel real reshape reshape_as squeeze
swapaxes swapdims t transpose unflatten unsqueeze view view_as view_as_complex view_as_real
"""

NAMES = {name for text in (_POINTWISE, _COPIES, _VIEWS) for name in text.split()}
ELEMENTWISE_FUNCTIONS = frozenset({*NAMES, *(f"{name}_" for name in NAMES), *_OPERATORS})
"""Functions that compute each element of their result from the same element of their arguments."""

QUESTIONS = frozenset(
    {
        *("__delete__", "__dir__", "__hash__", "__len__", "__set__", "as_subclass", "backward"),
        *("can_cast", "data_ptr", "dense_dim", "detach_", "dim", "element_size", "get_device"),
        *("has_names", "is_coalesced", "is_complex", "is_conj", "is_contiguous", "is_distributed"),
        *("is_floating_point", "is_inference", "is_neg", "is_nonzero_storage", "is_pinned"),
        *("is_same_size", "is_set_to", "is_shared", "is_signed", "is_tensor", "module_load"),
        *("ndimension", "nelement", "numel", "promote_types", "record_stream"),
        *("register_hook", "register_post_accumulate_grad_hook", "result_type", "retain_grad"),
        *("share_memory_", "size", "storage", "storage_offset", "storage_type", "stride"),
        *("untyped_storage", "_typed_storage", "_is_view", "_has_compatible_shallow_copy_type"),
    }
)
"""Functions that look at no element."""

FILLS = frozenset(
    {
        *("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_"),
        *("random_", "uniform_", "rand_like", "randn_like", "randint_like"),
    }
)
"""Functions that draw random elements."""

ALONG_ROWS = frozenset(
    {
        *("all", "amax", "amin", "aminmax", "any", "argmax", "argmin", "count_nonzero", "cumsum"),
        *("kthvalue", "linalg_matrix_norm", "linalg_norm", "linalg_vector_norm", "logsumexp"),
        *("max", "mean", "median", "min", "mode", "nanmean", "nansum", "norm", "prod", "quantile"),
        *("softmax", "std", "sum", "topk", "var"),
    }
)
"""Reductions that are right along rows or blocks that this rank has whole."""

NORMS = frozenset({"norm", "linalg_norm", "linalg_vector_norm", "_foreach_norm"})

JOINS = frozenset({"cat", "concat", "concatenate"})
