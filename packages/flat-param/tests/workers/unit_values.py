"""Values of a unit as others read and write them; one check per claim."""

from __future__ import annotations

import torch
from _harness import (
    STRATEGIES,
    batches,
    distance,
    loss_of,
    main,
    plain,
    raises,
    run_checks,
    sharded,
    share,
)
from _whole import plain_grads, whole_grads
from torch import nn

import flat_param


def check_whole_params_can_be_read_and_written(rank: int, world: int) -> None:
    """Whole params can be read and written."""
    model, reference = sharded(), plain()
    with model.whole_params(write_back=True), torch.no_grad():
        assert model.head.weight.shape == (11, 7)
        assert torch.equal(model.head.weight, reference.head.weight)
        model.head.weight.mul_(2)
    assert torch.equal(model.state_dict()["head.weight"], 2 * reference.head.weight)


def check_reassigned_parameter_is_taken_up(rank: int, world: int) -> None:
    """Reassigned parameter is taken up."""
    model, reference = sharded(), plain()
    fresh = torch.full((11, 7), 0.25)
    model.head.weight = nn.Parameter(fresh.clone())
    reference.head.weight = nn.Parameter(fresh.clone())
    (ids,) = batches(world, 1)
    loss_of(model, share(ids, rank)).backward()
    loss_of(reference, ids).backward()
    assert distance(whole_grads(model), plain_grads(reference)) < 1e-6
    model.head.weight = nn.Parameter(torch.ones(2, 2))
    model.comm_counts()
    raises(flat_param.ParameterError, "'head.weight'", lambda: model(share(ids, rank)))
    assert not model.comm_counts(), "an error must come before the first collective"


def check_whole_weights_are_never_older_than_the_last_step(rank: int, world: int) -> None:
    """Whole weights are never older than the last step."""
    (ids,) = batches(world, 1)
    for strategy in STRATEGIES:
        model, reference = sharded(strategy=strategy), plain()
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, reference)]
        loss_of(model, share(ids, rank)).backward()
        loss_of(reference, ids).backward()
        model(share(ids, rank))  # keeps whole parameters for a backward that never comes
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            got, expected = model(ids), reference(ids)
        assert torch.allclose(got, expected, atol=1e-5), strategy


def check_plain_state_loads_and_mismatches_are_named(rank: int, world: int) -> None:
    """Plain state loads and mismatches are named."""
    model, other = sharded(), plain(seed=5)
    assert "All keys matched" in str(model.load_state_dict(other.state_dict()))
    assert not model.comm_counts()
    assert distance(model.state_dict(), other.state_dict()) == 0
    state = other.state_dict()
    del state["head.bias"]
    raises(RuntimeError, '"head.bias"', lambda: model.load_state_dict(state))
    wrong = {**other.state_dict(), "embed.weight": torch.zeros(2, 2)}
    raises(flat_param.ParameterError, "'embed.weight'", lambda: model.load_state_dict(wrong))
    assert distance(model.state_dict(), other.state_dict()) == 0


def run(rank: int, world: int) -> dict[str, str]:
    """All checks."""
    return run_checks(globals(), rank, world)


if __name__ == "__main__":
    main(run)
