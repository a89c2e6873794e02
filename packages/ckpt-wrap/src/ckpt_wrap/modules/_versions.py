"""What a state dict says of its modules' versions, under whichever names it was saved.

`load_state_dict` looks up a module's entry of `_metadata` under the name the module has in the
model it loads into. Saved with other wrappers around, or with none, the entry has another name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ckpt_wrap._torch_compat import state_dict_being_loaded
from ckpt_wrap.modules._names import WRAPPED_MODULE, clean_name

Metadata = dict[str, Any]


def hand_down(module: nn.Module, prefix: str) -> Callable[[], None]:
    """Have torch find the entries of a module and of all below it; returns what undoes it.

    Args:
        module: the module about to be loaded.
        prefix: its name in the model that is being loaded, wrappers included, and a dot.
    """
    state_dict = state_dict_being_loaded()
    metadata: Metadata | None = getattr(state_dict, "_metadata", None)
    if metadata is None:
        return lambda: None
    saved = _by_clean_name(state_dict, metadata)
    if saved is metadata and WRAPPED_MODULE not in prefix:
        return lambda: None
    before: Metadata = {}
    for name, _ in module.named_modules(remove_duplicate=False):
        wanted = f"{prefix}{name}".removesuffix(".")
        found = saved.get(clean_name(wanted))
        if found is not None and metadata.get(wanted) is not found:
            before[wanted] = metadata.get(wanted)
            metadata[wanted] = found
    return lambda: _put_back(metadata, before)


def own_entry(prefix: str, looked_up: Metadata) -> Metadata:
    """The entry of the module itself, which torch has looked up already."""
    state_dict = state_dict_being_loaded()
    metadata: Metadata | None = getattr(state_dict, "_metadata", None)
    if metadata is None:
        return looked_up
    return {**looked_up, **_by_clean_name(state_dict, metadata).get(clean_name(prefix[:-1]), {})}


def _by_clean_name(state_dict: Any, metadata: Metadata) -> Mapping[str, Any]:
    """The entries by names without wrappers, found once per load."""
    found: Mapping[str, Any] | None = vars(state_dict).get("_by_clean_name")
    if found is None:
        wrapped = any(clean_name(name) != name for name in metadata)
        # A module comes after its wrapper, so what is said of the module counts.
        found = {clean_name(name): entry for name, entry in metadata.items()}
        found = found if wrapped else metadata
        state_dict._by_clean_name = found  # torch's own copy of what the user gave
    return found


def _put_back(metadata: Metadata, before: Metadata) -> None:
    for name, entry in before.items():
        if entry is None:
            del metadata[name]
        else:
            metadata[name] = entry
