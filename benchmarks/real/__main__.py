"""Train a Llama of real size in many ways: ours, torch's and transformers'.

    python tools/bench_real.py --front-page --json results.json --figure results.svg
    python tools/bench_real.py --front-page --moe --json moe.json --figure moe.svg
    python tools/bench_real.py --model 1b --json results.json
    python tools/bench_real.py --model toy --ways "plain,checkpoint_,fit_*"
    python tools/bench_real.py --list

Each way reports the time of a whole step (forward, backward and the optimizer, if it has one),
tokens per second, the peak memory of a step with parameters and gradients, the memory kept
between forward and backward, and whether its gradients are bit-identical to the plain model's.
Ratios are to the first way of each group.

`--front-page` trains with AdamW, whose learning rate is 0 so that all ways can share parameters:
a Llama of 1B with a vocabulary of 128,256, and 8 layers of Llama 8B's shape at 8k and 32k tokens,
in at most 8 minutes of one GPU. `--moe` has a mixture of experts instead, whose router draws noise
that no checkpoint restores; `--toy` runs the same code at toy size.

Runs with torch, the packages of this repository, and transformers if it is installed. To add a
way, write a function with the decorator `way` that changes a `Case`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import math
import os
import platform
import shlex
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

# Read once, when CUDA and the profiler start.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("KINETO_LOG_LEVEL", "6")

import torch
import torch.distributed as dist
from step_figure import Panel, Point, draw
from step_measurement import LEAK_FRACTION, MIB, Bench, Case, Row, Subject, Unavailable
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional

# --------------------------------------------------------------------------- models


@dataclass(frozen=True)
class Shape:
    """A model's shape and the defaults of its runs.

    Attributes:
        batches: (sequences, tokens of each), one run for each pair.
        rounds: timed steps of each way.
        seconds_limit: no round starts after this time, and no way after three quarters of it.
        ways: what to select.
        dtype: of parameters and activations.
        compiler: backend of `torch.compile`.
        experts: number of experts in each layer; 0 for a Llama. Each token uses two of them, or
            eight if there are more than 16, and `intermediate` is the width of one.
        optimizer: whether all ways share an AdamW that leaves parameters unchanged.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    batches: tuple[tuple[int, int], ...]
    rounds: int
    seconds_limit: float
    ways: str = "*"
    dtype: torch.dtype = torch.bfloat16
    compiler: str = "inductor"
    experts: int = 0
    optimizer: bool = False


MODELS = {
    "1b": Shape(2048, 8192, 16, 32, 8, 32_000, ((2, 4096),), rounds=7, seconds_limit=420),
    # With a vocabulary of 1,024, time and memory are those of the layers.
    "8b-layers": Shape(
        4096, 14336, 8, 32, 8, 1024, ((1, 8192), (1, 32768)), rounds=4, seconds_limit=900
    ),
    "1b-128k": Shape(2048, 8192, 16, 32, 8, 128_256, ((1, 4096),), rounds=5, seconds_limit=140),
    "qwen3-moe": Shape(
        2048, 768, 8, 32, 4, 32_000, ((1, 4096),), rounds=5, seconds_limit=240, experts=64
    ),
    "toy-moe": Shape(
        64,
        32,
        4,
        4,
        2,
        128,
        ((2, 64),),
        rounds=5,
        seconds_limit=200,
        dtype=torch.float32,
        experts=4,
    ),
    "toy-vocabulary": Shape(
        64,
        128,
        4,
        4,
        2,
        4096,
        ((2, 128),),
        rounds=3,
        seconds_limit=200,
        dtype=torch.float32,
    ),
    # Many CPUs have no fast bfloat16. Compiling and MemTracker take longer than
    # everything else.
    "toy": Shape(
        64,
        256,
        4,
        4,
        2,
        128,
        ((2, 128),),
        rounds=3,
        seconds_limit=300,
        ways="*,!compiled,!torch MemTracker",
        dtype=torch.float32,
        compiler="aot_eager",
    ),
}


