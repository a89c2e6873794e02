"""Taking tensors out of arguments and putting others in."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field

import pytest
import torch

from ckpt_wrap.checkpointing._tree import fill, flatten

Pair = namedtuple("Pair", "a b")


@dataclass
class Record:
    x: torch.Tensor
    n: int = 3
    made: list = field(default_factory=list, init=False)


class Output(OrderedDict):
    """A dict with attributes, the way model outputs are."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        setattr(self, key, value)


T = torch.ones(1)
U = torch.zeros(1)
CASES = [
    (T, 1),
    ((T, [U, {"k": T}], 3, None), 3),
    (Pair(T, "s"), 1),
    (OrderedDict(a=T, b=2), 1),
    (defaultdict(list, a=[T]), 1),
    (Record(T), 1),
    (torch.max(torch.ones(2, 2), 0), 2),
    ([1, "a", None, torch.float32, torch.Size([2])], 0),
]


@pytest.mark.parametrize(("value", "count"), CASES)
def test_filling_with_other_tensors_keeps_the_structure(value, count):
    """Types and everything that is no tensor stay; tensors are replaced in order."""
    tensors: list[torch.Tensor] = []
    template = flatten(value, tensors)
    assert len(tensors) == count
    new = [torch.full((1,), float(i)) for i in range(count)]
    result = fill(template, new)
    assert type(result) is type(value)
    again: list[torch.Tensor] = []
    flatten(result, again)
    assert all(a is b for a, b in zip(again, new, strict=True))


def test_values_without_tensors_are_passed_by_reference():
    """A container without a tensor is the very same object."""
    plain = {"a": [1, 2]}
    assert fill(flatten((plain, T), []), [T])[0] is plain


def test_a_template_keeps_no_tensor_alive():
    """Dict subclasses and dataclasses are copied without their values."""
    output = Output(logits=torch.ones(3))
    template = flatten((output, Record(torch.ones(2))), tensors := [])
    for node in template.parts:
        shell = node.build.__closure__[-1].cell_contents
        assert not [v for v in vars(shell).values() if isinstance(v, torch.Tensor)]
    result = fill(template, tensors)
    assert result[0].logits is output["logits"]
    assert result[1].made == []


def test_a_dict_changed_later_is_rebuilt_as_it_was():
    """Keys added after flattening are not part of the rebuilt dict."""
    cache = {"k": T}
    template = flatten(cache, tensors := [])
    cache["v"] = U
    assert fill(template, tensors) == {"k": T}
