"""Modes of the contexts engine look away while the engine itself works."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sac_policies.engines import _engine_disabled
from sac_policies.engines._engine_disabled import (
    EngineDisabled,
    RangeHandler,
    active,
    own_work,
    seeing,
)
from sac_policies.engines._fsdp import RANGE_OPS


class _Mode(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.op_table: Any = object()

    def follow(self, op: Any, args: Any) -> None:
        """Sees nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.fixture
def entered() -> Iterator[Callable[[], _Mode]]:
    """Enter a mode for torch and for the engine; all are left at the end."""
    with ExitStack() as stack:
        stack.callback(active.modes.clear)

        def enter() -> _Mode:
            mode = stack.enter_context(_Mode())
            active.enter(mode)
            return mode

        yield enter


def test_own_work_gives_each_mode_its_table_back(entered: Callable[[], _Mode]) -> None:
    """Also where modes came and went meanwhile, as when unpacking runs a region again."""
    modes = [entered(), entered()]
    tables = [mode.op_table for mode in modes]
    with own_work():
        assert all(isinstance(mode.op_table, EngineDisabled) for mode in modes)
        active.leave(modes[1])
    assert [mode.op_table for mode in modes] == tables


def test_own_work_is_unseen_by_modes_of_whoever_called_backward() -> None:
    """A device's backward thread has entered none itself; another's modes stay as they are."""
    assert active.modes == []
    with TorchDispatchMode(), _Mode() as mode:  # the first is somebody else's
        with own_work():
            assert isinstance(mode.op_table, EngineDisabled)
        assert not isinstance(mode.op_table, EngineDisabled)


def test_without_torchs_stack_the_threads_own_modes_are_taken(
    entered: Callable[[], _Mode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an older torch would have it."""
    mode = entered()
    monkeypatch.setattr(_engine_disabled, "entered_modes", lambda: None)
    assert seeing() == [mode]
    active.modes.clear()
    assert seeing() == []


def test_modes_are_active_innermost_last(entered) -> None:
    """As they are entered."""
    modes = [entered() for _ in range(3)]
    assert active.modes == modes


def test_leaving_a_mode_leaves_those_inside_it(entered) -> None:
    """One that was left with another is left already."""
    outer, middle, inner = (entered() for _ in range(3))
    active.leave(middle)
    assert active.modes == [outer]
    active.leave(inner)
    assert active.modes == [outer]


def test_modes_that_an_interrupt_left_active_are_dropped(entered) -> None:
    """Torch has left them: the next region begins without."""
    outer = entered()
    active.modes.append(_Mode())
    assert active.modes[0] is outer
    inner = entered()
    assert active.modes == [outer, inner]


def test_modes_of_another_thread_are_its_own(entered) -> None:
    """A backward in it recomputes for itself."""
    entered()
    seen: list[list[Any]] = []
    thread = threading.Thread(target=lambda: seen.append(list(active.modes)))
    thread.start()
    thread.join()
    assert seen == [[]]


def test_table_of_a_mode_that_looks_away_has_ranges_only() -> None:
    """So that it sees the end of what it looks away from."""
    table = EngineDisabled()
    assert table[torch.ops.aten.mm.default] is None
    for op in RANGE_OPS:
        assert table[op].op is op


def test_range_runs_and_is_shown_to_the_mode() -> None:
    """In a forward and in a recomputation; what it returns is the operator's."""
    followed: list[Any] = []
    mode = SimpleNamespace(follow=lambda op, args: followed.append((op, args)))
    handler = RangeHandler(torch.ops.aten.add.Tensor)
    a = torch.ones(2)
    for run in (handler.forward, handler.replay):
        assert torch.equal(run(mode, (a, a), {"alpha": 3}), torch.full((2,), 4.0))
    assert followed == [(torch.ops.aten.add.Tensor, (a, a))] * 2


def test_failing_own_work_gives_tables_back_too(entered) -> None:
    """The error is the work's own."""
    mode = entered()
    mode.op_table = table = object()
    with pytest.raises(ArithmeticError), own_work():
        raise ArithmeticError
    assert mode.op_table is table
