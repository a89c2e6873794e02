"""Jobs of the ranks that `_ranks.py` starts, as under torchrun."""

from __future__ import annotations

import copy
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _cases import case_of
from _checks import assert_same, tensors_of
from _libraries import JOBS as LIBRARIES
from _models import VOCABULARY
from _parts import compare, enlarged
from _pytest.outcomes import Skipped
from _ranks import Claim
from _ways import LAYERS, OVER, ddp, ours
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import flat_param
from mod_tracker import profile_flops

warnings.simplefilter("ignore")
STEPS = 3


def batches() -> Iterator[dict[str, Tensor]]:
    """Return this rank's batches, which differ between ranks."""
    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    for _ in range(STEPS):
        ids = torch.randint(3, VOCABULARY, (2, 6), generator=generator)
        yield {"input_ids": ids, "labels": ids}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *, clip: float = 0.0) -> list[Tensor]:
    """Train some steps with dropout, seeded by step and rank; return the losses."""
    losses = []
    for step, batch in enumerate(batches()):
        torch.manual_seed(100 * step + dist.get_rank())
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.detach())
    return losses


def whole(state: dict[str, Any]) -> dict[str, Tensor]:
    """Return the values of a state dict, gathered if they are sharded."""
    full = {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in state.items()}
    return tensors_of(full)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of jobs whose results are only close."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def state_of(model: nn.Module, over: str) -> dict[str, Tensor]:
    """Return the full state with plain names, on this rank."""
    if over == "ddp":
        return tensors_of(model.module.state_dict())  # type: ignore[union-attr, operator]
    if over == "fsdp2":
        return whole(model.state_dict())
    return tensors_of(flat_param.full_state_dict(model)["model"])


# Jobs


def layers(name: str, over: str) -> None:
    """Wrap every layer under one kind of parallelism: losses and weights equal the bare blocks'."""
    case = case_of(name)
    results = {}
    for layer, apply in LAYERS.items():
        model = case.build()
        apply(case, model)
        model = OVER[over](case, model)
        losses = train(model, adam(model), clip=0.0)
        results[layer] = (losses, state_of(model, over))
    expected_losses, expected = results["none"]
    for layer, (losses, state) in results.items():
        assert all(torch.equal(a, b) for a, b in zip(losses, expected_losses, strict=True)), layer
        assert_same(state, expected)


def assert_near(found: Tensor, right: Tensor) -> None:
    """Assert bit-identical results on one and two ranks; a sum over three depends on its order."""
    if dist.get_world_size() <= 2:
        assert torch.equal(found, right)
    else:
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


def sharding(name: str, over: str) -> None:
    """Sharded training equals DDP: bit-identical on one and two ranks, close on three.

    Three ranks train without Adam, which takes a full step for gradients of rounding size.
    """
    optimizer = adam if dist.get_world_size() <= 2 else sgd
    case = case_of(name)
    plain, model = case.build(), case.build()
    reference, model = ddp(case, plain), OVER[over](case, model)
    expected = train(reference, optimizer(reference))
    losses = train(model, optimizer(model))
    state, wanted = state_of(model, over), state_of(reference, "ddp")
    assert state.keys() == wanted.keys()
    for found, right in zip(losses, expected, strict=True):
        assert_near(found, right)
    for key, right in wanted.items():
        assert_near(state[key], right)


def any_model(name: str) -> None:
    """Sharded training of any model on its own inputs equals DDP: weights after some steps."""
    case = case_of(name)
    own = enlarged(case, shift=dist.get_rank())
    plain = case.build()
    model = OVER["zero3"](case, case.build())
    reference = DistributedDataParallel(plain, find_unused_parameters=True)
    for each in (reference, model):
        optimizer = adam(each)
        for _ in range(STEPS):
            optimizer.zero_grad()
            own.loss(each).backward()
            optimizer.step()
    state = flat_param.full_state_dict(model)["model"]
    compare((f"{name} in the end", state[name], p.detach()) for name, p in plain.named_parameters())


