"""Tensors in what a module takes and returns: found, and cast, in containers of every class."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from flat_param.sharded._tensors import cast_floats, map_tensors, tensors_in


class Batch(dict):
    """A dict of a model's own, made by keywords only."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.source = "here"


class Frozen(dict):
    """A dict that is not written to."""

    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("frozen")


@dataclass(frozen=True, slots=True)
class Answer:
    """A frozen dataclass with a field that `__init__` does not take."""

    score: torch.Tensor
    parts: list[Any]
    label: str = field(default="unset", init=False)


Pair = namedtuple("Pair", "left right")


def _default(**items: Any) -> defaultdict[str, Any]:
    return defaultdict(list, items)


@pytest.mark.parametrize("make", [dict, OrderedDict, _default, Batch, Frozen])
def test_dict_of_any_class_is_cast(make: Any) -> None:
    """Its class stays, with what else it has; the caller's own is not changed."""
    given = make(a=torch.ones(2), n=3, inner=[torch.ones(1, dtype=torch.int64)])
    made = cast_floats(given, torch.bfloat16)
    assert type(made) is type(given)
    assert list(made) == ["a", "n", "inner"]
    assert (made["a"].dtype, made["inner"][0].dtype) == (torch.bfloat16, torch.int64)
    assert given["a"].dtype is torch.float32
    assert getattr(made, "source", "here") == "here"
    assert getattr(made, "default_factory", list) is list


def test_other_containers_are_cast() -> None:
    """Tuples with names, lists, and what holds no tensor."""
    given = (Pair(torch.ones(1), [torch.ones(2)]), Counter("aab"), "text")
    pair, counted, text = cast_floats(given, torch.float64)
    assert type(pair) is Pair
    assert [tensor.dtype for tensor in tensors_in(pair)] == [torch.float64] * 2
    assert counted == Counter("aab")
    assert text == "text"


def test_dataclasses_are_cast() -> None:
    """A frozen one keeps what it was given after it was made; its class is no value."""
    given = Answer(torch.ones(2), [torch.ones(1, dtype=torch.int64), {"a": torch.ones(1)}])
    object.__setattr__(given, "label", "set")
    made = cast_floats(given, torch.float64)
    assert (type(made), made.label) == (Answer, "set")
    found = [tensor.dtype for tensor in tensors_in(made)]
    assert found == [torch.float64, torch.int64, torch.float64]
    assert given.score.dtype is torch.float32
    assert cast_floats(Answer, torch.float64) is Answer


def test_cast_that_changes_nothing_gives_the_same_tensors() -> None:
    """No copy is made of a tensor that has the dtype."""
    x = torch.ones(2)
    assert cast_floats([x], torch.float32)[0] is x
    assert map_tensors(x, torch.neg).tolist() == [-1, -1]
