"""A flattened model and its plain copy, and small models without dropout."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from _models import IDS, VOCABULARY, need
from torch import nn

import flat_param


def assert_flat(model: nn.Module) -> None:
    """Assert that every parameter is a view of a buffer of the model's flat view."""
    flat = flat_param.flat_params_of(model)
    assert flat is not None
    vectors = [flat.as_vector(name) for name in flat.layouts]
    found = [[lies_in(param, vector) for vector in vectors] for param in model.parameters()]
    assert all(map(any, found))
    assert all(map(any, zip(*found, strict=True)))


def lies_in(tensor: torch.Tensor, vector: torch.Tensor) -> bool:
    """Whether a tensor lies in a vector's memory."""
    start, stop = vector.data_ptr(), vector.data_ptr() + vector.nbytes
    return start <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= stop


def llama(*, tied: bool = False) -> nn.Module:
    """Two layers; embeddings tied on request."""
    t = need("transformers")
    config = t.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return t.LlamaForCausalLM(config)


def tied_llama() -> nn.Module:
    """A Llama with one weight for input and output."""
    return llama(tied=True)


def gpt2() -> nn.Module:
    """Two layers, with tied embeddings."""
    t = need("transformers")
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return t.GPT2LMHeadModel(
        t.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=16, **none)
    )


def bert() -> nn.Module:
    """Two layers; weight and bias of the head are tied."""
    t = need("transformers")
    config = t.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return t.BertForMaskedLM(config)


def t5() -> nn.Module:
    """Encoder and decoder with shared embeddings."""
    t = need("transformers")
    config = t.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return t.T5ForConditionalGeneration(config)


MODELS = [llama, tied_llama, gpt2, bert, t5]
TIED = [tied_llama, gpt2, bert, t5]


def pair(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Return a flattened model and a plain copy."""
    plain = make()
    model = copy.deepcopy(plain)
    flat_param.flatten(model)
    return model, plain


def step(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> float:
    """Run forward, backward and the optimizer, if there is one; return the loss."""
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    if optimizer is not None:
        optimizer.step()
    return loss.item()


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
