"""Three runs that use too much memory, and the page of `watch_memory` for each.

Each test reads only the page, fixes what it names, and checks that the bytes are gone.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from _models import need
from torch import nn

from ckpt_wrap import checkpoint_
from mod_tracker import MemoryPage, assert_no_growth, watch_memory

SMALL = {"vocab_size": 256, "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4}


def model_of(kind: str, **more: Any) -> nn.Module:
    """A small transformers model with random weights, without dropout."""
    transformers = need("transformers")
    config = transformers.AutoConfig.for_model(kind, **SMALL, **more)
    auto = (
        transformers.AutoModelForMaskedLM if kind == "bert" else transformers.AutoModelForCausalLM
    )
    return auto.from_config(config).train()


def batch(tokens: int) -> dict[str, torch.Tensor]:
    """Four rows of tokens, which are also the labels."""
    ids = torch.arange(4 * tokens).view(4, tokens) % 256
    return {"input_ids": ids, "labels": ids}


def section(page: MemoryPage, title: str) -> list[str]:
    """Return the rows of one table of a page, as text."""
    lines = str(page).splitlines()
    after = lines[lines.index(title) + 1 :]
    return after[: after.index("")] if "" in after else after


def test_memory_page_names_a_leak() -> None:
    """Outputs are kept in a list: the page has the growth and its line, at any later step;
    `assert_no_growth` has them, too.
    """
    model, kept = model_of("gpt2"), []

    def step(keep: bool) -> None:
        output = model(**batch(64))
        output.loss.backward()
        model.zero_grad()
        kept.append(output if keep else output.loss.item())

    with watch_memory(model) as watch:
        for _ in range(7):
            step(keep=True)
        page = watch.page()
    grew = section(page, "grew in the last step")
    assert "GPT2LMHeadModel.lm_head, modeling_gpt2.py:" in grew[0]
    with pytest.raises(AssertionError, match="lm_head"):
        assert_no_growth(lambda: step(keep=True))
    kept.clear()
    assert_no_growth(lambda: step(keep=False))


def test_memory_page_names_a_batch_unlike_the_others() -> None:
    """The fifth of six batches is eight times as long: above the limit the page has both shapes."""
    model = model_of("llama", intermediate_size=128, num_key_value_heads=2)
    sizes = [64, 64, 64, 64, 512, 64]
    with watch_memory(model, limit_bytes=20 * 2**20) as watch:
        for tokens in sizes:
            model(**batch(tokens)).loss.backward()
            model.zero_grad()
    (page,) = watch.pages
    assert str(page).splitlines()[2] == (
        "inputs of the last step: int64[4, 512], int64[4, 512]; "
        "of the one before: int64[4, 64], int64[4, 64]"
    )
    with watch_memory(model, limit_bytes=20 * 2**20) as watch:
        for tokens in sizes:
            for rows in range(0, tokens, 64):
                part = {name: value[:, rows : rows + 64] for name, value in batch(tokens).items()}
                model(**part).loss.backward()
            model.zero_grad()
    assert watch.pages == []


def test_memory_page_names_the_block_without_a_checkpoint() -> None:
    """One of four blocks has no checkpoint: it keeps most, and checkpointing it frees that."""
    model = model_of("bert", intermediate_size=128)
    blocks = model.bert.encoder.layer
    for index in (0, 1, 3):
        checkpoint_(blocks[index])

    def kept() -> MemoryPage:
        with watch_memory(model) as watch:
            loss = model(**batch(256)).loss
            page = watch.page()
        loss.backward()
        model.zero_grad()
        return page

    page = kept()
    inside = page.inside("saved")
    deepest = max((name for name in inside if name.endswith(("0", "1", "2", "3"))), key=inside.get)
    assert deepest == "BertForMaskedLM.bert.encoder.layer.2"
    assert any(
        deepest in row
        for row in section(page, "kept for backward inside: to checkpoint or offload")
    )
    checkpoint_(blocks[2])
    freed = page.by_kind()["saved"] - kept().by_kind()["saved"]
    assert freed > 0.9 * inside[deepest]
