"""What an accelerator compares is asked for when backward ends, many values at once."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sac_policies.eager import _doubts, _guards
from sac_policies.eager._doubts import BLOCK_WORDS, MOST_WORDS, _Doubts


class Changed(Exception):
    """Tells of which value it is."""


def words(count: int) -> torch.Tensor:
    """So many, each another."""
    return torch.arange(count) * 7 - 3


def compare(doubts: _Doubts, sizes: list[int], changed: dict[int, int]) -> None:
    """Have values of these sizes compared, some with another word, by number and place."""
    for number, size in enumerate(sizes):
        after = words(size)
        if number in changed:
            after[changed[number]] += 1
        doubts.compare(words(size), after, lambda number=number: Changed(number))


@pytest.mark.parametrize(("number", "at"), [(0, 0), (0, 4), (1, 0), (2, 0), (2, 8), (3, -1)])
def test_value_that_is_another_is_named(number: int, at: int) -> None:
    """By whichever of its words, at the ends as well."""
    doubts = _Doubts()
    compare(doubts, [5, 1, 9, 300], {number: at})
    with pytest.raises(Changed, match=f"^{number}$"):
        doubts.settle()


def test_first_of_several_is_named_and_none_where_all_are_the_same() -> None:
    """Also between two that are compared by themselves."""
    doubts = _Doubts()
    compare(doubts, [5, 6, 7], {1: 3, 2: 0})
    with pytest.raises(Changed, match=r"^1$"):
        doubts.settle()
    doubts = _Doubts()
    compare(doubts, [5, 6, 7], {})
    doubts.ask(torch.tensor(True), Changed)
    doubts.settle()
    doubts.ask(torch.tensor(False), lambda: Changed("itself"))
    with pytest.raises(Changed, match=r"^itself$"):
        doubts.settle()


class Counts(TorchDispatchMode):
    """Counts operators that are launched: not views."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not (func.is_view or name in ("new_empty", "empty", "detach", "_local_scalar_dense")):
            self.ops[name] += 1
        return func(*args, **(kwargs or {}))


def test_many_are_compared_by_as_many_operators_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until so many wait that what they take is bounded."""
    monkeypatch.setattr(_doubts, "no_dispatch", nullcontext)
    counted = []
    for count in (1, 500):
        doubts = _Doubts()
        compare(doubts, [9] * count, {})
        with Counts() as counts:
            doubts.settle()
        counted.append(counts.ops.total())
    assert counted[0] == counted[1] <= 7
    doubts, few = _Doubts(), MOST_WORDS // BLOCK_WORDS
    compare(doubts, [9] * few, {})
    assert not doubts._asked
    compare(doubts, [9], {})
    assert len(doubts._asked) == 1
    assert not doubts._waiting


@pytest.mark.parametrize(
    ("count", "ops"), [(100, {"copy_": 1}), (4000, {"sum": 2}), (1 << 15, {"sum": 2})]
)
def test_fingerprint_of_whole_words_is_taken_by_two_operators(
    count: int, ops: dict[str, int]
) -> None:
    """By one where there are few words."""
    tensor = words(count)
    with Counts() as counts:
        found = _guards._sums(tensor)
    assert counts.ops == ops
    rows, columns, _ = _guards._table_of(count)
    assert len(found) == rows + columns


def test_streams_are_not_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one wrote is compared there, or when backward has ended."""
    stream = [0]
    monkeypatch.setattr(_doubts, "_stream_of", lambda device: stream[0])
    doubts = _Doubts()
    for stream[0] in (1, 2, 1, 2):
        compare(doubts, [MOST_WORDS // 3], {})
    assert [len(each.prints) for each in doubts._waiting.values()] == [2, 2]
    stream[0] = 2
    compare(doubts, [MOST_WORDS], {})
    assert [len(each.prints) for each in doubts._waiting.values()] == [2]
    doubts.settle()


def test_device_that_is_no_accelerator_has_one_stream() -> None:
    """Its work is done in order."""
    assert _doubts._stream_of(torch.device("cpu")) == torch.device("cpu")


@pytest.mark.accelerator
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_stream_of_an_accelerator_is_the_one_that_is_current() -> None:
    """Another is another."""
    kind: Any = torch.accelerator.current_accelerator()
    device = torch.device(kind.type, torch.accelerator.current_device_index())
    one, side = _doubts._stream_of(device), torch.Stream(device)
    with side:
        assert _doubts._stream_of(device) != one
    assert _doubts._stream_of(device) == one
