"""Places are where the interpreter checks for signals, and all of them are reached."""

from __future__ import annotations

import contextlib
import functools

import pytest
from stress.places import Interrupt

HERE = (__file__,)


def count(act):
    """Return the number of places."""
    with Interrupt(HERE) as interrupt:
        act()
    return interrupt.seen


def interrupted(act, at):
    """Whether the place with that number raised, and the exception reached the caller."""
    interrupt = Interrupt(HERE, at)
    try:
        with interrupt:
            act()
    except KeyboardInterrupt:
        return True
    return False


def test_a_frame_a_call_and_a_loop_are_places():
    """One at the function's beginning, one after each call of a builtin, one per round."""

    def act():
        len("")  # 1: beginning; 2: after len
        for _ in "ab":  # 3, 4: backward jumps
            pass

    assert count(act) == 4


def test_the_return_of_a_python_function_is_no_place():
    """The interpreter does not check between it and the caller's next instruction."""

    def inner():
        return 1

    def act():
        inner()

    assert count(act) == 2


def test_a_python_function_called_by_another_function_is_one():
    """As `functools.partial` calls it; it has its beginning, but no place at its return."""
    assert count(functools.partial(lambda: None)) == 1


def test_an_instruction_is_known_by_its_first_place():
    """A later round of a loop is the same instruction."""

    def act():
        for _ in "abcd":
            len("")

    with Interrupt(HERE) as interrupt:
        act()
    assert interrupt.seen == 9  # the beginning; after `len` and at the jump, four times each
    assert sorted(interrupt.firsts.values()) == [1, 2, 3]


def test_files_that_are_not_watched_have_no_places():
    """Such as the counter itself and the standard library."""

    def act():
        contextlib.ExitStack().close()

    with Interrupt(("/nowhere",)) as interrupt:
        act()
    assert interrupt.seen == 0


def test_every_place_raises_once_and_says_where():
    """As many interrupts as places; the next number does nothing."""

    def act():
        len("")
        len("")

    total = count(act)
    assert [interrupted(act, at) for at in range(1, total + 2)] == [True] * total + [False]
    interrupt = Interrupt(HERE, 1)
    with pytest.raises(KeyboardInterrupt), interrupt:
        act()
    assert "test_places.py" in interrupt.where and interrupt.where.endswith("in act")


def test_an_interrupt_is_seen_by_the_try_that_it_is_in():
    """Like a signal's."""
    seen = []

    def act():
        try:
            len("")
        finally:
            seen.append(1)

    total = count(act)
    seen.clear()
    assert all(interrupted(act, at) for at in range(1, total + 1))
    assert len(seen) == total - 1  # all but the function's beginning


def test_a_window_between_a_change_and_its_protection_is_found():
    """The classic mistake: a resource is acquired one call before the `try` that releases it."""
    held = []

    def careless():
        held.append(1)
        len("")
        try:
            len("")
        finally:
            held.pop()

    def careful():
        try:
            held.append(1)
            len("")
        finally:
            held.clear()

    def left(act):
        found = 0
        for at in range(1, count(act) + 1):
            interrupted(act, at)
            found += len(held)
            held.clear()
        return found

    assert left(careless) == 2
    assert left(careful) == 0
