"""Small models of other libraries, built from their configurations; nothing is downloaded.

Weights are random, and dropout is on if a model has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from _models import IDS, IMAGES, VOCABULARY, Case, need
from torch import nn


def of_transformers(model: str, **settings: Any) -> nn.Module:
    """Build a transformers model by class name, from its configuration class."""
    kind = getattr(need("transformers"), model)
    return kind(kind.config_class(**settings))


SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}


def text() -> dict[str, Any]:
    """Token ids, also used as labels."""
    return {"input_ids": IDS, "labels": IDS}


def images() -> dict[str, Any]:
    return {"pixel_values": IMAGES}


def sound() -> dict[str, Any]:
    """A spectrogram and its transcript."""
    return {"input_features": IMAGES.reshape(2, 8, -1)[..., :40], "labels": IDS}


def both() -> dict[str, Any]:
    """Pictures and text."""
    return {"pixel_values": IMAGES, "input_ids": IDS, "return_loss": True}


def noisy() -> dict[str, Any]:
    """Noisy pictures of a diffusion step."""
    return {"sample": IMAGES, "timestep": torch.tensor([1, 2])}


def classified() -> dict[str, Any]:
    """Latent pictures of a diffusion step, each with a class."""
    steps, latent = torch.tensor([1, 2]), IMAGES[:, :, :8, :8].contiguous()
    return {"hidden_states": latent, "timestep": steps, "class_labels": steps}


def made(
    name: str,
    model: str,
    inputs: Callable[[], dict[str, Any]] = text,
    blocks: tuple[str, ...] = (),
    **settings: Any,
) -> Case:
    return Case(name, "transformers", lambda: of_transformers(model, **settings), inputs, blocks)


def clip() -> nn.Module:
    """Two towers."""
    return of_transformers(
        "CLIPModel",
        text_config={**SIZES, "attention_dropout": 0.1},
        vision_config={**VISION, "attention_dropout": 0.1},
        projection_dim=16,
    )


def unet() -> nn.Module:
    """A U-Net with attention."""
    return need("diffusers").UNet2DModel(
        sample_size=32,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
        dropout=0.1,
    )


def dit() -> nn.Module:
    """A transformer for diffusion."""
    return need("diffusers").DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=3,
        out_channels=3,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        dropout=0.1,
        norm_num_groups=1,
        num_embeds_ada_norm=10,
    )


def vae() -> nn.Module:
    """An autoencoder of pictures."""
    return need("diffusers").AutoencoderKL(
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        sample_size=32,
    )


def timm_model(name: str) -> Case:
    """A model of timm."""
    return Case(
        name,
        "timm",
        lambda: need("timm").create_model(name, num_classes=4, drop_rate=0.1),
        lambda: {"x": IMAGES},
        ("BasicBlock",),
    )


EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
CASES = [
    made("Llama", "LlamaForCausalLM", **GROUPED, attention_dropout=0.1),
    made("GPT-2", "GPT2LMHeadModel", vocab_size=48, n_embd=32, n_layer=2, n_head=4, n_positions=16),
    made("BERT", "BertForMaskedLM", **SIZES, **DROPOUT),
    made(
        "T5",
        "T5ForConditionalGeneration",
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    ),
    made("ViT", "ViTForImageClassification", images, **VISION, **DROPOUT),
    made(
        "Whisper",
        "WhisperForConditionalGeneration",
        sound,
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_mel_bins=8,
        max_source_positions=20,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        dropout=0.1,
    ),
    made("Mixtral", "MixtralForCausalLM", **GROUPED, **EXPERTS, attention_dropout=0.1),
    made("Mamba", "MambaForCausalLM", vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2),
    made("Gemma 3", "Gemma3ForCausalLM", **GROUPED, sliding_window=4, attention_dropout=0.1),
    made("Qwen 3", "Qwen3ForCausalLM", **GROUPED, attention_dropout=0.1),
    made(
        "DeepSeek V3",
        "DeepseekV3ForCausalLM",
        **SIZES,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        attention_dropout=0.1,
    ),
    Case("CLIP", "transformers", clip, both),
    made("Mistral", "MistralForCausalLM", **GROUPED, sliding_window=4, attention_dropout=0.1),
    made("Phi-3", "Phi3ForCausalLM", **SIZES, num_key_value_heads=4, resid_pdrop=0.1),
    made("GPT-NeoX", "GPTNeoXForCausalLM", **SIZES, hidden_dropout=0.1),
    made("OPT", "OPTForCausalLM", **SIZES, ffn_dim=48, word_embed_proj_dim=32, dropout=0.1),
    made(
        "BLOOM",
        "BloomForCausalLM",
        vocab_size=48,
        hidden_size=32,
        n_layer=2,
        n_head=4,
        hidden_dropout=0.1,
    ),
    made("GPT-OSS", "GptOssForCausalLM", **GROUPED, **EXPERTS, sliding_window=4),
    made(
        "Mamba 2",
        "Mamba2ForCausalLM",
        vocab_size=48,
        hidden_size=32,
        num_hidden_layers=2,
        num_heads=8,
        head_dim=8,
        state_size=8,
        n_groups=2,
        chunk_size=4,
    ),
    made("RoBERTa", "RobertaForMaskedLM", **SIZES, **DROPOUT),
    made(
        "ALBERT", "AlbertForMaskedLM", text, ("AlbertLayer",), **SIZES, embedding_size=16, **DROPOUT
    ),
    made("DeBERTa V2", "DebertaV2ForMaskedLM", **SIZES, **DROPOUT, relative_attention=True),
    made(
        "BART",
        "BartForConditionalGeneration",
        vocab_size=48,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=16,
    ),
    made("DINOv2", "Dinov2ForImageClassification", images, **VISION, drop_path_rate=0.1),
    made(
        "Swin",
        "SwinForImageClassification",
        images,
        image_size=32,
        patch_size=4,
        embed_dim=16,
        depths=[1, 1],
        num_heads=[2, 2],
        window_size=4,
        drop_path_rate=0.1,
    ),
    made(
        "ConvNeXt",
        "ConvNextForImageClassification",
        images,
        ("ConvNextLayer",),
        hidden_sizes=[8, 16],
        depths=[1, 1],
        num_stages=2,
        drop_path_rate=0.1,
    ),
    made(
        "ResNet",
        "ResNetForImageClassification",
        images,
        ("ResNetBasicLayer", "ResNetBottleNeckLayer"),
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
    ),
    Case("UNet2D", "diffusers", unet, noisy, ("ResnetBlock2D", "Attention")),
    Case("DiT", "diffusers", dit, classified, ("BasicTransformerBlock",)),
    Case("AutoencoderKL", "diffusers", vae, lambda: {"sample": IMAGES}, ("ResnetBlock2D",)),
    timm_model("resnet10t"),
]
each = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))


def case_of(name: str) -> Case:
    return next(case for case in CASES if case.name == name)
