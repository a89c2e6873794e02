"""Less usual steps of a sharded module, compared with the plain module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from torchparts_conformance import requirement
from torchparts_conformance.cases.flat_param._sharded import (
    Net,
    batch,
    distance,
    loss_of,
    mine,
    pair_distance,
    plain,
    sharded,
    stepped,
    train,
    whole_state,
)

LIMIT = 1e-6


def _frozen_beside_trained(part: Any, rank: int, world_size: int) -> list[Any]:
    found = []
    for frozen in ("head", "inner.0.0", "inner.1", "inner"):
        reference, model = plain(), plain()
        for module in (reference, model):
            module.get_submodule(frozen).requires_grad_(False)
        for block in model.inner:
            part.fully_shard(block)
        part.fully_shard(model)
        before = {name: tensor.clone() for name, tensor in whole_state(model).items()}
        loss_of(reference, batch(world_size)).backward()
        loss_of(model, mine(batch(world_size), rank)).backward()
        after = stepped(model)
        still = all(torch.equal(after[n], before[n]) for n in before if n.startswith(frozen))
        found.append([still, distance(after, stepped(reference))])
    return found


@requirement(
    "FP-170",
    "Frozen parameters MUST stay unchanged, in separate units and together with trained ones, and"
    " the others MUST train as in one process.",
    rationale=(
        "adapters train a few layers of a frozen model; a unit without trained parameters gets no"
        " gradient that shows the end of its backward"
    ),
    profile="distributed",
)
def test_frozen_parameters_stay_and_the_others_train(part, ranks):
    """A frozen head behind trained units, a frozen layer, a frozen unit, and all inner units."""
    for results in ranks(2, _frozen_beside_trained):
        assert len(results) == 4
        for still, error in results:
            assert still
            assert error < LIMIT


def _tied(module: Net) -> Net:
    module.inner[0][2].weight = nn.Parameter(module.inner[0][2].weight.detach().t().clone().t())
    module.inner[0][0].bias = module.inner[1][0].bias
    module.inner[0][2].bias = module.inner[1][2].bias
    return module


def _shared_inside_a_unit(part: Any, rank: int, world_size: int) -> list[Any]:
    reference, model = _tied(plain()), _tied(plain())
    part.fully_shard(model)
    loss_of(reference, batch(world_size)).backward()
    loss_of(model, mine(batch(world_size), rank)).backward()
    error = distance(stepped(model), stepped(reference))
    state = whole_state(model)
    same = torch.equal(state["inner.0.2.bias"], state["inner.1.2.bias"])
    return [same, error, len(list(model.parameters())) == len(list(reference.parameters()))]


@requirement(
    "FP-171",
    "A parameter shared by modules of one unit MUST remain one parameter, and MUST train on the "
    "sum of the gradients of all uses.",
    rationale="tied embeddings; separate copies differ after the first step",
    profile="distributed",
)
def test_weight_shared_inside_a_unit_trains_as_one(part, ranks):
    """One parameter under both names, with the sum of the gradients of its uses."""
    for same, error, is_one in ranks(2, _shared_inside_a_unit):
        assert same
        assert error < LIMIT
        assert is_one


def _twice(part: Any, rank: int, world_size: int) -> float:
    def backward(module: nn.Module, share: Callable[[Tensor], Tensor]) -> None:
        for step in range(2):
            loss_of(module, share(batch(world_size, step))).backward()

    return pair_distance(part, rank, world_size, backward)


@requirement(
    "FP-172",
    "A backward pass MUST add the mean over ranks to existing gradients.",
    rationale=(
        "gradient accumulation with a reduction in each backward; reducing the earlier gradients "
        "again scales them"
    ),
    profile="distributed",
)
def test_backward_adds_to_existing_gradients(part, ranks):
    """Two full steps of communication without zero_grad between them."""
    errors = ranks(2, _twice)
    assert max(errors) < LIMIT, errors


def _two_forwards(part: Any, rank: int, world_size: int) -> list[float]:
    def backward(module: nn.Module, share: Callable[[Tensor], Tensor]) -> None:
        losses = [loss_of(module, share(batch(world_size, step))) for step in range(2)]
        sum(losses).backward()

    return [
        pair_distance(part, rank, world_size, backward, reshard_after_forward=frees)
        for frees in (True, False)
    ]


@requirement(
    "FP-173",
    "Several forward passes before one backward pass MUST give the gradients of the sum of their "
    "losses.",
    rationale=(
        "contrastive losses and two views of a batch; parameters freed after the first forward "
        "are needed again by the second"
    ),
    profile="distributed",
)
def test_forward_twice_before_one_backward(part, ranks):
    """The gradient is that of the sum of both losses."""
    for errors in ranks(2, _two_forwards):
        assert max(errors) < LIMIT, errors


def _unit_by_itself(part: Any, rank: int, world_size: int) -> float:
    def backward(module: nn.Module, share: Callable[[Tensor], Tensor]) -> None:
        module.inner[0](share(batch(world_size))).square().mean().backward()
        loss_of(module, share(batch(world_size, 1))).backward()

    return pair_distance(part, rank, world_size, backward)


@requirement(
    "FP-174",
    "A unit that is called alone before the module around it MUST train as in one process, and "
    "the whole module MUST do so afterwards.",
    rationale=(
        "an encoder is trained alone first; FSDP2 takes the first called unit as the root and "
        "raises in the next: reproduced on 2.13"
    ),
    profile="distributed",
)
def test_unit_called_alone_before_the_whole_module(part, ranks):
    """An inner unit trains alone, and then as a part of the whole module."""
    errors = ranks(2, _unit_by_itself)
    assert max(errors) < LIMIT, errors


def _low_precision(part: Any, rank: int, world_size: int) -> list[Any]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, reference = sharded(part, mp_policy=policy), plain()
    output = model(mine(batch(world_size), rank))
    output.float().square().mean().backward()
    loss_of(reference, batch(world_size)).backward()
    kinds = {p.grad.dtype for p in model.parameters() if p.grad is not None}
    state = stepped(model)
    stored = {tensor.dtype for tensor in state.values()}
    whole = kinds == stored == {torch.float32}
    return [output.dtype == torch.bfloat16, whole, distance(state, stepped(reference))]


@requirement(
    "FP-177",
    "With parameter dtype bfloat16 and reduction dtype float32, the module MUST compute in "
    "bfloat16, and gradients, parameters and state dict MUST stay float32.",
    rationale="updates too small for bfloat16 are lost if stored parameters are bfloat16",
    profile="distributed",
)
def test_mixed_precision_computes_low_and_stores_high(part, ranks):
    """Outputs in bfloat16, gradients and state in float32, close to the plain model's."""
    for is_low, is_whole, error in ranks(2, _low_precision):
        assert is_low
        assert is_whole
        assert 0 < error < 0.05


