"""Broken checkpoints of sharded modules; each fails exactly what it declares."""

from __future__ import annotations

import collections
import pickle
import secrets
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchparts_conformance.mutants import mutant, overlay

from .faults.flat_param_distributed import with_sharded

AREA = "flat-param"


def _with_state(part, mend):
    """The part with sharded modules to whose whole state something is done."""

    def change(module, options):
        whole = type(module).state_dict

        def state_dict(self, *args, **kwargs):
            state = whole(self, *args, **kwargs)
            if kwargs.get("destination") is None:
                state.update({name: mend(_whole(tensor)) for name, tensor in state.items()})
            return state

        type(module).state_dict = state_dict
        return module

    return with_sharded(part, change)


def _whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@mutant(area=AREA, kills={"FP-106"})
def state_dict_has_a_dimension_of_copies(part):
    """Puts a dimension in front of every tensor of a state dict."""
    return _with_state(part, lambda tensor: tensor.unsqueeze(0))


@mutant(area=AREA, kills={"FP-106", "FP-177"})
def state_dict_is_in_double(part):
    """Hands out every value as it is, in another dtype."""
    return _with_state(part, Tensor.double)


@mutant(area=AREA, kills={"FP-107", "FP-230", "FP-237"})
def sharded_load_forgets_moments(part):
    """Loads parameters and leaves the optimizer as it was."""

    def load_sharded(module, path, *, optimizer=None):
        if Path(path).name != "saved":
            return part.load_sharded(module, path, optimizer=optimizer)
        return part.load_sharded(module, path)

    return overlay(part, load_sharded=load_sharded)


@mutant(area=AREA, kills={"FP-109"})
def metadata_is_unpickled(part):
    """Reads metadata as pickle does."""

    def load_sharded(module, path, *, optimizer=None):
        with Path(path, ".metadata").open("rb") as file:
            pickle.load(file)
        return part.load_sharded(module, path, optimizer=optimizer)

    return overlay(part, load_sharded=load_sharded)


@mutant(area=AREA, kills={"FP-115", "FP-116"})
def damaged_data_is_passed_over(part):
    """Loads nothing, and says nothing, where the data is damaged."""

    def load_sharded(module, path, *, optimizer=None):
        try:
            return part.load_sharded(module, path, optimizer=optimizer)
        except RuntimeError as error:
            if "checksum" not in str(error):
                raise

    return overlay(part, load_sharded=load_sharded)


@mutant(area=AREA, kills={"FP-185"})
def frequent_saves_are_passed_over(part):
    """From the sixth save to one path on, makes every second one only."""
    counts = collections.Counter()

    def save_sharded(module, path, **options):
        counts[str(path)] += 1
        if counts[str(path)] < 6 or counts[str(path)] % 2:
            return part.save_sharded(module, path, **options)
        return True

    return overlay(part, save_sharded=save_sharded)


@mutant(area=AREA, kills={"FP-186"})
def failed_saves_leave_a_draft(part):
    """Leaves what was written of a save that fails."""

    def save_sharded(module, path, **options):
        try:
            return part.save_sharded(module, path, **options)
        except RuntimeError:
            Path(path, f"draft-{secrets.token_hex(4)}").write_bytes(b"part")
            raise

    return overlay(part, save_sharded=save_sharded)


@mutant(area=AREA, kills={"FP-187"})
def load_reads_two_checkpoints(part):
    """Reads the file once for each half of the parameters, with time between."""

    def load_sharded(module, path, *, optimizer=None):
        part.load_sharded(module, path, optimizer=optimizer)
        params = list(module.parameters())
        first = [param.detach().clone() for param in params[::2]]
        time.sleep(0.05)
        part.load_sharded(module, path, optimizer=optimizer)
        with torch.no_grad():
            for param, values in zip(params[::2], first, strict=True):
                param.copy_(values)

    return overlay(part, load_sharded=load_sharded)


@mutant(area=AREA, kills={"FP-237"})
def state_of_another_shape_is_dropped(part):
    """Saves what can be cut, and says nothing of the rest."""

    def save_sharded(module, path, *, optimizer=None, **options):
        states = optimizer.state.values() if optimizer is not None else ()
        dropped = [(values, values.pop("scales")) for values in states if "scales" in values]
        try:
            return part.save_sharded(module, path, optimizer=optimizer, **options)
        finally:
            for values, scales in dropped:
                values["scales"] = scales

    return overlay(part, save_sharded=save_sharded)


@mutant(area=AREA, kills={"FP-238"})
def columns_keep_what_they_had(part):
    """Loads what tensor parallel has cut, on four ranks, on the first column of ranks alone."""

    def load_sharded(module, path, **options):
        before = [param.detach().clone() for param in module.parameters()]
        part.load_sharded(module, path, **options)
        if dist.get_rank() % 2 and dist.get_world_size() == 4:
            with torch.no_grad():
                for param, values in zip(module.parameters(), before, strict=True):
                    param.copy_(values)

    return overlay(part, load_sharded=load_sharded)
