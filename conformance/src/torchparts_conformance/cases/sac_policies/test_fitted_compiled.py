"""A model fitted in place whose blocks were compiled before, or all of it."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch

from torchparts_conformance import requirement

from .test_fitted import seeded, step, taken

# The compiler looks for gradients of the values that a block is given.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def compiled_blocks(model, how, runs):
    """Compile each block; its compiled code adds a number to `runs` each time."""

    def backend(graph, _):
        def run(*args):
            runs.append(1)
            return graph.forward(*args)

        return run

    for number, block in enumerate(list(model.blocks)):
        if how == "in place":
            block.compile(backend=backend)
        else:
            model.blocks[number] = torch.compile(block, backend=backend)


@requirement(
    "SP-218",
    level="MUST",
    text=(
        "A model whose blocks torch.compile has compiled, in place or as modules put in theirs,"
        " MUST stay compiled when `fit_` changes it: each run of a block, a second one for "
        "backward included, MUST be one of its compiled code, gradients MUST be those of "
        "before, bitwise, and after `undo()` a step MUST run each block once. A model that is "
        "compiled as a whole MUST be refused or keep its gradients."
    ),
    rationale=(
        "blocks are compiled one by one where a model is too large to compile as a whole: "
        "regions within compiled code broke its graphs, and ran without it what had been "
        "compiled"
    ),
    since="0.1.0",
    profile="budget",
)
@pytest.mark.parametrize("how", ["in place", "instead"])
def test_compiled_blocks_stay_compiled(part, device, how):
    """Their code runs once in a step, or twice where they are checkpointed, and nothing else."""
    torch.compiler.reset()
    model, batch = seeded(device)
    count, runs = len(model.blocks), []
    compiled_blocks(model, how, runs)
    expected = [value.clone() for value in step(model, batch)]
    plain = taken(model, batch, device)
    found = part.fit_(model, batch, "75%")
    assert found, "three quarters of a step must be found on a stack of six equal blocks"
    for _ in range(2):
        runs.clear()
        assert all(map(torch.equal, step(model, batch), expected))
        assert count < len(runs) <= 2 * count
    assert taken(model, batch, device) <= 0.75 * plain * 1.001
    found.undo()
    runs.clear()
    assert all(map(torch.equal, step(model, batch), expected))
    assert len(runs) == count
    assert taken(model, batch, device) >= 0.999 * plain


@requirement("SP-218")
def test_what_is_compiled_as_a_whole_is_refused_or_right(part, device):
    """There is no error in a step, and none of its gradients is another."""
    torch.compiler.reset()
    model, batch = seeded(device)
    model.compile(backend="eager")
    expected = [value.clone() for value in step(model, batch)]
    with suppress(ValueError):
        part.fit_(model, batch, "75%")
    assert all(map(torch.equal, step(model, batch), expected))