class Attention(nn.Module):
    """Causal attention with rotary embeddings and grouped keys and values."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.hidden // shape.heads
        kv = shape.kv_heads * self.head_dim
        self.q_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.k_proj = nn.Linear(shape.hidden, kv, bias=False)
        self.v_proj = nn.Linear(shape.hidden, kv, bias=False)
        self.o_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Attend to this and earlier positions."""
        batch, length, _ = x.shape
        q, k, v = (
            projection(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        groups = q.shape[1] // k.shape[1]
        k, v = (tensor.repeat_interleave(groups, dim=1) for tensor in (k, v))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(attended.transpose(1, 2).reshape(batch, length, -1))


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of channels by angles that grow with the position."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class FeedForward(nn.Module):
    """A gated feed-forward network."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the network at each position."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_norm = nn.RMSNorm(shape.hidden, eps=1e-6)
        self.attention = Attention(shape)
        self.output_norm = nn.RMSNorm(shape.hidden, eps=1e-6)
        self.feed_forward = FeedForward(shape)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Add attention, then the feed-forward network."""
        x = x + self.attention(self.input_norm(x), cos, sin)
        return x + self.feed_forward(self.output_norm(x))


class Llama(nn.Module):
    """A Llama that returns its loss; used where transformers is not installed."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.hidden // shape.heads
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-6)
        self.lm_head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def hidden(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the states that the head maps to logits."""
        x = self.embedding(input_ids)
        positions = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)
        channels = torch.arange(0, self.head_dim, 2, device=x.device, dtype=torch.float32)
        angles = positions[:, None] * 10_000.0 ** (-channels / self.head_dim)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of the next tokens."""
        logits = self.lm_head(self.hidden(input_ids)).float()
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


Loss = Callable[[nn.Linear, torch.Tensor, torch.Tensor], torch.Tensor]
"""Mean cross-entropy of targets (N,), from the head and hidden states (N, width)."""


class HeadLoss(nn.Module):
    """A model whose head and loss are computed together."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of the next tokens."""
        if isinstance(self.model, Llama):
            hidden = self.model.hidden(input_ids)
        else:
            hidden = self.model.model(input_ids=input_ids, use_cache=False).last_hidden_state
        hidden, targets = hidden[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return self.loss(self.model.lm_head, hidden, targets)


def sliced_loss(head: nn.Linear, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Have logits for one of 16 slices of the tokens at a time."""
    from sac_policies import in_slices

    def loss_of(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(head(hidden).float(), targets, reduction="sum")

    return in_slices(loss_of, 16)(hidden, targets) / targets.numel()


def trl_loss() -> Loss:
    """Return TRL's loss over chunks of the vocabulary.

    Raises:
        Unavailable: trl is not installed, or has no such function.
    """
    try:
        from trl.kernels.chunked_logprob import ChunkedLogProbFunction
    except ImportError as error:
        raise Unavailable(f"trl's chunked loss cannot be imported: {error}") from error

    def loss(head: nn.Linear, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        chunk = min(8192, head.out_features)
        given = (hidden, head.weight, head.bias, targets, 1.0, chunk, None, 1.0, ())
        return -ChunkedLogProbFunction.apply(*given)[0].mean()

    return loss


def liger_loss() -> Loss:
    """Return Liger's fused head and loss, a Triton kernel.

    Raises:
        Unavailable: liger_kernel or Triton is not installed.
    """
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError as error:
        raise Unavailable(f"liger_kernel cannot be imported: {error}") from error
    fused = LigerFusedLinearCrossEntropyLoss()
    return lambda head, hidden, targets: fused(head.weight, hidden, targets)


class NoisyRouter(nn.Module):
    """Chooses experts by logits with noise from a generator that no checkpoint restores.

    All routers of a device share the generator; a forward of the whole model sets its seed, so
    that all ways choose the same experts in their first forward.
    """

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.weight, self.top_k = router.weight, router.top_k

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return logits, weights and numbers of the chosen experts."""
        logits = functional.linear(hidden, self.weight)
        noise = torch.empty_like(logits).normal_(generator=noise_of(hidden.device))
        weights, chosen = (logits + noise).float().softmax(-1).topk(self.top_k, -1)
        return logits, (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), chosen


@functools.cache
def noise_of(device: torch.device) -> torch.Generator:
    """Return the generator of all routers on a device."""
    return torch.Generator(device)


def transformers_moe(shape: Shape) -> nn.Module:
    """Build transformers' Qwen3-MoE with noise in its routers."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            hidden_size=shape.hidden,
            moe_intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.hidden // shape.heads,
            num_experts=shape.experts,
            num_experts_per_tok=8 if shape.experts > 16 else 2,
            norm_topk_prob=True,
            vocab_size=shape.vocabulary,
            tie_word_embeddings=False,
            use_cache=False,
            attn_implementation="sdpa",
        )
    )
    for layer in model.model.layers:
        layer.mlp.gate = NoisyRouter(layer.mlp.gate)
    model.register_forward_pre_hook(_reseed_noise)
    return model


def _reseed_noise(model: nn.Module, args: object) -> None:
    noise_of(next(model.parameters()).device).manual_seed(0)


def transformers_llama(shape: Shape) -> nn.Module:
    """Build the same shape from transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            vocab_size=shape.vocabulary,
            max_position_embeddings=131_072,
            tie_word_embeddings=False,
            use_cache=False,
            attn_implementation="sdpa",
        )
    )


def build_subject(
    shape: Shape, llama: str, batch: tuple[int, int], device: torch.device
) -> Subject:
    """Build the model, with parameters and tokens from fixed seeds."""
    make = transformers_llama if llama == "transformers" else Llama
    if shape.experts:
        make = transformers_moe
    torch.manual_seed(0)
    torch.set_default_dtype(shape.dtype)
    try:
        with device:
            model = make(shape).train()
    finally:
        torch.set_default_dtype(torch.float32)
    ids = torch.randint(shape.vocabulary, batch, generator=torch.Generator().manual_seed(1))
    ids = ids.to(device)
    subject = Subject(model, layers_of, {"input_ids": ids, "labels": ids}, device, shape)
    if shape.optimizer:
        subject.optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
    return subject


def layers_of(model: nn.Module) -> nn.ModuleList:
    """Return the decoder layers of either Llama."""
    return model.layers if isinstance(model, Llama) else model.model.layers


# --------------------------------------------------------------------------- ways

GROUPS = {
    "eager": "layers run eagerly",
    "compiled": "layers compiled one by one",
    "training": "with AdamW",
    "reports": "one report for each step",
}
# Ratios are relative to the first way of each group.
REBUILT = ("training",)
SHARES = ("75%", "50%", "35%")
OURS = ("checkpoint_*", "offload_", "sac_policies *", "fit_ *", "compiled sac_policies *")


@dataclass(frozen=True)
class Registered:
    """One way to train."""

    name: str
    group: str
    prepare: Callable[[Case], None]
    exact: bool


@dataclass(frozen=True)
class Job:
    """One model and batch shape, run in some ways.

    Attributes:
        name: of the model.
        shape: of the model.
        batch: sequences, and tokens of each.
        ways: selected, see `--list`.
        rounds: timed steps of each way.
        seconds: after this time no round starts, and no way after three quarters of it.
    """

    name: str
    shape: Shape
    batch: tuple[int, int]
    ways: list[Registered]
    rounds: int
    seconds: float


WAYS: list[Registered] = []
Prepare = Callable[[Case], None]


def way(
    name: str, group: str = "eager", *, exact: bool | None = None
) -> Callable[[Prepare], Prepare]:
    """Register a function that changes a case.

    Args:
        name: without commas.
        group: one of `GROUPS`.
        exact: whether gradients should have plain's bits; by default, unless compiled.
    """

    def register(prepare: Prepare) -> Prepare:
        is_exact = group != "compiled" if exact is None else exact
        WAYS.append(Registered(name, group, prepare, is_exact))
        return prepare

    return register


def torch_sac_contexts() -> Any:
    """Make contexts of torch's selective checkpointing that keep matmuls and attention."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    aten = torch.ops.aten
    kept = {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
    return create_selective_checkpoint_contexts(policy)


def wrap_with_torch_sac(case: Case) -> None:
    """Wrap layers as torchtitan does."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for index, layer in enumerate(case.layers):
        case.layers[index] = checkpoint_wrapper(layer, context_fn=torch_sac_contexts)


def checkpoint_layers(case: Case, policy: Any = None, **options: Any) -> None:
    """Checkpoint each layer in place; with a policy, by sac_policies."""
    import ckpt_wrap
    import sac_policies

    if policy is not None:
        options |= {"checkpoint_fn": sac_policies.checkpoint, "policy": policy}
    for layer in case.layers:
        ckpt_wrap.checkpoint_(layer, **options)


def offload_layers(case: Case) -> None:
    """Offload each layer in place."""
    import ckpt_wrap

    for layer in case.layers:
        ckpt_wrap.offload_(layer)


def matmuls_and_attention() -> Any:
    """Return the policy that keeps matmuls and attention."""
    from sac_policies import ATTENTION, MATMULS, save_ops

    return save_ops(MATMULS, ATTENTION)


def transformers_switch(case: Case, **options: Any) -> None:
    """Call transformers' method for checkpointing."""
    if isinstance(case.model, Llama):
        raise Unavailable("only transformers' own models have this switch")
    enable = getattr(case.model, "activation_checkpointing_enable", None)
    if enable is None:
        case.model.gradient_checkpointing_enable({"use_reentrant": False}, **options)
    else:
        enable({"use_reentrant": False}, **options)


def new_transformers_switch(case: Case, **options: Any) -> None:
    """Call the method with options that older versions lack."""
    if not (
        isinstance(case.model, Llama) or hasattr(case.model, "activation_checkpointing_enable")
    ):
        raise Unavailable(
            f"transformers {version('transformers')} has no option {next(iter(options))}="
        )
    transformers_switch(case, **options)


@way("plain")
def _(case: Case) -> None:
    pass


@way("checkpoint_")
def _(case: Case) -> None:
    checkpoint_layers(case)


@way("checkpoint_layers_ every=2")
def _(case: Case) -> None:
    import ckpt_wrap

    ckpt_wrap.checkpoint_layers_(case.model, every=2)


@way("checkpoint_ and offload_")
def _(case: Case) -> None:
    checkpoint_layers(case)
    offload_layers(case)


# Sums over slices are added in another order.
@way("checkpoint_ and in_slices", exact=False)
def _(case: Case) -> None:
    checkpoint_layers(case)
    case.model = HeadLoss(case.model, sliced_loss)


@way("checkpoint_ and TRL loss", exact=False)
def _(case: Case) -> None:
    checkpoint_layers(case)
    case.model = HeadLoss(case.model, trl_loss())


@way("checkpoint_ and Liger loss", exact=False)
def _(case: Case) -> None:
    checkpoint_layers(case)
    case.model = HeadLoss(case.model, liger_loss())


@way("offload_")
def _(case: Case) -> None:
    require_host_memory(case)
    offload_layers(case)


@way("transformers")
def _(case: Case) -> None:
    transformers_switch(case)


@way("transformers every_n_layers=2")
def _(case: Case) -> None:
    new_transformers_switch(case, every_n_layers=2)


@way("transformers offload=True")
def _(case: Case) -> None:
    new_transformers_switch(case, offload=True)


@way("torch SAC")
def _(case: Case) -> None:
    wrap_with_torch_sac(case)


@way("torch_remat")
def _(case: Case) -> None:
    if importlib.util.find_spec("torch_remat") is None:
        raise Unavailable("torch_remat is not installed")
    import torch_remat

    for number, layer in enumerate(case.layers):
        layer.forward = torch_remat.checkpoint(region_name=f"layer{number}")(layer.forward)


@way("TRL offload")
def _(case: Case) -> None:
    if importlib.util.find_spec("trl") is None:
        raise Unavailable("trl is not installed")
    if case.device.type == "cpu":
        raise Unavailable("needs an accelerator")
    from trl.models.activation_offloading import get_act_offloading_ctx_manager

    require_host_memory(case)
    offloading = get_act_offloading_ctx_manager(case.model, warn_if_no_head=False)
    case.around_forward = lambda: offloading


@way("sac_policies matmuls")
def _(case: Case) -> None:
    checkpoint_layers(case, matmuls_and_attention())


@way("sac_policies matmuls unchecked")
def _(case: Case) -> None:
    checkpoint_layers(case, matmuls_and_attention(), determinism_check="none")


@way("sac_policies matmuls offloaded")
def _(case: Case) -> None:
    from sac_policies import offload

    require_host_memory(case)
    checkpoint_layers(case, offload(matmuls_and_attention()))


@way("sac_policies nothing kept")
def _(case: Case) -> None:
    from sac_policies import recompute_all

    checkpoint_layers(case, recompute_all())


def fit(case: Case, share: str) -> None:
    """Let fit_ choose what to keep for a share of the plain peak."""
    from sac_policies import fit_

    began = time.monotonic()
    budget: int | str = share
    if share == "smallest":
        # If no plan fits the budget, fit_'s error has the smallest measured peak.
        budget = fit_(case.model, case.batch, 1, optimizer=case.optimizer).smallest_bytes
    found = fit_(case.model, case.batch, budget, optimizer=case.optimizer)
    if not found:
        raise Unavailable(str(found).partition(" (")[0])
    case.note = f"fitted in {time.monotonic() - began:.1f} s"


for _share in (*SHARES, "smallest"):

    @way(f"fit_ {_share}")
    def _(case: Case, share: str = _share) -> None:
        fit(case, share)


@way("fit_ 75% and in_slices", exact=False)
def _(case: Case) -> None:
    case.model = HeadLoss(case.model, sliced_loss)
    fit(case, "75%")


@way("torch save_on_cpu")
def _(case: Case) -> None:
    require_host_memory(case)
    pinned = case.device.type != "cpu"
    case.around_forward = functools.partial(
        torch.autograd.graph.save_on_cpu, pin_memory=pinned, device_type=case.device.type
    )


def compile_layers(case: Case, budget: float | None = None) -> None:
    """Compile each layer, with separate code for each way.

    Dynamo finds compiled code by the function and the backend. A new backend prevents ways with
    other settings from using this way's code.
    """
    from torch._dynamo.backends.registry import lookup_backend
    from torch._functorch import config

    torch._dynamo.config.recompile_limit = 64  # all ways compile one function
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # instead of running it uncompiled
    compiler = lookup_backend(case.shape.compiler)

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Any:
        if budget is None:
            return compiler(graph, inputs)
        with config.patch(activation_memory_budget=budget):
            return compiler(graph, inputs)

    for layer in case.layers:
        layer.compile(backend=backend, dynamic=False)


@way("compiled plain", "compiled")
def _(case: Case) -> None:
    compile_layers(case)


@way("compiled checkpoint_", "compiled")
def _(case: Case) -> None:
    checkpoint_layers(case)
    compile_layers(case)


@way("compiled torch SAC", "compiled")
def _(case: Case) -> None:
    wrap_with_torch_sac(case)
    compile_layers(case)


@way("compiled sac_policies matmuls", "compiled")
def _(case: Case) -> None:
    checkpoint_layers(case, matmuls_and_attention())
    compile_layers(case)


for _budget in (0.5, 0.25):

    @way(f"compiled torch budget {_budget}", "compiled")
    def _(case: Case, budget: float = _budget) -> None:
        compile_layers(case, budget=budget)


@way("compiled fit_ 50%", "compiled")
def _(case: Case) -> None:
    compile_layers(case)
    fit(case, "50%")


def adamw(tensors: Any) -> torch.optim.Optimizer:
    """Make the optimizer that all ways share."""
    return torch.optim.AdamW(tensors, lr=1e-4, fused=True)


@functools.cache
def one_rank(device_type: str) -> DeviceMesh:
    """Start a process group of this process alone."""
    backend = "gloo" if device_type == "cpu" else dist.get_default_backend_for_device(device_type)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh(device_type, (1,))


@way("AdamW over parameters", "training")
def _(case: Case) -> None:
    case.optimizer = adamw(case.model.parameters())


@way("AdamW over flatten chunks", "training")
def _(case: Case) -> None:
    import flat_param

    case.optimizer = adamw(flat_param.flatten(case.model).chunks())


@way("FSDP2 one rank", "training")
def _(case: Case) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = one_rank(case.device.type)
    for module in (*case.layers, case.model):
        fully_shard(module, mesh=mesh)
    case.optimizer = adamw(case.model.parameters())


@way("fully_shard one rank", "training")
def _(case: Case) -> None:
    from flat_param import fully_shard

    mesh = one_rank(case.device.type)
    for module in (*case.layers, case.model):
        fully_shard(module, mesh=mesh)
    case.optimizer = adamw(case.model.parameters())


@way("no report", "reports")
def _(case: Case) -> None:
    pass


@way("ModTracker", "reports")
def _(case: Case) -> None:
    from mod_tracker import ModTracker

    case.around = ModTracker


@way("torch ModTracker", "reports")
def _(case: Case) -> None:
    from torch.distributed._tools.mod_tracker import ModTracker

    case.around = ModTracker


@way("profile_time", "reports")
def _(case: Case) -> None:
    from mod_tracker import profile_time

    case.around = profile_time


@way("profile_time clock=device", "reports")
def _(case: Case) -> None:
    from mod_tracker import profile_time

    if case.device.type == "cpu":
        raise Unavailable("needs an accelerator")
    case.around = functools.partial(profile_time, clock="device")


@way("profile_flops", "reports")
def _(case: Case) -> None:
    from mod_tracker import profile_flops

    case.around = profile_flops


# It decomposes operators, which rounds differently.
@way("torch FlopCounterMode", "reports", exact=False)
def _(case: Case) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    case.around = functools.partial(FlopCounterMode, display=False)


@way("profile_memory", "reports")
def _(case: Case) -> None:
    from mod_tracker import profile_memory

    case.around = profile_memory


@way("torch MemTracker", "reports")
def _(case: Case) -> None:
    from torch.distributed._tools.mem_tracker import MemTracker

    def tracker() -> MemTracker:
        made = MemTracker()
        made.track_external(case.model)
        return made

    case.around = tracker


@way("trace", "reports")
def _(case: Case) -> None:
    from mod_tracker import trace

    case.around = trace


def require_host_memory(case: Case) -> None:
    """Refuse a way that would keep more activations in host memory than is free.

    Raises:
        Unavailable: host memory is too small. The system would kill the process, without results.
    """
    if case.device.type == "cpu":
        return
    tokens, shape = case.batch["input_ids"].numel(), case.shape
    # In bfloat16, of each token and layer: about 14 vectors of `hidden` and 4 of `intermediate`.
    needed = 2 * tokens * shape.layers * (14 * shape.hidden + 4 * shape.intermediate)
    # In float32: logits and their softmax. Pinned blocks may be rounded up to powers of two.
    reason = too_little_host_memory(1.5 * (needed + 8 * tokens * shape.vocabulary))
    if reason:
        raise Unavailable(reason)


@functools.cache
def too_little_host_memory(needed: float) -> str:
    """Return why host memory is too small, or None; the first way's memory is the measure."""
    free = free_host_bytes()
    if needed <= free:
        return ""
    return f"may keep {needed / 2**30:.0f} GiB in host memory, but {free / 2**30:.0f} are free"


def free_host_bytes() -> int:
    """Return the host memory this process may still use."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):  # no control group, or no limit
        free = min(free, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return free


# --------------------------------------------------------------------------- results

COLUMNS = ("way", "ms", "over", "tokens/s", "peak MiB", "over", "kept MiB", "gradients", "note")


@dataclass
class Run:
    """The results of all ways of one job."""

    job: Job
    parameters: int
    parameter_bytes: int
    rows: list[Row]

    def to_dict(self) -> dict[str, Any]:
        """Return the run as values for JSON."""
        return {
            "model": self.job.name,
            "parameters": self.parameters,
            "dtype": str(self.job.shape.dtype).removeprefix("torch."),
            "optimizer": "AdamW with learning rate 0" if self.job.shape.optimizer else None,
            "sequences": self.job.batch[0],
            "tokens_each": self.job.batch[1],
            "rounds": self.job.rounds,
            "ways": self.entries(),
        }

    def entries(self) -> list[dict[str, Any]]:
        """Return one dict for each way, with everything in the table and more."""
        entries: list[dict[str, Any]] = []
        first: dict[str, Row] = {}
        for row in self.rows:
            base = first.setdefault(row.group, row)
            entry = {"way": row.name, "group": row.group, "error": row.error, "note": row.note}
            if row.ms is not None and row.peak_bytes is not None:
                entry |= {
                    "ms": round(row.ms, 2),
                    "ms_over": ratio(row.ms, base.ms),
                    "ms_fastest": round(min(row.seconds) * 1e3, 2),
                    "ms_all": [round(one * 1e3, 2) for one in row.seconds],
                    "tokens_per_second": round(math.prod(self.job.batch) / row.ms * 1e3),
                    "peak_mib": round(row.peak_bytes / MIB, 2),
                    "peak_over": ratio(row.peak_bytes, base.peak_bytes),
                    "kept_mib": round(row.kept_bytes / MIB, 2),
                    "held_mib": round(row.held_bytes / MIB, 2),
                    "leaked_mib": round(row.leaked_bytes / MIB, 2),
                    "leaks": row.leaked_bytes > LEAK_FRACTION * self.parameter_bytes,
                    "gradients": row.gradients,
                    "gradients_off": row.gradients_off,
                }
            if row.optimizer_seconds:
                alone = statistics.median(row.optimizer_seconds) * 1e3
                entry["optimizer_ms"] = round(alone, 2)
            entries.append(entry)
        return entries


def ratio(value: float, base: float | None) -> float | None:
    """Format a ratio."""
    return round(value / base, 2) if base else None


def cells(entry: dict[str, Any]) -> tuple[str, ...]:
    """Return one line of the table."""
    if entry["error"]:
        return (entry["way"], *[""] * 7, f"cannot run: {entry['error']}")
    if "ms" not in entry:
        return (entry["way"], *[""] * 7, "not timed")
    off = entry["gradients_off"]
    notes = [entry["note"]]
    if "optimizer_ms" in entry:
        notes.append(f"optimizer alone {entry['optimizer_ms']} ms")
    if entry["leaks"]:
        notes.append(f"leaks {entry['leaked_mib']} MiB")
    return (
        entry["way"],
        f"{entry['ms']:,}",
        f"{entry['ms_over']}",
        f"{entry['tokens_per_second']:,}",
        f"{entry['peak_mib']:,}",
        f"{entry['peak_over']}",
        f"{entry['kept_mib']:,}",
        entry["gradients"] if off is None else f"off by {off:.1e}",
        "; ".join(filter(None, notes)),
    )


def table(entries: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table, with a heading for each group."""
    lines: list[tuple[str, ...]] = [COLUMNS]
    groups: list[str] = []
    for entry in entries:
        if entry["group"] not in groups:
            groups.append(entry["group"])
            heading = f"**{entry['group']}**: {GROUPS[entry['group']]}"
            lines.append((heading, *[""] * (len(COLUMNS) - 1)))
        lines.append(cells(entry))
    widths = [max(len(line[i]) for line in lines[1:] if line[1] or i == 0) for i in range(8)]
    widths = [max(width, len(title)) for width, title in zip(widths, COLUMNS, strict=False)]

    def shown(line: tuple[str, ...]) -> str:
        padded = [line[0].ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(line[1:8], widths[1:], strict=True)]
        return f"| {' | '.join([*padded, line[8]])} |"

    rule = "|".join(["-" * (widths[0] + 2), *("-" * (w + 1) + ":" for w in widths[1:]), "---"])
    return "\n".join([shown(lines[0]), f"|{rule}|", *map(shown, lines[1:])])


def environment(device: torch.device, arguments: Sequence[str]) -> dict[str, Any]:
    """Return what the figures depend on: card, versions, date."""
    libraries = {}
    for name in ("torch", "transformers", "trl", "torch_remat"):
        try:
            libraries[name] = version(name)
        except PackageNotFoundError:
            libraries[name] = None
    for name in ("ckpt_wrap", "flat_param", "mod_tracker", "sac_policies"):
        try:
            libraries[name] = importlib.import_module(name).__version__
        except ImportError:
            libraries[name] = None
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "device": device_name(device),
        "python": platform.python_version(),
        "libraries": libraries,
        "command": shlex.join(["python", "tools/bench_real.py", *arguments]),
    }


