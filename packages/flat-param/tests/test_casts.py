"""Tensors in what a unit takes and returns are cast, in containers of every class."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from flat_param import fully_shard

pytestmark = pytest.mark.usefixtures("group_of_one")


class Batch(dict):
    """A dict of a model's own, made by keywords only."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.source = "here"


@dataclass(frozen=True, slots=True)
class Answer:
    """A frozen dataclass with a field that `__init__` does not take."""

    score: torch.Tensor
    parts: list[Any]
    label: str = field(default="unset", init=False)


Pair = namedtuple("Pair", "left right")


class Takes(nn.Module):
    """Records its argument and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.given: list[Any] = []

    def forward(self, given: Any) -> Any:
        """The same."""
        self.given.append(given)
        return given


def cast(given: Any) -> Any:
    """What a unit that computes in bfloat16 gets."""
    module = fully_shard(Takes(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    module(given)
    return module.given[0]


def _default(**items: Any) -> defaultdict[str, Any]:
    return defaultdict(list, items)


@pytest.mark.parametrize("make", [dict, OrderedDict, _default, Batch])
def test_dict_of_any_class_is_cast(make: Any) -> None:
    """Its class stays, with what else it has; the caller's own is not changed."""
    given = make(a=torch.ones(2), n=3, inner=[torch.ones(1, dtype=torch.int64)])
    made = cast(given)
    assert type(made) is type(given)
    assert list(made) == ["a", "n", "inner"]
    assert (made["a"].dtype, made["inner"][0].dtype) == (torch.bfloat16, torch.int64)
    assert given["a"].dtype is torch.float32
    assert getattr(made, "source", "here") == "here"
    assert getattr(made, "default_factory", list) is list


def test_other_containers_are_cast() -> None:
    """Tuples with names, lists, and what holds no tensor."""
    pair, counted, text, kind = cast(
        (Pair(torch.ones(1), [torch.ones(2)]), Counter("aab"), "text", Answer)
    )
    assert type(pair) is Pair
    assert (pair.left.dtype, pair.right[0].dtype) == (torch.bfloat16, torch.bfloat16)
    assert (counted, text, kind) == (Counter("aab"), "text", Answer)


def test_dataclasses_are_cast() -> None:
    """A frozen dataclass keeps attributes set after `__init__`."""
    given = Answer(torch.ones(2), [torch.ones(1, dtype=torch.int64), {"a": torch.ones(1)}])
    object.__setattr__(given, "label", "set")
    made = cast(given)
    assert (type(made), made.label) == (Answer, "set")
    found = [made.score.dtype, made.parts[0].dtype, made.parts[1]["a"].dtype]
    assert found == [torch.bfloat16, torch.int64, torch.bfloat16]
    assert given.score.dtype is torch.float32


def test_tensor_of_the_right_dtype_is_not_copied() -> None:
    """It is the caller's."""
    x = torch.ones(2, dtype=torch.bfloat16)
    assert cast([x])[0] is x
