"""MFU and HFU: model FLOPs of ten models, compared with a calculation by hand from their sizes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mod_tracker import profile_flops

transformers = pytest.importorskip("transformers")

BATCH, TOKENS = 2, 16


def language_model(kind, **sizes):
    """Build a small language model of a family, and its config."""
    config = getattr(transformers, f"{kind}Config")(
        **{
            "vocab_size": 96,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "attn_implementation": "sdpa",
            **sizes,
        }
    )
    name = sizes.pop("head", "ForCausalLM")
    return getattr(transformers, f"{kind}{name}")(config), config


def layer(width, wide, *, keys=None, gates=3, experts=1):
    """Number of weights that multiply each token in a decoder layer.

    Queries, keys, values and the projection; then `gates` products of a feed-forward layer, in each
    of the `experts` that process a token.
    """
    keys = width if keys is None else keys
    return 2 * width * width + 2 * width * keys + experts * gates * width * wide


def forward(weights, *, layers=2, width=32, batch=BATCH, tokens=TOKENS, seen=None):
    """Forward FLOPs by hand: tokens times weights, and every pair of tokens in each layer."""
    pairs = tokens * tokens if seen is None else seen
    return 2 * batch * tokens * weights + layers * 4 * batch * pairs * width


HEAD = 32 * 96
TOKEN_IDS = torch.arange(BATCH * TOKENS).reshape(BATCH, TOKENS) % 96


def llama():
    """Four query heads."""
    model, _ = language_model("Llama")
    return model, {"input_ids": TOKEN_IDS, "labels": TOKEN_IDS}, forward(2 * layer(32, 48) + HEAD)


def llama_shared_keys():
    """Two query heads share a key head."""
    model, _ = language_model("Llama", num_key_value_heads=2)
    weights = 2 * layer(32, 48, keys=16) + HEAD
    return model, {"input_ids": TOKEN_IDS, "labels": TOKEN_IDS}, forward(weights)


def mistral_window():
    """A sliding window, given as a mask: all pairs are computed."""
    model, _ = language_model("Mistral", num_key_value_heads=2, sliding_window=4)
    weights = 2 * layer(32, 48, keys=16) + HEAD
    return model, {"input_ids": TOKEN_IDS, "labels": TOKEN_IDS}, forward(weights)


def qwen():
    """Biases add no FLOPs."""
    model, _ = language_model("Qwen2", num_key_value_heads=2)
    weights = 2 * layer(32, 48, keys=16) + HEAD
    return model, {"input_ids": TOKEN_IDS, "labels": TOKEN_IDS}, forward(weights)


def gpt2():
    """Two products in a feed-forward layer."""
    config = transformers.GPT2Config(
        vocab_size=96,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_inner=48,
        n_positions=64,
        attn_implementation="sdpa",
    )
    weights = 2 * layer(32, 48, gates=2) + HEAD
    inputs = {"input_ids": TOKEN_IDS, "labels": TOKEN_IDS}
    return transformers.GPT2LMHeadModel(config), inputs, forward(weights)


def bert():
    """A head of two products over every token; attention is not causal."""
    model, _ = language_model("Bert", head="ForMaskedLM")
    weights = 2 * layer(32, 48, gates=2) + 32 * 32 + HEAD
    return model, {"input_ids": TOKEN_IDS, "labels": TOKEN_IDS}, forward(weights)


PIXELS = 2 * BATCH * 16 * (3 * 4 * 4) * 32
"""Forward FLOPs of the product with the pixels, which need no gradient."""


def vit():
    """16 patches of 4 x 4 and a class token, which the head multiplies."""
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=16,
        patch_size=4,
        num_labels=10,
        attn_implementation="sdpa",
    )
    head = 2 * BATCH * 32 * 10
    by_hand = PIXELS + head + forward(2 * layer(32, 48, gates=2), tokens=17)
    inputs = {"pixel_values": torch.randn(BATCH, 3, 16, 16), "labels": torch.tensor([1, 2])}
    return transformers.ViTForImageClassification(config), inputs, by_hand


def mixtral():
    """Two of four experts per token, and the router's product."""
    model, _ = language_model(
        "Mixtral", num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2
    )
    weights = 2 * (layer(32, 48, keys=16, experts=2) + 32 * 4) + HEAD
    return model, {"input_ids": TOKEN_IDS, "labels": TOKEN_IDS}, forward(weights)


def qwen_experts():
    """Three of eight smaller experts."""
    model, _ = language_model(
        "Qwen3Moe",
        num_key_value_heads=2,
        head_dim=8,
        moe_intermediate_size=24,
        num_experts=8,
        num_experts_per_tok=3,
        decoder_sparse_step=1,
    )
    weights = 2 * (layer(32, 24, keys=16, experts=3) + 32 * 8) + HEAD
    return model, {"input_ids": TOKEN_IDS, "labels": TOKEN_IDS}, forward(weights)


