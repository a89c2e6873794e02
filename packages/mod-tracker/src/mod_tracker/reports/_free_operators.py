"""Operators that multiply no matrices.

The operators listed here do at most a few operations per element. Other operators without a
formula may multiply, and a report names them.
"""

from __future__ import annotations

import re
from typing import Any

import torch

_NAMES = """
__irshift__ _add_relu _amp_foreach_non_finite_check_and_unscale _amp_update_scale _chunk_cat
_coalesce _coalesced _conj _conj_physical _cudnn_rnn_flatten_weight _dimI _dimV _efficientzerotensor
_fused_sdp_choice _fw_primal _has_same_storage_numel _indices _lazy_clone _linalg_check_errors
_local_scalar_dense _make_dual _mkldnn_transpose _neg_view _nnz _pack_padded_sequence _pin_memory
_print _reshape_alias _stack _transform_bias_rescale_qkv _values abs add addr alias all allclose
amax amin any arange as_strided bernoulli binary_cross_entropy binary_cross_entropy_backward
binary_cross_entropy_with_logits bincount binomial bitwise_and bitwise_or bitwise_xor block_diag
bucketize cat cauchy clone col2im complex conj count_nonzero dense_dim dequantize detach dim dist
div eq equal expand exponential eye fft_fftfreq fft_rfftfreq fill flip floor_divide from_file full
gather gcd ge gelu geometric glu gt hardswish hash_tensor heaviside histc histogram im2col indices
int_repr isin isinf isnan item kthvalue lcm le lift lift_fresh linalg__powsum linalg_cross
linalg_vector_norm linspace log_normal logspace logsumexp lt lu_unpack max mean min mish mode mul
multinomial nansum narrow native_norm ne nonzero nonzero_static normal normal_functional numel ones
permute poisson polar prod put qscheme range record_stream relu renorm repeat repeat_interleave
reshape roll rot90 rsub scalar_tensor searchsorted select select_backward size slice slice_backward
sort sparse_dim split split_with_sizes squeeze stack storage_offset stride sub sum t take threshold
topk trace transpose unbind unfold unfold_backward uniform unsqueeze values view view_as_complex
view_as_real where xlogy zero zeros
"""

_FAMILIES = re.compile(
    r"""(?!\w*(attention|gemm))(
    # What makes tensors, or fills them.
    \w+_like | empty\w* | new_\w+ | rand\w* | \w+_window | \w*dropout\w* | philox_\w+
    | (standard_gamma | dirichlet | sample_dirichlet)\w*
    # What moves elements, or tells of them.
    | (functional_)?(assert|sym_constrain)_\w+ | sym_\w+ | is_\w+ | set(_\w+)? | copy\w*
    | resize\w* | (pixel|channel)_\w+ | \w+_(scatter|indices|indices_copy|shuffle) | index\w*
    | scatter\w* | embedding\w* | (un)?masked_\w+ | unsafe_(\w*split|index|view|masked)\w*
    | \w+_pad_?[123n]d\w* | diag\w* | tri[lu](_indices)? | jagged_to\w+ | padded_dense\w+
    | nested_(get|view|from|tensor|select|sum|compute)\w* | to_(sparse|mkldnn|padded|copy|dense)\w*
    | sparse_(co|cs|bs|compressed|resize|sum|mask)\w* | convert_(indices|weight)_\w+
    | mkldnn_re\w+ | \w+_pack_4bit_weight
    # What reduces or compares.
    | unique\w* | (log)?cum\w+ | arg(max|min|sort) | segment_reduce\w* | aminmax
    | (var|std|median|nanmedian|norm)(_\w+)?
    # What does a few operations per element.
    | \w+_loss\w* | \w*quantize_\w+ | q_\w+ | make_per_\w+ | fused_(ada|sgd|moving)\w*
    | (glu|gelu|elu|mish|prelu|rrelu|hard\w+|leaky_relu|softplus|softshrink|log_sigmoid|pdist)_\w+
    | weight_norm_\w+ | thnn_fused_\w+ | \w*grid_sampler\w* | \w*affine_grid\w*
    # What normalizes, pools and resamples.
    | (\w+_)?(batch|layer|group|rms)_norm\w* | (\w+_)?softmax\w* | \w*pool[123]d\w*
    | upsample_\w+
    )""",
    re.VERBOSE,
)
"""Families of names, without underscores around them."""

_KNOWN = frozenset(_NAMES.split())
_MULTIPLIES = ("_foreach_mm",)
# Communication, copies around it, and profiler markers.
_NAMESPACES = frozenset({"c10d", "_c10d_functional", "fsdp", "symm_mem", "profiler", "prim"})


def is_free(operator: Any) -> bool:
    """Whether an operator is known to multiply no matrices.

    Example:
        >>> is_free(torch.ops.aten.gelu.default), is_free(torch.ops.aten.linalg_qr.default)
        (True, False)
    """
    if not isinstance(operator, torch._ops.OpOverload):
        return False
    if operator.namespace in _NAMESPACES:
        return True
    if torch.Tag.pointwise in operator.tags or operator.is_view:
        return True
    if operator.namespace not in ("aten", "prims"):
        return False
    name = operator.overloadpacket.__name__
    own = name.rstrip("_") if not name.startswith("__") else name
    if own.startswith("_foreach_"):
        return own not in _MULTIPLIES
    known = own in _KNOWN or own.removesuffix("_copy") in _KNOWN
    return known or _FAMILIES.fullmatch(own.strip("_")) is not None
