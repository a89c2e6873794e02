"""The areas, the groups each is divided into, and the words for levels and devices."""

from __future__ import annotations

import re
from collections.abc import Mapping

PREFIXES: Mapping[str, str] = {
    "ckpt-wrap": "CW",
    "mod-tracker": "MT",
    "flat-param": "FP",
    "sac-policies": "SP",
    "combined": "CB",
}
AREAS = tuple(PREFIXES)
PARTS = tuple(area for area in AREAS if area != "combined")
LEVELS = ("MUST", "SHOULD")
# The word for every kind of device but the CPU. A requirement may also name one kind.
ACCELERATOR = "accelerator"
# Every implementation is held to these; any other profile is a capability that it may claim.
CLAIMED_BY_ALL = ("core", "robust")
# An implementation may have one group of an area without the others. A requirement of core or
# robust that names no group is of its area's first one; a capability is of the group it names.
GROUPS: Mapping[str, Mapping[str, str]] = {
    "ckpt-wrap": {
        "wrapping": (
            "One wrapper around one module: names, states, attributes and options of "
            "`checkpoint_wrapper`."
        ),
        "recomputing": (
            "A call whose forward runs again in backward: calling what `checkpoint_wrapper` gives."
        ),
        "reentrant": "The same by a backward inside of backward: `CheckpointImpl.REENTRANT`.",
        "applying": "Wrappers put into a model by a rule: `apply_activation_checkpointing`.",
        "offloading": "A wrapper that keeps saved tensors elsewhere: `offload_wrapper`.",
        "together": (
            "What `checkpoint_wrapper` and `offload_wrapper` have in common, or do to each other."
        ),
    },
    "mod-tracker": {
        "following": (
            "Which modules run, and in which direction: `parents` and `is_bw` of a tracker."
        ),
        "telling": (
            "Functions that a tracker calls where a module begins and ends, and names of "
            "modules: `register_user_hooks`, `get_known_fqn`."
        ),
        "counting": "Operations of a run: the total of `profile_flops`.",
        "splitting": "Operations of each module, by phase: the rows of `profile_flops`.",
        "watching": (
            "Memory that is measured while nothing else is changed by it: `profile_memory`."
        ),
        "memory": "Bytes of each module: the rows of `profile_memory`.",
        "holding": (
            "Who holds the memory that is alive, and what grows: `watch_memory`, "
            "`assert_no_growth`."
        ),
        "time": "Time of each module: `profile_time`.",
        "trace": "A timeline of modules: `trace`.",
        "writing": "Tables, files, differences and pages of every report.",
    },
    "flat-param": {
        "flattening": (
            "The parameters of a module in one vector, with which it computes: a handle and "
            "its `flat_param`."
        ),
        "sharding": "A rank's part of that vector: padding, metadata, gathering and letting go.",
    },
}
_DEVICE = re.compile(r"[a-z][a-z0-9]{0,15}")


def is_device(word: object) -> bool:
    """Return whether a word can be a kind of device; torch knows which kinds exist."""
    return isinstance(word, str) and _DEVICE.fullmatch(word) is not None


def folder_of(area: str) -> str:
    """Return the name of an area in file and module names."""
    return area.replace("-", "_")


def area_of(folder: str) -> str:
    """Return the area whose files are in a folder."""
    return folder.replace("_", "-")