class Packed(nn.Module):
    """Sequences of several lengths in one row, without attention between them."""

    LENGTHS = (5, 9, 2)

    def __init__(self):
        super().__init__()
        self.embed, self.qkv = nn.Embedding(96, 32), nn.Linear(32, 96, bias=False)
        self.out, self.head = nn.Linear(32, 32, bias=False), nn.Linear(32, 96, bias=False)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        found = []
        for part in x.split(self.LENGTHS):
            q, k, v = self.qkv(part).view(1, -1, 3, 4, 8).permute(2, 0, 3, 1, 4)
            attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            found.append(attended.transpose(1, 2).reshape(-1, 32))
        return self.head(x + self.out(torch.cat(found))).logsumexp(-1).sum()


def packed():
    """Only pairs inside a sequence."""
    seen = sum(length * length for length in Packed.LENGTHS)
    weights = 4 * 32 * 32 + HEAD
    by_hand = forward(weights, layers=1, batch=1, tokens=16, seen=seen)
    return Packed(), {"input_ids": TOKEN_IDS[0]}, by_hand


MODELS = [
    *(llama, llama_shared_keys, mistral_window, qwen, gpt2, bert, vit, mixtral, qwen_experts),
    packed,
]


def trained(model, inputs):
    """Report of one training step."""
    model.train()
    with profile_flops(model) as report:
        out = model(**inputs)
        (out if isinstance(out, torch.Tensor) else out.loss).backward()
    return report


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_model_flops_are_those_by_hand(make):
    torch.manual_seed(0)
    model, inputs, by_hand = make()
    report = trained(model, inputs)
    no_gradient = PIXELS if make is vit else 0
    assert report.model_flops == 3 * by_hand - no_gradient
    assert report.unknown == {}
    seconds = report.model_flops / 1e9
    assert report.mfu(peak_flops=2e9, seconds=seconds) == pytest.approx(0.5)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_is_in_hfu_only(use_reentrant):
    """Recomputation by a checkpoint, and the scores that fused attention recomputes."""
    torch.manual_seed(0)
    model, inputs, by_hand = llama()
    plain = trained(model, inputs)
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": use_reentrant})
    again = trained(model, inputs)
    assert again.model_flops == plain.model_flops == 3 * by_hand
    scores = 2 * BATCH * TOKENS * TOKENS * 32 * 2
    assert plain.total == plain.model_flops + scores
    assert again.total > plain.total
    assert again.hfu(1e12, 1.0) > again.mfu(1e12, 1.0) == plain.mfu(1e12, 1.0)


def test_masked_pairs_may_be_left_out():
    model, inputs, by_hand = packed()
    report = trained(model, inputs)
    hidden = sum(length * (length - 1) // 2 for length in Packed.LENGTHS)
    needless = 3 * 4 * hidden * 32
    assert report.mfu(1e9, 1.0) == pytest.approx(3 * by_hand / 1e9)
    skipped = report.mfu(1e9, 1.0, skip_masked=True)
    assert skipped == pytest.approx((3 * by_hand - needless) / 1e9)
    assert report.hfu(1e9, 1.0, skip_masked=True) > skipped


def test_recomputation_of_a_masked_pair_is_left_out_of_both():
    model, inputs, _ = packed()
    plain = trained(model, inputs)

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, input_ids):
            return checkpoint(self.inner, input_ids, use_reentrant=False)

    again = trained(Checkpointed(), inputs)
    for skip in (False, True):
        found = again.mfu(1e9, 1.0, skip_masked=skip)
        assert found == plain.mfu(1e9, 1.0, skip_masked=skip)


def test_llama_without_data_names_its_largest_cause():
    """Without allocating anything: logits with a large vocabulary, activations with many tokens."""
    from torch._subclasses import FakeTensorMode

    from mod_tracker import profile_memory

    largest = []
    for vocabulary, tokens in ((64_000, 512), (64, 2048)):
        with FakeTensorMode():
            model, _ = language_model(
                "Llama",
                vocab_size=vocabulary,
                hidden_size=256,
                intermediate_size=512,
                max_position_embeddings=4096,
                tie_word_embeddings=True,
            )
            ids = torch.zeros(4, tokens, dtype=torch.int64)
            with profile_memory(model) as report:
                model(inputs_embeds=torch.zeros(4, tokens, 256), labels=ids).loss.backward()
        largest.append(next(iter(report.causes)))
    assert largest == ["logits and loss", "activations"]
