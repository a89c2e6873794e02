"""Kernels for the CPU, and a simulated device, of attention that torch has for accelerators only.

With them its nodes are torch's own, with all that they save. Each is the CPU's attention, times a
number that is drawn where there is a dropout, and that backward reads from the random state.
"""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten
KERNELS = (
    "flash_attention",
    "efficient_attention",
    "cudnn_attention",
    "fused_attention_overrideable",
)
"""By the ends of their names."""
_library = torch.library.Library("aten", "IMPL")


def _forward(end: str) -> Any:
    op = getattr(aten, f"_scaled_dot_product_{end}").default
    names = [argument.name for argument in op._schema.arguments]

    def kernel(*args: Any, scale: float | None = None) -> Any:
        given = {"attn_bias": None, "dropout_p": 0.0, "is_causal": False}
        given |= dict(zip(names, args, strict=False))
        query, key, value = (given[name] for name in ("query", "key", "value"))
        out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, given["is_causal"], attn_mask=given["attn_bias"], scale=scale
        )
        at = {"device": query.device}
        drawn = torch.ones(1, **at)
        if given["dropout_p"] > 0:
            drawn = torch.rand(1, **at) + 1
        state = (drawn, torch.zeros(1, **at))
        out = (out * drawn).to(out.dtype)
        if end == "efficient_attention":
            return out, logsumexp, *state
        # Some have tensors of lengths there, others none.
        has_lengths = end != "flash_attention"
        lengths = [torch.zeros(size, **at) if has_lengths else None for size in (3, 4)]
        return out, logsumexp, *lengths, query.shape[2], key.shape[2], *state, drawn

    return kernel


def _backward(end: str) -> Any:
    op = getattr(aten, f"_scaled_dot_product_{end}_backward").default
    names = [argument.name for argument in op._schema.arguments]

    def kernel(*args: Any, scale: float | None = None) -> Any:
        given = {"attn_bias": None, "is_causal": False, **dict(zip(names, args, strict=False))}
        drawn = given["philox_seed"]
        read = [given["grad_out_" if "grad_out_" in given else "grad_out"] * drawn]
        read += [given[name] for name in ("query", "key", "value")]
        read += [given["out"] / drawn, given["logsumexp"]]
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(each.to(read[1].dtype) for each in read[:5]),
            read[5],
            0.0,
            given["is_causal"],
            attn_mask=given["attn_bias"],
            scale=scale,
        )
        return (*grads, None) if "grad_input_mask" in given else grads

    return kernel


KIND = torch.accelerator.current_accelerator() or torch.device("cpu")
for each in KERNELS:
    for key in ("CPU", "PrivateUse1") if KIND.type == "simdev" else ("CPU",):
        _library.impl(f"_scaled_dot_product_{each}", _forward(each), key)
        _library.impl(f"_scaled_dot_product_{each}_backward", _backward(each), key)


def attend(end: str, *read: torch.Tensor, mask: Any = None, **given: Any) -> torch.Tensor:
    """Call one of them."""
    op = getattr(aten, f"_scaled_dot_product_{end}").default
    if end != "flash_attention":
        given["attn_bias"] = mask
    if end in ("efficient_attention", "cudnn_attention"):
        given["compute_log_sumexp"] = True
    out: torch.Tensor = op(*read, **given)[0]
    return out