def _looking(part: Any, rank: int, world_size: int) -> list[Any]:
    reference, model = plain(), sharded(part)
    inputs = batch(world_size)
    errors = []
    for module in (reference, model):
        module.eval()
    with torch.no_grad():
        errors.append((model(mine(inputs, rank)) - reference(mine(inputs, rank))).abs().max())
    with torch.inference_mode():
        model(mine(inputs, rank))
    no_grads = all(param.grad is None for param in model.parameters())
    for module in (reference, model):
        module.train()
    train(reference, [inputs])
    train(model, [mine(inputs, rank)])
    errors.append(torch.tensor(distance(whole_state(model), whole_state(reference))))
    return [no_grads, max(map(float, errors))]


@requirement(
    "FP-180",
    "Forward passes in no_grad and inference_mode MUST give the plain outputs, MUST set no "
    "gradients, and MUST NOT change the next training step.",
    rationale=(
        "validation between training steps; autograd cannot use tensors created in inference_mode"
    ),
    profile="distributed",
)
def test_evaluation_does_not_change_the_next_step(part, ranks):
    """Outputs without gradients equal the plain ones, and the next training step is right."""
    for no_grads, error in ranks(2, _looking):
        assert no_grads
        assert error < LIMIT


def _in_parts(part: Any, rank: int, world_size: int) -> float:
    def backward(module: nn.Module, share: Callable[[Tensor], Tensor]) -> None:
        kept: list[Tensor] = []
        handle = module.inner[0].register_forward_hook(lambda *given: kept.append(given[2]))
        for _ in range(2):
            output = module(share(batch(world_size)))
            (output.sum() * 0.0 + kept.pop().square().mean()).backward()
        handle.remove()
        output = module(share(batch(world_size, 1)))
        output[:, :1].square().mean().backward()

    return pair_distance(part, rank, world_size, backward)


@requirement(
    "FP-181",
    "A backward pass from some of the outputs, or from intermediate results, MUST give the "
    "gradients of one process.",
    rationale="auxiliary losses of inner layers",
    profile="distributed",
)
def test_backward_through_a_part_of_the_outputs(part, ranks):
    """Losses of an inner output and of one column; one pass leaves nothing for the next."""
    errors = ranks(2, _in_parts)
    assert max(errors) < LIMIT, errors