def saving(name: str, folder: str) -> None:
    """Transformers' own plain model loads the `save_sharded` of a sharded model."""
    case = case_of(name)
    model = ours("ZeRO-3")(case, case.build())
    optimizer = adam(model)
    train(model, optimizer)
    flat_param.save_sharded(model, folder, optimizer=optimizer)
    state = state_of(model, "zero3")
    dist.barrier()
    plain = case.build()
    plain.load_state_dict(state)
    again = ours("ZeRO-3")(case, case.build())
    flat_param.load_sharded(again, folder, optimizer=adam(again))
    assert_same(state_of(again, "zero3"), state)
    if dist.get_rank() == 0:
        plain.save_pretrained(Path(folder) / "plain")
        loaded = type(plain).from_pretrained(Path(folder) / "plain")
        assert_same(tensors_of(loaded.state_dict()), state)


def lora(name: str) -> None:
    """Adapters in a sharded frozen model train to DDP's weights."""
    import peft

    case = case_of(name)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    models = []
    for over in ("ddp", "zero3"):
        torch.manual_seed(1)
        root = peft.get_peft_model(case.build(), copy.deepcopy(config))
        model = OVER[over](case, root)
        trained = [p for p in model.parameters() if p.requires_grad]
        train(model, torch.optim.SGD(trained, lr=0.5))
        models.append(state_of(model, over))
    found, wanted = models[1], models[0]
    assert found.keys() == wanted.keys()
    for key, right in wanted.items():
        assert_near(found[key], right)


def tracked(name: str, over: str) -> None:
    """Counting gives bit-identical results and the same totals on every rank."""
    case = case_of(name)
    results = []
    for counted in (False, True):
        model = OVER[over](case, case.build())
        if counted:
            with profile_flops() as report:
                train(model, adam(model))
        else:
            train(model, adam(model))
        results.append(state_of(model, over))
    assert_same(*results)
    totals: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(totals, report.total)
    assert len(set(totals)) == 1 and totals[0] > 0


def by_accelerate(name: str) -> None:
    """`Accelerator.prepare` puts DDP over checkpointed blocks: weights equal the bare blocks'."""
    import accelerate

    case = case_of(name)
    states = []
    for layer in ("none", "checkpoint_"):
        accelerator = accelerate.Accelerator(cpu=True)
        model = case.build()
        LAYERS[layer](case, model)
        prepared, optimizer = accelerator.prepare(model, adam(model))
        assert isinstance(prepared, DistributedDataParallel) or accelerator.num_processes == 1
        for step, batch in enumerate(batches()):
            torch.manual_seed(100 * step + dist.get_rank())
            optimizer.zero_grad()
            accelerator.backward(prepared(**batch).loss)
            accelerator.clip_grad_norm_(prepared.parameters(), 0.5)
            optimizer.step()
        states.append(tensors_of(accelerator.unwrap_model(prepared).state_dict()))
    assert_same(*states)


def by_lightning(name: str) -> None:
    """Lightning's DDP strategy over checkpointed blocks: weights equal the bare blocks'."""
    from _trainers import ranks_of_lightning

    case = case_of(name)
    states = []
    for layer in ("none", "checkpoint_"):
        model = case.build()
        with tempfile.TemporaryDirectory() as folder:
            ranks_of_lightning(model, Path(folder), lambda m, to=layer: LAYERS[to](case, m))
        states.append(tensors_of(model.state_dict()))
    assert_same(*states)


JOBS: dict[str, Callable[..., None]] = {
    job.__name__: job
    for job in (layers, sharding, any_model, saving, lora, tracked, by_accelerate, by_lightning)
} | LIBRARIES


def outcome_of(claim: Claim, folder: Path) -> str:
    """Return "held", the reason of a skip, or the place of the failure."""
    job, *args = claim
    if job == "saving":
        args.append(str(folder / "-".join(claim)))
    try:
        JOBS[job](*args)
    except ImportError as error:
        return f"skipped: {error.name} cannot be imported: {error}"
    except Skipped as skip:
        return f"skipped: {skip.msg}"
    except Exception:
        return traceback.format_exc()[-4000:]
    return "held"


def outcomes(rank: int, world_size: int, folder: str, wanted: list[Claim]) -> dict[str, str]:
    """Run claims on this rank; return "held" or another outcome for each."""
    found = {}
    for claim in wanted:
        print("-".join(claim), flush=True)  # printed with the error if a rank ends in it
        found["-".join(claim)] = outcome_of(tuple(claim), Path(folder))
        dist.monitored_barrier(timeout=timedelta(seconds=120))
    return found
