"""Bytes that a compiled checkpointed block keeps for backward, and graph breaks inside one."""

from __future__ import annotations

import copy
import shutil
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torchs
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from ckpt_wrap import checkpoint_, checkpoint_wrapper

# Dynamo hides these warnings in a way that has no effect where warnings are errors.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

ROWS, WIDTH, HIDDEN, BLOCKS = 64, 16, 256, 2
INPUT_BYTES = ROWS * WIDTH * 4  # of one block
HIDDEN_BYTES = ROWS * HIDDEN * 4  # of one hidden activation; a block has three, the plain keeps two


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)).sin())


save_matmuls = partial(
    create_selective_checkpoint_contexts,
    [torch.ops.aten.mm.default, torch.ops.aten.addmm.default],
)
WAYS = {
    "checkpoint_": checkpoint_,
    "checkpoint_wrapper": checkpoint_wrapper,
    "context_fn": partial(checkpoint_, context_fn=save_matmuls),
}


def _blocks_compiled(way, backend):
    model = nn.Sequential(*[way(Block()) for _ in range(BLOCKS)])
    for block in model:
        block.compile(backend=backend)
    return model


def _blocks_compiled_before(way, backend):
    blocks = [Block() for _ in range(BLOCKS)]
    for block in blocks:
        block.compile(backend=backend)
    return nn.Sequential(*map(way, blocks))


def _model_compiled(way, backend, **options):
    model = nn.Sequential(*[way(Block()) for _ in range(BLOCKS)])
    model.compile(backend=backend, **options)
    return model


HOW = {
    "eager": lambda way, _: nn.Sequential(*[way(Block()) for _ in range(BLOCKS)]),
    "block.compile()": _blocks_compiled,
    "compiled, then wrapped": _blocks_compiled_before,
    "model.compile()": _model_compiled,
    "fullgraph": partial(_model_compiled, fullgraph=True),
    "dynamic": partial(_model_compiled, dynamic=True),
}
QUICK, SLOW = "aot_eager_decomp_partition", "inductor"
CASES = [(QUICK, how, way) for how in HOW for way in WAYS]
CASES += [(SLOW, "block.compile()", way) for way in WAYS]
CASES += [(SLOW, "model.compile()", "checkpoint_")]
# The other cases run the same code in another combination.
DAILY = {(QUICK, how, "checkpoint_") for how in HOW}
DAILY |= {(QUICK, "model.compile()", way) for way in WAYS}
DAILY |= {(QUICK, "eager", "context_fn")}
CASES = [pytest.param(*case, marks=[] if case in DAILY else pytest.mark.nightly) for case in CASES]


@pytest.fixture(autouse=True)
def fresh():
    """Reset dynamo before the test."""
    torch._dynamo.reset()
    counters.clear()


def _kept_bytes(model, x):
    """Bytes that forward keeps for backward without parameters, and the result of forward."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage._cdata] = tensor  # kept alive, so that no address is reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(x)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()), out


def _kept_after_a_step(model, x):
    model(x).square().sum().backward()
    model.zero_grad()
    return _kept_bytes(model, x)


def _require_compiler(backend):
    if backend == SLOW and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("inductor compiles C++ here, and there is no compiler")


# The bytes are counted by a hook around torch's selective mode, of which 2.15 warns.
@pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context:FutureWarning")
@pytest.mark.parametrize(("backend", "how", "way"), CASES)
def test_checkpointed_blocks_keep_what_torchs_wrapper_keeps(backend, how, way):
    """To the byte: inputs, and outputs named by `context_fn`. Gradients match the plain model."""
    _require_compiler(backend)
    torch.manual_seed(0)
    model = HOW[how](WAYS[way], backend)
    plain = nn.Sequential(*[Block() for _ in range(BLOCKS)])
    plain.load_state_dict(model.state_dict())
    x = torch.randn(ROWS, WIDTH)
    kept, out = _kept_after_a_step(model, x)
    assert not counters["graph_break"]
    out.square().sum().backward()
    kept_plain, out = _kept_after_a_step(plain, x)
    out.square().sum().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)

    # In eager mode, torch's selective contexts keep the matmuls without calling saved-tensor hooks.
    named = BLOCKS * HIDDEN_BYTES if way == "context_fn" and how != "eager" else 0
    assert named <= kept <= named + 3 * BLOCKS * INPUT_BYTES
    assert kept_plain >= BLOCKS * 2 * HIDDEN_BYTES
    if how == "compiled, then wrapped" and way != "checkpoint_wrapper":
        # Changed in place, a compiled block is compiled again with its checkpoint inside.
        how = "block.compile()"
    options = {"context_fn": save_matmuls} if way == "context_fn" else {}
    torch._dynamo.reset()
    theirs = HOW[how](partial(torchs.checkpoint_wrapper, **options), backend)
    assert kept == _kept_after_a_step(theirs, x)[0]


class Broken(nn.Module):
    """Breaks the graph in forward, and has buffers that forward updates."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.linear, self.norm = kind, nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("count", torch.zeros(8))

    def forward(self, x):
        y = self.norm(self.linear(x))
        if self.kind == "item":
            y = y * 2 if y.mean().item() > -100 else y
        else:
            self.count = self.count + 1
            torch._dynamo.graph_break()
            y = y * self.count
        return torch.relu(y).sin()


def _step_compiled(model):
    def step(x):
        model(x).square().sum().backward()

    return torch.compile(step, backend="eager")


def _compiled(model, how):
    if how == "step":
        return _step_compiled(model)
    for module in model if how == "block.compile()" else [model]:
        module.compile(backend="eager")
    return lambda x: model(x).square().sum().backward()


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("item", "block.compile()"),
        ("buffer replaced and read", "model.compile()"),
        ("item", "step"),
        pytest.param("buffer replaced and read", "step", marks=pytest.mark.nightly),
    ],
)
def test_graph_break_does_not_act_twice(kind, how, wrap):
    """Buffers are updated once per forward, and gradients match the plain model."""
    torch.manual_seed(0)
    plain = nn.Sequential(Broken(kind), Broken(kind))
    model = nn.Sequential(*[wrap(b) for b in copy.deepcopy(plain)])
    step = _compiled(model, how)
    for _ in range(2):
        x = torch.randn(16, 8)
        plain(x).square().sum().backward()
        step(x)
    assert counters["graph_break"]
    for one, other in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
