"""The short examples run, and their claims hold."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_wrap import checkpoint_, is_recomputing

HERE = Path(__file__).parents[2] / "docs/examples"
TORCH_ONLY = ["shard_and_resume", "fsdp2_beside", "ddp_beside", "dcp_beside", "compile_and_export"]
TORCH_ONLY += ["muon_shards", "adamw_8bit"]
OTHERS = [
    "hf_llama",
    "loss_in_slices",
    "accelerate_loop",
    "lightning_callback",
    "peft_lora",
]
OTHERS += [
    "hf_architectures",
    "fit_trainer",
    "fit_loops",
    "fit_trl",
    "finetune_llama",
    "long_context",
    "streamed_lora",
    "moe_routing",
    "diffusers_unet",
    "timm_resnet",
]
NAMES = [*TORCH_ONLY, *OTHERS]


def imports_of(path: Path) -> set[str]:
    """Return the top-level names of a file's imports."""
    tree = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    plain = (alias.name for node in tree if isinstance(node, ast.Import) for alias in node.names)
    tree = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    origins = (node.module or "" for node in tree if isinstance(node, ast.ImportFrom))
    return {name.partition(".")[0] for name in (*plain, *origins)}


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_claim_of_example_holds(name: str) -> None:
    """It runs by its command; without another library that it needs it is skipped."""
    path = HERE / f"{name}.py"
    missing = [
        module
        for module in imports_of(path) - {"kept", "eight_bits"}
        if importlib.util.find_spec(module) is None
    ]
    if missing and "EXAMPLES_ALL" not in os.environ:
        pytest.skip(f"{', '.join(missing)} cannot be imported: nox -s examples")
    done = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("claim holds: ")


def _blocks_of_readme() -> list[str]:
    page = (HERE.parent.parent / "README.md").read_text(encoding="utf-8")
    return [block.partition("```")[0] for block in page.split("```python\n")[1:]]


@pytest.mark.slow
def test_first_script_of_readme_fits_a_llama(capsys: pytest.CaptureFixture[str]) -> None:
    """It prints what each block does and stays within the budget."""
    pytest.importorskip("transformers", exc_type=ImportError)
    exec(_blocks_of_readme()[0], {})
    said = capsys.readouterr().out
    found = re.match(r"a step takes ([\d.]+) MiB of ([\d.]+) MiB", said)
    assert found is not None
    assert float(found[1]) <= float(found[2])
    assert "model.layers.0" in said


@pytest.mark.slow
def test_blocks_of_readme_run_one_after_the_other() -> None:
    """In the order of the page; the second one makes the layers of a Llama run twice."""
    pytest.importorskip("transformers", exc_type=ImportError)
    typed: dict[str, Any] = {}
    for block in _blocks_of_readme():
        exec(block, typed)
    model = typed["model"]
    runs: list[bool] = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: runs.append(is_recomputing()))
    ids = torch.arange(8)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    assert runs == [False, True]


@pytest.mark.slow
def test_cache_of_a_checkpointed_llama_is_filled_once() -> None:
    """With `use_cache=True` recomputation adds nothing to the caller's cache."""
    transformers = pytest.importorskip("transformers", exc_type=ImportError)
    size = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(num_attention_heads=2, use_cache=True, **size)
    model = transformers.LlamaForCausalLM(config).train()
    for layer in model.model.layers:
        checkpoint_(layer)
    ids = torch.arange(8)[None]
    with pytest.warns(UserWarning, match="use_cache=False"):
        out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    assert out.past_key_values.get_seq_length() == 8


def test_every_example_is_on_its_page() -> None:
    """The page of examples includes each file."""
    page = (HERE.parent / "examples.md").read_text(encoding="utf-8")
    assert [name for name in NAMES if f'--8<-- "docs/examples/{name}.py"' not in page] == []
    assert [name for name in NAMES if not (HERE / f"{name}.py").exists()] == []
