"""What operators are given and autograd does not save: numbers, constants, frozen biases, zeros."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from torchparts_conformance import requirement


class Made(TorchDispatchMode):
    """Notes every storage that is made."""

    def __init__(self):
        super().__init__()
        self.storages = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {id(each.untyped_storage()) for each in args if isinstance(each, torch.Tensor)}
        if isinstance(out, torch.Tensor) and id(out.untyped_storage()) not in given:
            self.storages.append(weakref.ref(out.untyped_storage()))
        return out

    def alive_bytes(self):
        """Bytes of those that somebody has."""
        alive = {id(each): each for each in (ref() for ref in self.storages) if each is not None}
        return sum(each.nbytes() for each in alive.values())


def _gelu(t):
    return t * (1.0 + torch.tanh(t.sin() + torch.pow(t, 3.0)))


@requirement(
    "SP-161",
    level="MUST",
    text=(
        "Where nothing is to be kept, a region whose values are rebuilt operator by operator "
        "MUST keep no large value for want of a number, a constant, a frozen bias or a mask's "
        "value that its operator was given and autograd did not save, nor a tensor of zeros as "
        "more than a number, from its second forward on."
    ),
    rationale=(
        "`1.0 + tanh(u)`, masks that are added to scores, and first states of recurrences: a "
        "sixth of what GPT-2 saves, nearly half of Mamba 2"
    ),
    since="0.1.0",
    profile="replay",
)
@pytest.mark.parametrize("kind", ["gelu", "row", "less", "filled", "bias", "zeros"])
def test_value_is_rebuilt_from_what_was_given(part, device, kind):
    """Two large values and more in each: only the output is there, in later forwards as well."""
    x = torch.linspace(-1.3, 1.7, 128 * 96, device=device).reshape(128, 96).requires_grad_()
    row = torch.linspace(0, 1, 96, device=device)
    weight = torch.linspace(-1, 1, 96 * 96, device=device).reshape(96, 96)
    function = {
        "gelu": _gelu,
        "row": lambda t: (t.sin() + row).cos().sin(),
        "less": lambda t: (1 - t.sin()).cos().sin(),
        "filled": lambda t: t.sin().masked_fill(t.detach() > 0.5, 0.1).cos().sin(),
        "bias": lambda t: F.linear(t.sin(), weight, row).cos().sin(),
        "zeros": lambda t: (torch.zeros(128, 96, device=device) * t).cos().sin(),
    }[kind]
    (expected,) = torch.autograd.grad(function(x).sum(), x)

    def run():
        return part.checkpoint(function, x, policy=part.recompute_all())

    for _ in range(3):
        run().sum().backward()  # first uses are not the subject
        gc.collect()
        with Made() as made:
            out = run()
        assert made.alive_bytes() < out.nbytes * 1.5
        assert torch.equal(torch.autograd.grad(out.sum(), x)[0], expected)


@requirement(
    "SP-162",
    level="MUST",
    text=(
        "Watching a region's first forward, reporting on it or profiling it MUST leave compiled"
        " code inside it to the compiler: what is called later runs as the graph it would have "
        "been."
    ),
    rationale=(
        "torch.compile passes by code that it first meets inside a dispatch mode, for the rest "
        "of the process: a block that was profiled once ran without its kernels, without a "
        "word; pytorch#190286"
    ),
    since="0.1.0",
    profile="replay",
    devices=("cpu",),
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo's
@pytest.mark.parametrize("look", ["checkpoint", "report", "profile"])
def test_code_first_met_while_watched_is_compiled(part, device, look):
    """Compiled code inside a region: called afterwards, it runs as a graph, and the same one."""
    torch.compiler.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    inner = torch.compile(lambda t: t.sin() * (2.0 - t), backend=backend)
    x = torch.linspace(-1, 1, 64, device=device).reshape(8, 8).requires_grad_()

    def region(t):
        return inner(t * 2.0)

    if look == "profile":
        part.profile(region, x)
    else:
        way = part.report if look == "report" else part.checkpoint
        way(region, x, policy=part.recompute_all())
    region(x)
    assert graphs
    assert len(set(graphs)) == 1
