"""Code in the shipped adapters beyond renaming."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from torchparts_conformance import _adapters, adapters
from torchparts_conformance._errors import AdapterError, one_line
from torchparts_conformance.adapters import (
    fsdp1,
    torch_tools,
)
from torchparts_conformance.requirements._cases import load_registry


@pytest.fixture
def mesh():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


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


def test_adapters_name_requirements_that_exist():
    """An id in `lacks` that does not exist would have no effect."""
    folder = Path(adapters.__file__).parent
    ids = re.compile(r'"([A-Z]{2}-\d{3})"')
    named = {id for path in folder.glob("*.py") for id in ids.findall(path.read_text("utf-8"))}
    assert named
    assert named - load_registry().keys() == set()
