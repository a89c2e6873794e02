"""Transformer layers and distributed tensors under the tape engine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from sac_policies import checkpoint, recompute_all, save_ops

from ._kept import kept_bytes

KEPT = ("aten.mm", "aten.addmm", "aten.bmm")
MATMULS = [getattr(torch.ops.aten, each.partition(".")[2]).default for each in KEPT]


def _model(kind: str) -> Any:
    import transformers

    small = {"vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    wide = {**small, "hidden_size": 32, "intermediate_size": 64}
    configs = {
        "llama": lambda: transformers.LlamaConfig(**wide, num_key_value_heads=1),
        "gpt2": lambda: transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2),
        "bert": lambda: transformers.BertConfig(**wide),
        "t5": lambda: transformers.T5Config(
            vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2
        ),
        "mixtral": lambda: transformers.MixtralConfig(
            **wide, num_key_value_heads=1, num_local_experts=4
        ),
        "mamba": lambda: transformers.MambaConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=8
        ),
    }
    torch.manual_seed(0)
    return transformers.AutoModel.from_config(configs[kind]()).train()


def _blocks(model: Any) -> list[Any]:
    """The repeated layers of a model."""
    lists = [each for each in model.modules() if isinstance(each, torch.nn.ModuleList)]
    return [block for each in lists if len(each) == 2 for block in each]


Run = Callable[..., Any]


def _plainly(function: Run, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _taped(policy: Any, check: str, function: Run, *args: Any, **kwargs: Any) -> Any:
    options = {"policy": policy, "determinism_check": check}
    return checkpoint(function, *args, **options, **kwargs)


def _selective(function: Run, *args: Any, **kwargs: Any) -> Any:
    make = functools.partial(create_selective_checkpoint_contexts, MATMULS)
    return torch_checkpoint(function, *args, use_reentrant=False, context_fn=make, **kwargs)


def _gradients(kind: str, run: Run) -> list[torch.Tensor | None]:
    """Gradients of a model whose blocks are run by `run`."""
    model = _model(kind)
    for block in _blocks(model):
        block.forward = functools.partial(run, block.forward)
    ids = torch.arange(24).view(2, 12) % 64
    given = {"decoder_input_ids": ids} if kind == "t5" else {}
    torch.manual_seed(1)
    out = model(input_ids=ids, **given)
    out[0].square().mean().backward()
    return [each.grad for each in model.parameters()]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert", "t5", "mixtral", "mamba"])
def test_model_is_bit_identical(kind):
    """With matmuls kept, and with nothing kept; also in the first step, which compares bits."""
    pytest.importorskip("transformers")
    plain = _gradients(kind, _plainly)
    assert any(each is not None for each in plain)
    for policy in (save_ops(*KEPT), recompute_all()):
        found = _gradients(kind, functools.partial(_taped, policy, "default"))
        for a, b in zip(found, plain, strict=True):
            assert a is b is None or torch.equal(a, b)


class _Gated(nn.Module):
    """A norm, and a gated layer whose gate is `gate`."""

    def __init__(self, gate: Run) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = gate
        self.norm = nn.LayerNorm(64)
        self.a, self.b, self.c = (
            nn.Linear(*sizes, bias=False) for sizes in ((64, 256), (64, 256), (256, 64))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply them."""
        h = self.norm(x)
        return x + self.c(self.gate(self.a(h), self.b(h)))


@torch.library.custom_op("sac_policies_tests::swiglu", mutates_args=())
def swiglu(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The gate as one custom operator."""
    return torch.nn.functional.silu(a) * b


def _save_inputs(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _swiglu_backward(ctx: Any, grad: torch.Tensor) -> Any:
    a, b = ctx.saved_tensors
    s = torch.sigmoid(a)
    return grad * b * (s + a * s * (1 - s)), grad * a * s


swiglu.register_autograd(_swiglu_backward, setup_context=_save_inputs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("gate", [swiglu, lambda a, b: torch.nn.functional.silu(a) * b])
def test_tape_keeps_no_more_than_selective_checkpoint(gate):
    """With the same matmuls saved; a custom operator is replayed like any other."""
    module, x = _Gated(gate), torch.randn(512, 64, requires_grad=True)
    grads = [
        torch.autograd.grad(run(module, x).sum(), [x, *module.parameters()])
        for run in (_plainly, functools.partial(_taped, recompute_all(), "default"))
    ]
    assert all(map(torch.equal, *grads))
    taped = kept_bytes(lambda: _taped(save_ops(*KEPT), "none", module, x))
    assert taped <= kept_bytes(lambda: _selective(module, x))
    nothing = kept_bytes(lambda: _taped(recompute_all(), "none", module, x))
    assert nothing <= 1.02 * x.nbytes  # the output


WORKER = """
import gc
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.profiler import ProfilerActivity, profile
from torch import nn
from sac_policies import checkpoint, recompute_all, report, save_ops

mesh = init_device_mesh("cpu", (size,))

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 512, bias=False), nn.Linear(512, 64, bias=False)

    def forward(self, x):
        return self.b(torch.nn.functional.silu(self.a(x)))

torch.manual_seed(0)
module = parallelize_module(Layer(), mesh, {"a": ColwiseParallel(), "b": RowwiseParallel()})
x = torch.randn(512, 64, requires_grad=True)

def kept(step):
    for _ in range(2):
        step().sum().backward()
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        out = step()
    events = seen.profiler.kineto_results.events()
    return sum(event.nbytes() for event in events if event.name() == "[memory]")

def gradients(out):
    wanted = [x, *module.parameters()]
    return [getattr(g, "_local_tensor", g) for g in torch.autograd.grad(out.sin().sum(), wanted)]

def taped(policy, **options):
    return checkpoint(module, x, policy=policy, **options)

matmuls, nothing = save_ops("aten.mm"), recompute_all()
plain = gradients(module(x))
for name, policy in (("matmuls", matmuls), ("nothing", nothing)):
    same = [torch.equal(a, b) for a, b in zip(plain, gradients(taped(policy)), strict=True)]
    found[name + " same"] = all(same)
    found[name] = kept(lambda: taped(policy, determinism_check="none"))
found["plain"] = kept(lambda: module(x))
found["reports"] = [
    report(module, x, policy=matmuls).held_bytes for _ in range(2)
]
"""


def test_distributed_tensors_are_flattened(ranks):
    """Gradients and reports under tensor parallelism; each rank keeps less than plain autograd."""
    for found in ranks:
        assert found["matmuls same"]
        assert found["nothing same"]
        assert len(set(found["reports"])) == 1
        assert found["reports"][0] > 0
        assert found["nothing"] == 512 * 64 * 4  # the output
        assert found["matmuls"] == found["nothing"] + found["reports"][0]
        assert found["matmuls"] <= 0.75 * found["plain"]
