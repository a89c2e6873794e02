"""Models of real size: a Llama, the same from transformers, and a mixture of experts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from .measuring import Subject, Unavailable


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
