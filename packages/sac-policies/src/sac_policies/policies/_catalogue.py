"""Groups of operators that policies save or recompute together, each with its reason.

Names that an installed torch does not have never match; a group that matches nothing causes an
`UnmatchedEntryWarning`.
"""

from __future__ import annotations

from dataclasses import dataclass

from .._errors import PolicyError, shown


@dataclass(frozen=True)
class Group:
    """A named set of operators.

    Attributes:
        entry: the group's name in policies and messages, with a leading "@".
        why: what its members have in common.
        reasons: (operator name, overload or packet; why it is listed).
    """

    entry: str
    why: str
    reasons: tuple[tuple[str, str], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The operator names."""
        return tuple(name for name, _ in self.reasons)


MATMULS = Group(
    "@matmuls",
    "Quadratic or cubic work for linear output: the most time per byte kept.",
    (
        ("aten.mm", "matrix times matrix; every Linear without bias"),
        ("aten.addmm", "matrix product with bias; every Linear with bias"),
        ("aten.bmm", "batched product; attention written by hand, per-expert weights"),
        ("aten.baddbmm", "batched product with an addend; attention with a bias"),
        ("aten.addbmm", "batched product summed over the batch"),
        ("aten.mv", "matrix times vector"),
        ("aten.addmv", "matrix times vector with an addend"),
        ("aten.dot", "vector products reduce all their work to one number"),
        ("aten.vdot", "as dot, for complex vectors"),
        ("aten.linear", "kept whole where a device or subclass does not decompose it"),
        ("aten._addmm_activation", "product, bias and activation in one kernel"),
        ("aten._grouped_mm", "one product per expert over ragged groups"),
        ("aten._sparse_mm", "product with a sparse matrix"),
        ("aten._sparse_semi_structured_linear", "2:4 sparse product"),
        ("aten._sparse_semi_structured_mm", "2:4 sparse product"),
        ("mkldnn._linear_pointwise", "product fused with an activation on CPU"),
    ),
)

MATMULS_2D = Group(
    "@matmuls_2d",
    "Products without a batch dimension: weights times activations, not attention scores.",
    (
        ("aten.mm", "matrix times matrix"),
        ("aten.addmm", "matrix product with bias"),
        ("aten.mv", "matrix times vector"),
        ("aten.addmv", "matrix times vector with an addend"),
        ("aten.dot", "vector product"),
        ("aten.linear", "kept whole where a device or subclass does not decompose it"),
        ("aten._addmm_activation", "product, bias and activation in one kernel"),
    ),
)

ATTENTION = Group(
    "@attention",
    "Work quadratic in the sequence for an output linear in it.",
    (
        ("aten._scaled_dot_product_flash_attention", "the usual CUDA kernel in half precision"),
        ("aten._scaled_dot_product_flash_attention_for_cpu", "the usual CPU kernel"),
        ("aten._scaled_dot_product_efficient_attention", "CUDA kernel with a mask, and fp32"),
        ("aten._scaled_dot_product_cudnn_attention", "cuDNN kernel on Hopper and later"),
        ("aten._scaled_dot_product_fused_attention_overrideable", "kernel of another device"),
        ("aten._scaled_dot_product_attention_math_for_mps", "Metal kernel"),
        ("aten._flash_attention_forward", "flash attention called directly, variable lengths"),
        ("aten._efficient_attention_forward", "efficient attention called directly"),
        ("aten._cudnn_attention_forward", "cuDNN attention called directly"),
        ("flex_attention", "attention with a user's score function"),
        ("flash_attn._flash_attn_forward", "the flash-attn package"),
        ("flash_attn._flash_attn_varlen_forward", "the flash-attn package, variable lengths"),
        ("flash_attn_3.fwd", "the flash-attn package, version 3"),
        ("xformers_flash.flash_fwd", "xformers' copy of flash attention"),
        ("xformers.efficient_attention_forward_cutlass", "xformers' CUTLASS kernel"),
    ),
)

CONVOLUTIONS = Group(
    "@convolutions",
    "Products in disguise: a kernel's worth of work per output element.",
    (
        ("aten.convolution", "every convolution before a backend is chosen"),
        ("aten._convolution", "the same with backend flags"),
        ("aten.convolution_overrideable", "convolution of another device"),
        ("aten.cudnn_convolution", "chosen explicitly"),
        ("aten.mkldnn_convolution", "chosen explicitly on CPU"),
        ("aten.miopen_convolution", "chosen explicitly on ROCm"),
        ("mkldnn._convolution_pointwise", "convolution fused with an activation on CPU"),
    ),
)

COLLECTIVES = Group(
    "@collectives",
    "Recomputing one sends the data again, and every rank must join in.",
    (
        ("_c10d_functional.all_gather_into_tensor", "sequence and tensor parallel inputs"),
        ("_c10d_functional.reduce_scatter_tensor", "sequence and tensor parallel outputs"),
        ("_c10d_functional.all_reduce", "tensor parallel outputs"),
        ("_c10d_functional.all_to_all_single", "tokens on their way to and from experts"),
        ("_c10d_functional.broadcast", "values from one rank"),
        ("_dtensor.shard_dim_alltoall", "DTensor redistribution between two sharded dims"),
        ("deepep.dispatch", "tokens to experts"),
        ("deepep.combine", "tokens back from experts"),
        ("hybridep.dispatch", "tokens to experts, across nodes"),
        ("hybridep.combine", "tokens back from experts, across nodes"),
    ),
)

QUANTISED = Group(
    "@quantised",
    "Products in low precision, and the scales they need.",
    (
        ("aten._scaled_mm", "product of float8 matrices with scales"),
        ("aten._scaled_grouped_mm", "one float8 product per expert"),
        ("aten._int_mm", "product of int8 matrices"),
        ("aten._weight_int4pack_mm", "int4 weights"),
        ("aten._weight_int8pack_mm", "int8 weights"),
        ("aten.max", "float8 scales: one number for a pass over the whole tensor"),
        ("aten.amax", "as max, along dimensions"),
        ("aten.aminmax", "both ends of the range in one pass"),
    ),
)

CATALOGUE = (MATMULS, MATMULS_2D, ATTENTION, CONVOLUTIONS, COLLECTIVES, QUANTISED)
_BY_ENTRY = {group.entry: group for group in CATALOGUE}


def group_named(entry: str, *, where: str = "checkpoint") -> Group:
    """Return the group with a "@name".

    Raises:
        PolicyError: there is no such group.
    """
    if entry not in _BY_ENTRY:
        raise PolicyError(
            f"sac_policies.{where}: group {shown(entry)} is unknown, but a leading '@' names a "
            f"group of the catalogue. Use one of {', '.join(_BY_ENTRY)}."
        )
    return _BY_ENTRY[entry]
