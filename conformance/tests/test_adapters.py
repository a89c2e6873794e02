"""Code in the shipped adapters beyond renaming."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from torchparts_conformance import _adapters, adapters
from torchparts_conformance._errors import AdapterError, one_line
from torchparts_conformance.adapters import (
    fairscale,
    fsdp1,
    fsdp2,
    torch_tools,
)
from torchparts_conformance.requirements._cases import load_registry


@pytest.fixture
def mesh():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_states_of_fully_shard_are_whole_tensors(mesh):
    """Sharded tensors are gathered; others are returned unchanged."""
    plain = torch.arange(4.0)
    assert fsdp2._whole(plain) is plain
    whole = fsdp2._whole(distribute_tensor(plain, mesh, [Shard(0)]))
    assert type(whole) is torch.Tensor
    assert torch.equal(whole, plain)


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning")
def test_module_becomes_its_wrapper_with_its_own_forward_inside(mesh):
    """The wrapper calls the original module, also after `forward` was replaced."""
    module = torch.nn.Linear(2, 2)
    assert fsdp1._Part.fully_shard(module) is module
    assert type(module.module) is torch.nn.Linear
    module.forward = lambda x: x + module.weight.numel()
    assert module(torch.ones(1)).tolist() == [5.0]
    assert "forward" in vars(module.module)


def test_module_whose_wrapping_is_refused_stays_as_it_was(mesh):
    """Its class, parameters and results."""
    module = torch.nn.Linear(2, 2)
    held, expected = module.weight, module(torch.ones(2))
    with pytest.raises((AttributeError, TypeError)):
        fsdp1._Part.fully_shard(module, mesh="none")
    assert type(module) is torch.nn.Linear
    assert module.weight is held
    assert torch.equal(module(torch.ones(2)), expected)


def test_counter_of_torch_is_its_own_report():
    """The total is that of the products."""
    part = torch_tools.implementation().parts["mod-tracker"]
    with part.profile_flops() as report:
        torch.ones(2, 3) @ torch.ones(3, 4)
    assert report.total == 2 * 2 * 3 * 4


def test_module_computes_with_what_fairscale_flattened():
    """Its parameters are views again before each forward."""
    pytest.importorskip("fairscale")
    module = torch.nn.Linear(2, 2)
    handle = fairscale._Handle(list(module.parameters()), module, device=None)
    with torch.no_grad():
        handle.flat_param.fill_(1)
    assert module(torch.ones(2)).tolist() == [3.0, 3.0]


def test_exception_without_a_text_is_named_by_its_class():
    """`__str__` of the exception raises."""

    class Mute(Exception):
        def __str__(self):
            raise SystemExit(0)

    assert one_line(Mute()) == "Mute"


def test_refusal_of_an_adapter_is_said_once(tmp_path, monkeypatch):
    """An adapter's own error has its name and is not wrapped in another message."""
    text = "from torchparts_conformance import Implementation\nImplementation('', '1')\n"
    (tmp_path / "nameless.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(AdapterError) as refused:
        _adapters.load_implementation("nameless:it")
    assert str(refused.value) == (
        "implementation 'nameless:it': torchparts_conformance.Implementation: name is ''; it must "
        "be text of 1 to 100 characters."
    )


def test_module_is_called_through_deepspeeds_checkpoint():
    """With both functions its forward runs once more in backward, and the module is unchanged."""
    pytest.importorskip("deepspeed")
    from torchparts_conformance.adapters import deepspeed

    part = deepspeed.implementation().parts["ckpt-wrap"]
    for impl in part.CheckpointImpl:
        module, calls = torch.nn.Linear(2, 2), []
        plain = module.forward
        module.forward = lambda x, calls=calls, plain=plain: calls.append(x) or plain(x)
        assert part.checkpoint_wrapper(module, impl) is module
        module(torch.ones(1, 2, requires_grad=True)).sum().backward()
        assert len(calls) == 2


def test_module_becomes_a_layer_that_transformers_checkpoints():
    """Its forward runs once more in backward, reentrant and not."""
    pytest.importorskip("transformers")
    from transformers.modeling_layers import GradientCheckpointingLayer

    from torchparts_conformance.adapters import transformers

    part = transformers.implementation().parts["ckpt-wrap"]
    for impl in part.CheckpointImpl:
        module, calls = torch.nn.Linear(2, 2), []
        module.register_forward_pre_hook(lambda *_, calls=calls: calls.append("hook"))
        module.bias.register_hook(lambda _, calls=calls: calls.append("gradient"))
        assert part.checkpoint_wrapper(module, impl) is module
        assert isinstance(module, GradientCheckpointingLayer)
        module(torch.ones(1, 2, requires_grad=True)).sum().backward()
        # It checkpoints `forward`, so hooks of the module run once.
        assert calls == ["hook", "gradient"]
        given = module._gradient_checkpointing_func.keywords
        assert given == {"use_reentrant": impl is part.CheckpointImpl.REENTRANT}


def test_block_is_wrapped_by_torchtitan():
    """The replacement is torch's wrapper."""
    pytest.importorskip("torchtitan")
    from torchparts_conformance.adapters import inside_torch, torchtitan

    part, module = torchtitan.implementation().parts["ckpt-wrap"], torch.nn.Linear(2, 2)
    wrapped = part.checkpoint_wrapper(module)
    assert type(wrapped) is inside_torch.CheckpointWrapper
    assert wrapped._checkpoint_wrapped_module is module
    assert list(part.CheckpointImpl) == [part.CheckpointImpl.NO_REENTRANT]


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning")
def test_rule_selects_what_lightning_wraps_in_a_sharded_model(mesh):
    """With the strategy as users configure it, and with the single step that the adapter calls."""
    pytest.importorskip("lightning")
    from lightning.fabric.strategies.fsdp import FSDPStrategy

    from torchparts_conformance.adapters import inside_torch, lightning

    def wrapped(model):
        kind = inside_torch.CheckpointWrapper
        return [name for name, inner in model.named_modules() if isinstance(inner, kind)]

    plain, sharded = (
        torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2)))
        for _ in range(2)
    )
    part = lightning.implementation().parts["ckpt-wrap"]
    part.apply_activation_checkpointing(plain, check_fn=lambda m: isinstance(m, torch.nn.Linear))
    strategy = FSDPStrategy(activation_checkpointing_policy={torch.nn.Linear})
    whole = fsdp1._Part.fully_shard(sharded)
    lightning._strategies._setup_activation_checkpointing(
        whole, strategy._activation_checkpointing_kwargs
    )
    prefix = "_fsdp_wrapped_module."
    assert wrapped(plain) == [name.removeprefix(prefix) for name in wrapped(whole)] != []


def test_adapters_name_requirements_that_exist():
    """An id in `lacks` that does not exist would have no effect."""
    folder = Path(adapters.__file__).parent
    ids = re.compile(r'"([A-Z]{2}-\d{3})"')
    named = {id for path in folder.glob("*.py") for id in ids.findall(path.read_text("utf-8"))}
    assert named
    assert named - load_registry().keys() == set()
