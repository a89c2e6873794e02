"""What the shipped adapters add to the libraries they adapt."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from torchparts_conformance._errors import AdapterError
from torchparts_conformance.adapters import fsdp2
from torchparts_conformance.subject import _adapters


@pytest.fixture
def mesh():
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_states_of_fully_shard_are_whole_tensors(mesh):
    """Sharded ones are gathered, and others given as they are."""
    plain = torch.arange(4.0)
    assert fsdp2._whole(plain) is plain
    whole = fsdp2._whole(distribute_tensor(plain, mesh, [Shard(0)]))
    assert type(whole) is torch.Tensor
    assert torch.equal(whole, plain)


def test_exception_without_a_text_is_named_by_its_class():
    """What is raised may raise again when it is asked for its message."""

    class Mute(Exception):
        def __str__(self):
            raise SystemExit(0)

    assert _adapters.one_line(Mute()) == "Mute"


def test_refusal_of_an_adapter_is_said_once(tmp_path, monkeypatch):
    """What the adapter did wrong is said with its name, not wrapped in another complaint."""
    text = "from torchparts_conformance import Implementation\nImplementation('', '1')\n"
    (tmp_path / "nameless.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(AdapterError) as refused:
        _adapters.load_implementation("nameless:it")
    assert str(refused.value) == (
        "implementation 'nameless:it': torchparts_conformance.Implementation: name '' is "
        "unusable, but 1 to 100 characters are needed."
    )