def device_name(device: torch.device) -> str:
    """Return the card's name, or the processor's and the number of threads."""
    if device.type != "cpu":
        return str(torch.get_device_module(device).get_device_name(device))
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return f"{[*names, platform.machine()][0]}, {torch.get_num_threads()} threads"


# --------------------------------------------------------------------------- command


def selected(patterns: str) -> list[Registered]:
    """Return the selected ways, with the first way of each group: ratios are to it.

    Raises:
        SystemExit: a pattern matches nothing.
    """
    chosen: set[str] = set()
    for pattern in (one.strip() for one in patterns.split(",")):
        excludes, text = pattern.startswith("!"), pattern.removeprefix("!")
        found = {
            one.name for one in WAYS if fnmatchcase(one.name, text) or fnmatchcase(one.group, text)
        }
        if not found:
            sys.exit(f"bench_real: no way or group matches {text!r}; --list shows all of them")
        chosen = chosen - found if excludes else chosen | found
    groups = {one.group for one in WAYS if one.name in chosen}
    first = {one.group: one.name for one in reversed(WAYS)}
    return [one for one in WAYS if one.name in {*chosen, *map(first.get, groups)}]


def batch_shapes(text: str) -> tuple[tuple[int, int], ...]:
    """Parse "2x4096" or "8192,32768"."""
    pairs = []
    for part in text.split(","):
        sequences, _, length = part.rpartition("x")
        pairs.append((int(sequences or 1), int(length)))
    return tuple(pairs)


