"""What FSDP2's users call on a module: methods beside forward, and two switches."""

from __future__ import annotations

import gc
from functools import partial
from itertools import product

import torch
from _harness import batches, loss_of, options_of, plain, raises, sharded, share
from _whole import same_grads, same_step, whole_bytes
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

import flat_param
from flat_param import ShardedModule, fully_shard


class Coder(nn.Module):
    """An autoencoder whose methods are called one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.back = nn.Linear(5, 3), nn.Linear(3, 5)
        self.hidden = nn.Linear(3, 3)

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.into(x))

    def decode(self, code: Tensor) -> Tensor:
        return self.back(self.hidden(code))

    def scaled(self, code: Tensor, *, times: int = 1) -> Tensor:
        """Refuses no times."""
        return self.decode(code) * (12 // times)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))

    @staticmethod
    def halved(x: Tensor) -> Tensor:
        return x / 2

    def twice(self, x: Tensor) -> Tensor:
        """Calls the module, and needs its parameters before and after."""
        return self(x * self.back.bias) @ self.into.weight.t() + self.into.bias

    def failing(self, x: Tensor) -> Tensor:
        try:
            self(x[:, :2])
        except RuntimeError:
            return self.into(x)
        raise AssertionError


def _coders(**options: object) -> tuple[Coder, Coder]:
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(Coder())
    fully_shard(made[1].hidden, **options)
    return made[0], fully_shard(made[1], **options)


REGISTERS = (ShardedModule.register_forward_method, register_fsdp_forward_method)


def check_methods_run_with_whole_parameters(rank: int, world: int) -> None:
    """One by one, around a call of the module, after one that failed; then the module again."""
    x = torch.arange(10.0 * world).view(2 * world, 5) / 10
    for way, register in product(("ZeRO-3", "ZeRO-2"), REGISTERS):
        for methods in (("encode", "decode"), ("twice",), ("failing",)):
            reference, model = _coders(**options_of(way))
            for name in (*methods, *methods):
                register(model, name)
            for module, given in ((reference, x), (model, share(x, rank))):
                found = given
                for name in methods:
                    found = getattr(module, name)(found)
                found.square().mean().backward()
                module(given).square().mean().backward()
            same_grads(model, reference)
            assert whole_bytes(model) == 0
            with torch.no_grad():
                assert torch.allclose(model(x), reference(x))
            assert whole_bytes(model) == 0


def check_registered_method_is_a_forward_of_its_module_alone(rank: int, world: int) -> None:
    """Its arguments and its documentation pass; an error leaves it usable."""
    for register in REGISTERS:
        (reference, model), (_, other) = _coders(), _coders()
        register(model, "scaled")
        assert model.scaled.__doc__ == Coder.scaled.__doc__
        assert "scaled" not in vars(other)
        code = torch.ones(2, 3)
        for _ in range(2):
            raises(ZeroDivisionError, "by zero", partial(model.scaled, code, times=0))
            gc.collect()  # torch's function does not see the error; its frames do
            assert whole_bytes(model) == 0
            assert torch.equal(model.scaled(code, times=2), reference.scaled(code, times=2))


def check_methods_that_are_none_are_refused(rank: int, world: int) -> None:
    """A name that is missing, a value, a function without the module, and what every module has."""
    _, model = _coders()
    for name in ("decipher", "training", "halved", "forward", "into", "state_dict"):
        raises(
            flat_param.StateError,
            f"{name!r} is not a method that FSDPCoder defines",
            lambda name=name: model.register_forward_method(name),
        )


def check_units_that_reduce_and_others_are_refused(rank: int, world: int) -> None:
    """Units of a tree reduce together, also if each is set alone."""
    model, (ids,) = sharded(), batches(world, 1)
    model.blocks[1].set_requires_gradient_sync(requires_gradient_sync=False)
    loss = loss_of(model, share(ids, rank))
    raises(flat_param.StateError, "the units of a tree reduce together", loss.backward)
    for module in model.modules():
        if isinstance(module, flat_param.ShardedModule):
            module.set_requires_gradient_sync(False, recurse=False)
    loss_of(model, share(ids, rank)).backward()
    assert all(param.grad is None for param in model.parameters())
    model.set_requires_gradient_sync(True)
    loss_of(model, share(ids, rank)).backward()
    assert all(param.grad is not None for param in model.head.parameters())


def check_unit_that_backward_does_not_read_is_not_gathered(rank: int, world: int) -> None:
    """An embedding's backward reads no weight."""
    (ids,), gathers = batches(world, 1), []
    for unshards in (True, False):
        model, whole = plain(), plain()
        for module in (model.embed, model.head, model):
            flat_param.fully_shard(module)
        model.embed.set_unshard_in_backward(unshards)
        gathers.append(same_step(model, whole, ids, rank))
    assert world == 1 or gathers[1] == gathers[0] - 1


def check_gradients_that_were_left_are_reduced_by_hand(rank: int, world: int) -> None:
    """`finalize_backward` gives what the last of several backwards would."""
    model, whole, (ids,) = sharded(), plain(), batches(world, 1)
    for each in (model, whole):
        mine = ids if each is whole else share(ids, rank)
        with model.no_sync():
            for _ in range(2):
                loss_of(each, mine).backward()
            model.finalize_backward()
            assert all(param.grad is None for param in model.parameters())
    model.set_manual_backward_finalization(True)
    model.finalize_backward(async_op=True).wait()
    for param, right in zip(model.parameters(), whole.parameters(), strict=True):
        assert (param.grad is None) == (right.grad is None)
        if right.grad is not None:
            torch.testing.assert_close(param.grad.full_tensor(), right.grad, rtol=1e-5, atol=1e-6)
    assert model.finalize_backward() is None


def check_modules_are_fsdp2s(rank: int, world: int) -> None:
    """Other libraries look for the class; methods that are missing say so."""
    model = sharded()
    assert isinstance(model, FSDPModule) and isinstance(model.blocks[0], FSDPModule)
    assert not isinstance(model.embed, FSDPModule)
    model.set_is_last_backward(False)
    raises(
        flat_param.StateError,
        "a method of FSDP2's modules reads",
        lambda: model.set_custom_all_gather(None),
    )


def check_freeing_is_switched_off_and_on(rank: int, world: int) -> None:
    """Gathers of a step are those of the other way; gradients are the plain ones."""
    (ids,) = batches(world, 1)
    steps = {}
    for way in ("ZeRO-3", "ZeRO-2"):
        model = sharded(**options_of(way))
        steps[way] = same_step(model, plain(), ids, rank)
    for way, other in (("ZeRO-3", "ZeRO-2"), ("ZeRO-2", "ZeRO-3")):
        model = sharded(**options_of(way))
        model.set_reshard_after_forward(way != "ZeRO-3")
        assert same_step(model, plain(), ids, rank) == steps[other]
        model.set_reshard_after_forward(way == "ZeRO-3")
        assert same_step(model, plain(), ids, rank) == steps[way]
    model = sharded()
    model.set_reshard_after_forward(False, recurse=False)
    assert same_step(model, plain(), ids, rank) == steps["ZeRO-3"]
    model.blocks[1].set_reshard_after_forward(reshard_after_forward=False)
    assert same_step(model, plain(), ids, rank) == steps["ZeRO-3"] - 1
