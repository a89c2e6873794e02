"""Raise KeyboardInterrupt at the n-th place where Ctrl-C could arrive in some files.

Note [Places]
    The interpreter checks for signals when a frame begins or resumes, after a call of a function
    that is not written in Python, and at a backward jump of a loop. These places are counted in
    the order in which they are reached. The return of a Python function is not a place: the
    interpreter does not check between its last instruction and the caller's next one.
    The exception is raised before the next instruction, like a signal's, and so inside the `try`
    or `with` of that instruction.
"""

from __future__ import annotations

import dis
import functools
import itertools
import sys
from collections import Counter
from types import CodeType, FrameType
from typing import Any

_CALLS = {"CALL", "CALL_FUNCTION", "CALL_FUNCTION_EX", "CALL_FUNCTION_KW", "CALL_KW", "CALL_METHOD"}
_LOOPS = {"JUMP_BACKWARD", "JUMP_ABSOLUTE"}


class Interrupt:
    """While entered, counts places in the watched files and raises at one of them.

    Args:
        watched: prefixes of paths of source files.
        at: number of the place, from 1; 0 only counts.

    Attributes:
        seen: places so far.
        firsts: number of the first place of each instruction. Instructions have the same name in
            every process.
        where: file, line and function of the place that raised, and how often its instruction had
            been reached; empty before. Equal values on two ranks mean equal progress.
    """

    def __init__(self, watched: tuple[str, ...], at: int = 0) -> None:
        self.watched, self.at = watched, at
        self.seen, self.where = 0, ""
        self.firsts: dict[str, int] = {}
        self._times: Counter[str] = Counter()

    def __enter__(self) -> Interrupt:
        self._before = sys.gettrace(), sys.unraisablehook
        # An exception in a finalizer goes only to this hook.
        sys.unraisablehook = _quiet
        sys.settrace(self._call)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(self._before[0])
        sys.unraisablehook = self._before[1]

    def _call(self, frame: FrameType, event: str, arg: Any) -> _Frame | None:
        caller = frame.f_back and frame.f_back.f_trace
        if isinstance(caller, _Frame):
            caller.entered_python = True
        if self.where or not frame.f_code.co_filename.startswith(self.watched):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return _Frame(self, frame.f_code)

    def place(self, frame: FrameType) -> None:
        """Count a place."""
        self.seen += 1
        code = frame.f_code
        name = f"{code.co_filename}:{code.co_firstlineno}:{code.co_name}+{frame.f_lasti}"
        self.firsts.setdefault(name, self.seen)
        self._times[name] += 1
        if self.seen == self.at:
            file = frame.f_code.co_filename
            times = self._times[name]
            again = f", the {times}. time" if times > 1 else ""
            self.where = f"{file}:{frame.f_lineno} in {frame.f_code.co_name}{again}"
            sys.settrace(None)
            raise KeyboardInterrupt


class _Frame:
    """Traces the instructions of one frame."""

    def __init__(self, interrupt: Interrupt, code: CodeType) -> None:
        self.interrupt = interrupt
        self.after_call, self.loops = _offsets(code)
        self.entered, self.entered_python = True, False
        self.expected = -1  # the instruction after a call

    def __call__(self, frame: FrameType, event: str, arg: Any) -> _Frame:
        if event != "opcode":
            return self
        at = frame.f_lasti
        returned = at == self.expected and not self.entered_python
        is_place = self.entered or returned or at in self.loops
        self.entered = self.entered_python = False
        self.expected = self.after_call.get(at, -1)
        if is_place:
            self.interrupt.place(frame)
        return self


@functools.cache
def _offsets(code: CodeType) -> tuple[dict[int, int], frozenset[int]]:
    """Return the offset after each call instruction, and the offsets of backward jumps."""
    instructions = list(dis.get_instructions(code))
    pairs = itertools.pairwise(instructions)
    after = {each.offset: later.offset for each, later in pairs if each.opname in _CALLS}
    loops = frozenset(
        each.offset
        for each in instructions
        if each.opname in _LOOPS and isinstance(each.argval, int) and each.argval < each.offset
    )
    return after, loops


def _quiet(unraisable: object) -> None:
    """Do nothing."""