_THEIRS = (
    "plain,transformers,transformers every_n_layers=2,transformers offload=True,torch SAC,"
    "torch_remat,TRL offload,"
)
_OURS = (
    "checkpoint_,checkpoint_layers_ every=2,checkpoint_ and offload_,checkpoint_ and in_slices,"
    "sac_policies matmuls,"
)
_COMPILED = ",compiled plain,compiled torch budget *,compiled sac_policies matmuls"
_LOSSES = "checkpoint_ and TRL loss,checkpoint_ and Liger loss,"
_ALL = f"{_THEIRS}{_OURS}{_LOSSES}sac_policies nothing kept,fit_ *"
# At 32k tokens a step of 8 layers takes more than a second.
_FEW = f"{_THEIRS}{_OURS}fit_ 75%,fit_ 50%,fit_ smallest"
_MIXTURE = (
    "plain,transformers,torch SAC,checkpoint_,checkpoint_ and offload_,sac_policies matmuls,"
    "sac_policies nothing kept"
)
# Model, batch, ways and seconds.
FRONT_PAGE: dict[str, tuple[tuple[str, tuple[int, int], str, float], ...]] = {
    "": (
        ("1b-128k", (1, 4096), _ALL + _COMPILED, 130),
        ("8b-layers", (1, 8192), _ALL + _COMPILED, 140),
        ("8b-layers", (1, 32768), _FEW, 180),
    ),
    "toy": (("toy-vocabulary", (2, 128), _ALL, 200), ("toy", (1, 256), _FEW, 200)),
    "moe": (("qwen3-moe", (1, 4096), _MIXTURE, 240),),
    "toy moe": (("toy-moe", (2, 64), _MIXTURE, 200),),
}
# A second forward draws other noise, so it chooses and trains other experts.
RUNS_ONCE = ("plain", "sac_policies *")


