"""A pickle is described, not obeyed: members of enumerations however Python pickles them."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import TensorProperties

from flat_param import CheckpointError
from flat_param.dcp._inert import load_inert

MEMBER = type(TensorProperties().__getstate__()[3])  # as torch writes it


class Named:
    """Pickles as a call of `getattr`, as Python 3.11.0 to 3.11.3 pickle members."""

    def __init__(self, owner: Any, name: Any) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self) -> Any:
        return getattr, (self.owner, self.name)


def test_member_by_name_is_described() -> None:
    """The member's name is what is known of it."""
    member = next(iter(MEMBER))
    found = load_inert(pickle.dumps(Named(MEMBER, member.name)))
    assert type(found).__name__ == MEMBER.__name__
    assert found.args == (member.name,)


@pytest.mark.parametrize("thing", [Named(TensorProperties, "__init__"), Named("x", "join")])
def test_attribute_of_anything_else_is_refused(thing: Named) -> None:
    """No attribute is looked up, on a class of torch's or on a value."""
    with pytest.raises(CheckpointError, match="only members of enumerations may be named"):
        load_inert(pickle.dumps(thing))


def test_name_has_to_be_text() -> None:
    """A name that is none is refused."""
    with pytest.raises(CheckpointError, match="asks for an attribute"):
        load_inert(pickle.dumps(Named(MEMBER, 3)))
