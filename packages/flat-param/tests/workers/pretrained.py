"""Sharded models of transformers; one check per claim."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _harness import checks, same_bits, whole_state
from torch import nn

import flat_param

FOLDER = Path()


def llama(**options: Any) -> nn.Module:
    """A small model of transformers, always the same."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, **options))


def check_transformers_keeps_ranks_in_step(rank: int, world: int) -> None:
    """`generate` looks for the attribute; ranks that end at other lengths would wait for ever."""
    model = llama(num_hidden_layers=2, pad_token_id=0, eos_token_id=None).eval()
    for layer in model.model.layers:
        flat_param.fully_shard(layer)
    flat_param.fully_shard(model)
    prompt = torch.tensor([[3, 5, 7 + rank]])
    out = model.generate(prompt, do_sample=False, max_new_tokens=4 if rank else 8)
    assert out.shape[1] == 3 + (4 if rank else 8)


def check_saved_pretrained_folder_loads(rank: int, world: int) -> None:
    """With a tied head, whose name the file leaves out."""
    options = {"num_hidden_layers": 1, "tie_word_embeddings": True}
    first = flat_param.fully_shard(llama(**options))
    state = flat_param.full_state_dict(first)["model"]
    if rank == 0:
        first.save_pretrained(FOLDER / "llama", state_dict=state)
    dist.barrier()
    other = flat_param.fully_shard(llama(**options))
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    flat_param.load_sharded(other, FOLDER / "llama")
    found = whole_state(other)
    same_bits({name: found[name] for name in state}, dict(state))


run = checks(globals())
