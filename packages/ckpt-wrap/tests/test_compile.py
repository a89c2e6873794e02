"""torch.compile and torch.export: no graph break, plain gradients, clean names."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch._dynamo.exc import Unsupported
from torch.utils.flop_counter import FlopCounterMode

from ckpt_wrap import (
    OffloadError,
    RecomputeError,
    checkpoint_,
    checkpoint_wrapper,
    offload_,
    offload_stats,
    offload_wrapper,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, scale=1.0, *, shift=None):
        y = torch.tanh(self.linear(x) * scale)
        return y if shift is None else y + shift


class Model(nn.Module):
    def __init__(self, wrap) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([wrap(Block()) for _ in range(2)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x, scale=2.0, shift=x)
        return x


LAYERS = {"checkpoint_": checkpoint_, "checkpoint_wrapper": checkpoint_wrapper}
OFFLOADED = {
    "offload_": offload_,
    "offload_wrapper": offload_wrapper,
    "both in place": lambda m: offload_(checkpoint_(m)),
    "offload(checkpoint)": lambda m: offload_wrapper(checkpoint_wrapper(m)),
    "checkpoint(offload)": lambda m: checkpoint_wrapper(offload_wrapper(m)),
}


@pytest.fixture(autouse=True)
def fresh():
    """Reset dynamo before the test."""
    torch._dynamo.reset()


def _graphs(graph, _):
    _graphs.seen.append(graph)
    return graph.forward


def test_equal_layers_compile_once():
    """Four checkpointed blocks, compiled one by one, share one graph as plain blocks do."""
    counts = []
    for wrap in (lambda m: m, checkpoint_):
        torch._dynamo.reset()
        _graphs.seen = []
        for block in [wrap(Block()) for _ in range(4)]:
            block.compile(backend=_graphs, fullgraph=True)
            block(torch.randn(3, 8, requires_grad=True))
        counts.append(len(_graphs.seen))
    assert counts[0] == counts[1] == 1


@pytest.mark.parametrize(
    ("layer", "fullgraph"), [("offload_", True), *((layer, False) for layer in OFFLOADED)]
)
def test_compiled_offload_is_refused(layer, fullgraph):
    """The compiler decides what is saved, so offload raises an error."""
    model = torch.compile(Model(OFFLOADED[layer]), fullgraph=fullgraph, backend="aot_eager")
    with pytest.raises(
        Unsupported if fullgraph else OffloadError, match="an offloaded module is compiled"
    ):
        model(torch.randn(3, 8, requires_grad=True))
    with torch.no_grad():
        model(torch.randn(3, 8))


def test_offload_of_a_block_compiled_before_is_refused():
    """It is refused whether the block is compiled or offloaded first."""
    block = Block()
    block.compile(backend="aot_eager")
    with pytest.raises(OffloadError, match="an offloaded module is compiled"):
        offload_(block)(torch.randn(3, 8, requires_grad=True))


class Layer(nn.Module):
    """Saves its input, and the result of tanh.

    Dynamo runs `nn.Linear` alone as Python, depending on what was compiled before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return torch.tanh(self.linear(x))


# In the graph of `aot_eager`, what tanh saves is a detached alias of its result. It is copied once
# more, because torch does not tell that a detached tensor has the version counter of its source.
@pytest.mark.parametrize(
    ("backend", "copies", "shared"), [("aot_eager_decomp_partition", 3, 1), ("aot_eager", 4, 0)]
)
@pytest.mark.parametrize("rows", [3, 7])
@pytest.mark.filterwarnings("ignore::UserWarning")  # of dynamo, about gradients of inputs
def test_offload_around_compiled_modules(tmp_path, backend, copies, shared, rows):
    """What the compiled modules save is offloaded."""
    plain = nn.Sequential(Layer(), Layer())
    block = copy.deepcopy(plain)
    for layer in block:
        layer.compile(backend=backend)
    offload_(block, to=tmp_path, min_bytes=1)
    results = [module(torch.ones(rows, 8)) for module in (plain, block)]
    assert type(results[1].grad_fn).__name__ == "CompiledFunctionBackward"
    for result in results:
        result.sum().backward()
    stats = offload_stats(block)
    assert (stats.copies_out, stats.shared) == (copies, shared)
    for one, other in zip(plain.parameters(), block.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize(
    ("layer", "strict"),
    [("checkpoint_", False), ("offload_", False), *((layer, True) for layer in LAYERS | OFFLOADED)],
)
def test_export_keeps_the_names(layer, strict):
    """An exported program has the plain model's parameters and results."""
    model = Model((LAYERS | OFFLOADED)[layer])
    x = torch.randn(3, 8)
    program = torch.export.export(model, (x,), strict=strict)
    assert torch.equal(program.module()(x), model(x))
    if layer in ("checkpoint_", "offload_", "both in place"):
        assert list(program.state_dict) == list(model.state_dict())


def test_a_compiled_module_inside_an_eager_checkpoint(gradients):
    """Compile inside, checkpoint outside."""
    plain = Block()
    model = nn.Sequential(copy.deepcopy(plain))
    model[0].compile(backend="aot_eager")
    checkpoint_(model)
    x = torch.randn(3, 8, requires_grad=True)
    expected = gradients(plain, lambda m: m(x), x)
    for one, other in zip(expected, gradients(model, lambda m: m(x), x), strict=True):
        torch.testing.assert_close(one, other)


class Products(nn.Module):
    """Saves other tensors when compiled, with the same positions and shapes as in eager mode."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x):
        h = self.w(x).sin()
        g = h.exp() * torch.tanh(h)
        return x + self.v(g).cos() * g


@contextlib.contextmanager
def _eager():
    torch.compiler.set_stance("force_eager")
    try:
        yield
    finally:
        torch.compiler.set_stance("default")


@pytest.mark.parametrize("around", [_eager, lambda: FlopCounterMode(display=False)])
@pytest.mark.parametrize("make", [checkpoint_, checkpoint_wrapper])
def test_eager_recomputation_of_compiled_code_is_an_error(make, around):
    """A stance or dispatch mode around backward alone would recompute other tensors."""
    block = Products()
    block.compile(backend="aot_eager_decomp_partition")
    model = make(nn.Sequential(block))
    x = torch.randn(8, 8)  # so that all shapes are equal
    model(x).sum().backward()
    loss = model(x).sum()
    with around(), pytest.raises(RecomputeError, match="in the same mode: compiled or not"):
        loss.backward()
