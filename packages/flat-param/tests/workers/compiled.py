"""Sharded modules that are compiled, in each of the four ways, beside eager ones."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from _harness import batches, distance, loss_of, plain, sharded, share, whole_state
from torch import nn
from torch._dynamo.utils import counters

import flat_param

STEPS, MANY = 4, 10
# The compiler looks at `.grad` of everything, and torch warns of that on activations.
warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")


def losses(model: Any, rank: int, world: int) -> list[float]:
    """Those of a few steps; after two of them everything is compiled."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step, ids in enumerate(batches(world, STEPS)):
        with torch.compiler.set_stance("default" if step < 2 else "fail_on_recompile"):
            optimizer.zero_grad()
            loss = loss_of(model, share(ids, rank))
            loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def require_no_breaks() -> None:
    """None; torch 2.9 follows calls of units nevertheless, and breaks where each begins."""
    reasons = list(counters["graph_break"])
    if torch.__version__.startswith("2.9."):
        reasons = [each for each in reasons if "torch.compiler.disable" not in each]
    assert not reasons


def compare(model: nn.Module, rank: int, world: int) -> None:
    """Assert that a compiled model's losses are those of the eager one, bit for bit.

    And that graphs were made, without a break.
    """
    torch.compiler.reset()
    counters.clear()
    compiled = losses(model, rank, world)
    assert counters["stats"]["unique_graphs"] > 0
    require_no_breaks()
    assert compiled == losses(sharded(), rank, world)


def _block_sharded(block: nn.Module) -> nn.Module:
    flat_param.fully_shard(block).compile(backend="aot_eager")
    return block


def _block_compiled(block: nn.Module) -> nn.Module:
    block.compile(backend="aot_eager")
    return flat_param.fully_shard(block)


def _block_wrapped(block: nn.Module) -> nn.Module:
    return flat_param.fully_shard(torch.compile(block, backend="aot_eager"))


def check_compiling_before_and_after_sharding(rank: int, world: int) -> None:
    """Blocks, by `fully_shard(block).compile()` and the reverse, and `torch.compile(model)`."""
    for make in (_block_sharded, _block_compiled, _block_wrapped):
        model = plain()
        for index, block in enumerate(model.blocks):
            model.blocks[index] = make(block)
        compare(flat_param.fully_shard(model), rank, world)
    compare(torch.compile(sharded(), backend="aot_eager"), rank, world)


def check_blocks_of_a_kind_share_one_graph(rank: int, world: int) -> None:
    """For any number of blocks, since the compiler stops after a few recompilations."""
    torch.compiler.reset()
    counters.clear()
    model = plain(depth=MANY)
    for block in model.blocks:
        flat_param.fully_shard(block)
    compiled = torch.compile(flat_param.fully_shard(model), backend="aot_eager")
    loss_of(compiled, share(batches(world, 1)[0], rank)).backward()
    assert counters["stats"]["unique_graphs"] == 1, dict(counters["stats"])
    require_no_breaks()


def check_a_model_without_a_loop_breaks_where_a_unit_begins(rank: int, world: int) -> None:
    """As FSDP2's does: the compiler cannot call what communicates from a graph."""
    torch.compiler.reset()
    counters.clear()
    layers = [flat_param.fully_shard(nn.Linear(3, 3)) for _ in range(2)]
    compiled = torch.compile(lambda x: layers[1](layers[0](x).relu()), backend="aot_eager")
    compiled(torch.ones(2, 3)).sum().backward()
    assert sum(counters["graph_break"].values()) == len(layers), dict(counters["graph_break"])


def check_compiled_optimizer_step_is_the_eager_one(rank: int, world: int) -> None:
    """Up to rounding."""
    torch.compiler.reset()
    states = []
    for compiles in (False, True):
        torch.manual_seed(0)
        layer = flat_param.fully_shard(nn.Linear(6, 6))
        layer(torch.ones(2, 6)).square().sum().backward()
        step = torch.optim.AdamW(layer.parameters(), lr=0.1).step
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the compiler's own
            (torch.compile(step, backend="eager") if compiles else step)()
        states.append(whole_state(layer))
    assert distance(*states) < 1e-6


def check_forward_after_a_failed_export(rank: int, world: int) -> None:
    """Export is refused by name, and the module is unchanged."""
    torch.compiler.reset()
    model = sharded()
    x = share(batches(world, 1)[0], rank)
    before = model(x).detach()
    found: list[Any] = []
    try:
        torch.export.export(model, (x,))
    except Exception as error:
        found.append(error)
    assert found
    assert "cannot trace the collectives of a sharded module" in str(found[0]), found[0]
    assert torch.equal(model(x).detach(), before)
    assert distance(whole_state(model), whole_state(sharded())) == 0
