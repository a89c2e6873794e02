"""Which process groups a unit has: from torch's default or a mesh."""

from __future__ import annotations

import gc
import re

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from flat_param import StateError
from flat_param.comm import _groups
from flat_param.comm._comm import CommLog
from flat_param.comm._groups import group_sizes, make_comm_groups, meeting_comms


def _made(mesh=None):
    return make_comm_groups(mesh, log=CommLog())


def test_parameters_and_gradients_have_a_group_each(group_of_one):
    """Their orders may interleave differently on each rank; one log counts all three."""
    comms = _made()
    assert comms.gather.group is dist.group.WORLD
    assert comms.reduce.group not in (None, dist.group.WORLD)
    assert comms.replicate.group is None
    assert comms.world_size == 1
    assert {id(c.log) for c in (comms.gather, comms.reduce, comms.replicate)} == {id(comms.log)}


def _count() -> int:
    """Second groups that were made."""
    return sum(map(len, _groups._derived.values()))


def test_undivided_ranks_are_copies(group_of_one):
    """A shard axis of one rank gathers nothing; gradients are summed over the other axis."""
    comms = _made(init_device_mesh("cpu", (1, 1)))
    assert comms.gather.group is None
    assert comms.reduce.group is None
    assert comms.replicate.group is not None


def test_second_group_is_made_once_and_not_kept(group_of_one):
    """Units share it for as long as torch has it; after that it is made anew."""
    before = _count()
    first, second = (_made().reduce.group for _ in range(2))
    assert first is second
    assert _count() == before + 1
    dist.destroy_process_group(first)
    del first, second
    gc.collect()
    assert _made().reduce.group is not None


def test_mesh_of_one_axis_is_its_group(group_of_one):
    """Of a group that is there already, too."""
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    assert _made(mesh).gather.group is mesh.get_group()
    group = dist.new_group([0])
    mesh = DeviceMesh.from_group(group, "cpu")
    assert _made(mesh).gather.group is group


def test_mesh_of_two_axes_is_copies_of_shards(group_of_one):
    """The first axis replicates; the second divides, or has one rank and no group."""
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    comms = _made(mesh)
    assert comms.replicate.group is not None
    assert comms.gather.group is None
    assert group_sizes(mesh) == (1, 1)


def test_sizes_are_those_of_the_groups(group_of_one):
    """Copies, and ranks that divide each; nothing is made to say so."""
    before = _count()
    assert group_sizes(None) == (1, 1)
    assert _count() == before


@pytest.mark.parametrize("ask", [group_sizes, _made])
def test_mesh_of_three_axes_is_refused(group_of_one, ask):
    """The error says what each number of axes means."""
    mesh = init_device_mesh("cpu", (1, 1, 1))
    with pytest.raises(StateError, match=re.escape("mesh has 3 axes, but parameters are sharded")):
        ask(mesh)


def test_without_a_process_group_the_other_way_is_named():
    """Whoever has one process wants `flatten`."""
    with pytest.raises(StateError, match=r"there is no process group.*use flat_param\.flatten\."):
        _made()
    with pytest.raises(StateError, match="there is no process group"):
        meeting_comms(None)


def test_ranks_meet_in_the_whole_world_if_they_are_all(group_of_one):
    """By whichever mesh each was told of it."""
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    for given in (None, mesh):
        (comm,) = meeting_comms(given)
        assert comm.group is dist.group.WORLD
        assert comm.log is not _made().log


def test_meshes_beside_the_world_meet_axis_by_axis(group_of_one, monkeypatch):
    """As if this were one of two ranks, and the mesh had only this one; the inner axis first."""
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    size = dist.get_world_size
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: size(group) if group else 2)
    found = [comm.group for comm in meeting_comms(mesh)]
    assert found == [mesh.get_group("shard"), mesh.get_group("replicate")]


def test_error_of_one_rank_is_told_and_raised(group_of_one, monkeypatch):
    """To those that divide a copy and to those of other copies; an interrupt is told to nobody."""
    comms, told = _made(), []
    for comm in (comms.gather, comms.reduce, comms.replicate):
        monkeypatch.setattr(comm, "refuse", told.append)
    with pytest.raises(ValueError, match="wrong"), comms.telling_others():
        raise ValueError("wrong")
    assert told == ["wrong", "wrong"]
    with pytest.raises(KeyboardInterrupt), comms.telling_others():
        raise KeyboardInterrupt
    with comms.telling_others():
        pass
    assert told == ["wrong", "wrong"]


def test_unit_is_named_in_all_three(group_of_one, monkeypatch):
    """Errors of a collective say whose it is."""
    comms, named = _made(), []
    for comm in (comms.gather, comms.reduce, comms.replicate):
        monkeypatch.setattr(comm, "rename", named.append)
    comms.name("block.0")
    assert named == ["block.0"] * 3


def test_change_is_shared_with_all_that_hold_the_parameters(group_of_one, monkeypatch):
    """Those of one copy first."""
    comms, shared = _made(), []
    for name in ("gather", "reduce", "replicate"):
        note = lambda change, name=name: shared.append((name, change))  # noqa: E731
        monkeypatch.setattr(getattr(comms, name), "share_change", note)
    comms.share_change("to bfloat16")
    assert shared == [("gather", "to bfloat16"), ("replicate", "to bfloat16")]
