"""Frozen parameters of a unit: what they cost, and what passes through; one check per claim."""

from __future__ import annotations

import torch
from _harness import batches, distance, loss_of, plain, run_checks, share, whole_state
from _whole import plain_grads, whole_grads
from torch import nn

from flat_param import fully_shard


def check_frozen_weights_stay_until_the_last_input_has_its_gradient(rank: int, world: int) -> None:
    """A trained bias is done before the frozen weights are, in a second backward too."""
    models = [nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)) for _ in range(2)]
    models[1].load_state_dict(whole_state(models[0]))
    for model in models:
        for name, param in model.named_parameters():
            param.requires_grad_(name == "1.bias")
    fully_shard(models[1])
    inputs = [torch.ones(2, 3, requires_grad=True) for _ in models]
    for model, x in zip(models, inputs, strict=True):
        out = model(x).square().sum()
        out.backward(retain_graph=True)
        out.backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad)


def check_frozen_segments_have_no_gradient_memory_or_traffic(rank: int, world: int) -> None:
    """Frozen segments have no gradient memory or traffic."""
    model = plain()
    for name, param in model.named_parameters():
        param.requires_grad_(name.startswith("head"))
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    (ids,) = batches(world, 1)
    loss_of(model, share(ids, rank)).backward()
    counts = model.comm_counts()
    assert counts["reduce_scatter"].calls == 1
    assert all(not block._flat_param.grads for block in model.blocks)
    assert model.blocks[0].up.weight.grad is None
    assert model.head.weight.grad is not None


def check_frozen_layers_pass_gradients_through(rank: int, world: int) -> None:
    """Frozen layers pass gradients through."""
    reference = plain()
    models = [reference, plain()]
    for model in models:
        for name, param in model.named_parameters():
            param.requires_grad_("down" in name or "embed" in name)
    model = models[1]
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    (ids,) = batches(world, 1)
    loss_of(reference, ids).backward()
    loss_of(model, share(ids, rank)).backward()
    assert distance(whole_grads(model), plain_grads(reference)) < 1e-6


if __name__ == "__main__":
    run_checks(globals())