def front_page(toy: bool, moe: bool) -> list[Job]:
    """Return the jobs behind the figure of the front page."""
    kind = " ".join(filter(None, ("toy" * toy, "moe" * moe)))
    return [
        Job(
            name,
            replace(MODELS[name], optimizer=True),
            batch,
            selected(ways),
            rounds=2 if toy else 5,
            seconds=seconds,
        )
        for name, batch, ways, seconds in FRONT_PAGE[kind]
    ]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--model", choices=MODELS, help="default: 1b on an accelerator, toy on a CPU")
    add("--ways", help="names or groups, with commas; * matches any text, ! leaves out")
    add("--tokens", type=batch_shapes, help="such as 2x4096 (sequences x length); commas for more")
    add("--rounds", type=int, help="timed steps of each way")
    add(
        "--seconds-limit",
        type=float,
        help="no round starts after this time, and no way after three quarters of it",
    )
    add("--front-page", action="store_true", help="measure what the front page shows")
    add("--moe", action="store_true", help="with --front-page: a mixture of experts instead")
    add("--toy", action="store_true", help="with --front-page: at toy size, on a CPU")
    add("--json", type=Path, metavar="OUT", help="write results, again after every round")
    add("--figure", type=Path, metavar="SVG", help="draw tokens per second against peak memory")
    add("--llama", choices=("transformers", "script"), help="default: transformers if installed")
    add("--device", help="default: the accelerator; cpu for toy")
    add("--list", action="store_true", help="list the ways")
    return parser.parse_args(arguments)


def jobs_of(options: argparse.Namespace) -> list[Job]:
    """Return one job for each batch shape."""
    if options.front_page:
        return front_page(options.toy, options.moe)
    name = options.model or ("1b" if torch.accelerator.is_available() else "toy")
    shape = MODELS[name]
    batches = options.tokens or shape.batches
    seconds = (options.seconds_limit or shape.seconds_limit) / len(batches)
    ways, rounds = selected(options.ways or shape.ways), options.rounds or shape.rounds
    return [Job(name, shape, batch, ways, rounds, seconds) for batch in batches]


def device_of(options: argparse.Namespace, name: str) -> torch.device:
    """Return the chosen device; by default the accelerator, or the CPU for toys."""
    kind = options.device
    if kind is None:
        is_cpu = name.startswith("toy") or not torch.accelerator.is_available()
        kind = "cpu" if is_cpu else torch.accelerator.current_accelerator().type
    return torch.device(kind, None if kind == "cpu" else 0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 if gradients that should be equal are not."""
    options, began = parse(arguments), time.monotonic()
    if options.list:
        print("\n".join(f"{one.group:<10}{one.name}" for one in WAYS))
        return 0
    warnings.simplefilter("ignore")
    jobs, runs = jobs_of(options), []
    device = device_of(options, jobs[0].name)
    llama = options.llama or (
        "transformers" if importlib.util.find_spec("transformers") else "script"
    )

    def say(line: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {line}", file=sys.stderr, flush=True)

    result: dict[str, Any] = {
        **environment(device, sys.argv[1:] if arguments is None else arguments),
        "llama": llama,
    }

    def write() -> None:
        result["runs"] = [run.to_dict() for run in runs]
        result["seconds"] = round(time.monotonic() - began, 1)
        if options.json is not None:
            options.json.write_text(json.dumps(result, indent=1) + "\n")
        if options.figure is not None:
            options.figure.write_text(figure(result))

    for index, job in enumerate(jobs):
        if index:
            torch.compiler.reset()
        end = began + sum(each.seconds for each in jobs[: index + 1])
        subject = build_subject(job.shape, llama, job.batch, device)
        run = Run(job, sum(one.numel() for one in subject.model.parameters()), subject.nbytes, [])
        runs.append(run)
        seconds = end - time.monotonic()
        bench = Bench(subject, seconds=seconds, say=say, rebuilt=REBUILT)

        def after_round(rows: list[Row], run: Run = run) -> None:
            run.rows = rows
            write()

        run.rows = bench.run(job.ways, job.rounds, after_round)
        del bench, subject
    if dist.is_initialized():
        dist.destroy_process_group()
        one_rank.cache_clear()
    write()
    print(report(result))
    return int(any(is_wrong(run, row) for run in runs for row in run.rows))


def is_wrong(run: Run, row: Row) -> bool:
    """Whether a way's gradients differ from plain's although they should be equal."""
    exact = {one.name for one in run.job.ways if one.exact}
    if run.job.shape.experts:
        exact = {name for name in exact if any(fnmatchcase(name, one) for one in RUNS_ONCE)}
    return row.gradients == "off" and row.name in exact


def figure(result: dict[str, Any]) -> str:
    """Return an SVG image: tokens per second against the peak, one panel for each run."""
    panels = []
    for run in result["runs"]:
        points = [
            Point(
                entry["way"],
                entry["peak_mib"] / 1024,
                entry["tokens_per_second"],
                is_ours=any(fnmatchcase(entry["way"], one) for one in OURS),
            )
            for entry in run["ways"]
            if "ms" in entry and not entry["error"]
        ]
        tokens = f"{run['sequences']} x {run['tokens_each']:,} tokens"
        size = f"{run['parameters'] / 1e6:,.1f} M parameters, {run['dtype']}"
        panels.append(Panel(f"{run['model']}: {size}, {tokens}", points))
    libraries = result["libraries"]
    about = f"{result['device']}, {result['date'][:10]}, torch {libraries['torch']}"
    if libraries["transformers"]:
        about += f", transformers {libraries['transformers']}"
    return draw("Training steps: tokens per second against peak memory", about, panels)


def report(result: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    libraries = ", ".join(f"{name} {number}" for name, number in result["libraries"].items())
    llama = "transformers' code" if result["llama"] == "transformers" else "the script's own Llama"
    lines = [
        f"# {', '.join(dict.fromkeys(run['model'] for run in result['runs']))}: {llama}",
        f"{result['date']}, {result['device']}, Python {result['python']}, {libraries}",
        f"`{result['command']}`: {result['seconds']} s",
    ]
    for run in result["runs"]:
        lines.append(
            f"\n## {run['model']}, {run['parameters'] / 1e6:,.1f} M parameters, {run['dtype']}, "
            f"{run['sequences']} x {run['tokens_each']:,} tokens, median of up to "
            f"{run['rounds']} interleaved steps\n"
        )
        lines.append(table(run["ways"]))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
