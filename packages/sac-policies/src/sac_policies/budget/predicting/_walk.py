"""A training step under a plan, walked through as it would run.

Rule 1. The step was run once, without checkpointing. What a plan keeps lives as it did then, and
        longer where a replay reads it. What it does not keep lives in forward as long as others
        than autograd hold it, and in backward from its first reader to its last.
Rule 2. A replay runs a call again on what it read. What is kept or was given is there; all else is
        replayed for it. What a call writes in place is another value in the same storage.
Rule 3. What an operator takes for itself while it runs was measured, and is taken again where a
        replay runs it. Fake tensors only tell what it returns.
Rule 4. A constant (`_constants`) lives until forward has ended, and longer where something is to be
        made of it: until nothing is left of that. A copy of it lives from there on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from .._constants import TracedConstant
from .._trace import TracedPack
from ._step_run import StepRun


class Walk:
    """A step under a plan, walked through.

    Args:
        run: the step as it ran without one.
        packs: its saved tensors, as the plan knows them, each with whether it is kept; None where
            all are, as they are.
        constants: what is held for them besides, and until forward has ended in any case.
        forward: how many calls that is.
        drawn: calls that draw random numbers; their results are made of bits that are held.
    """

    def __init__(
        self,
        run: StepRun,
        packs: Sequence[tuple[TracedPack, bool]] | None,
        constants: Sequence[TracedConstant],
        forward: int,
        drawn: frozenset[int] = frozenset(),
    ) -> None:
        self._run, self._values = run, run.values
        self._now = self._top = 0
        self._alive: set[int] = set()
        """Storages that live as they did without a plan."""
        self._made: set[int] = set()
        """Values that were made again."""
        self._kept_at: dict[int, dict[int, int]] = {}
        """By storage that is kept as it is, for which saved tensor first, by layout."""
        self._short: dict[int, int] = {}
        """What is kept of storages that are kept as less: bytes."""
        replayed, short = set(), set()
        for at, (number, layout) in enumerate(run.saved):
            if number < 0:
                continue
            storage = self._values[number].storage
            pack, is_kept = packs[at] if packs is not None else (None, True)
            if pack is not None and pack.producer and not is_kept:
                replayed.add(at)
            elif pack is None or pack.storage_bytes >= self._values[number].size_bytes:
                self._kept_at.setdefault(storage, {}).setdefault(layout, at)
            else:
                short.add(at)
                self._short[storage] = max(self._short.get(storage, 0), pack.storage_bytes)
        self._short = {n: size for n, size in self._short.items() if n not in self._kept_at}
        self._saved = [number for number, _ in run.saved]
        self._replayed = {at for at in replayed if not self._is_whole(at)}
        """Saved tensors that are made again."""
        self._widened = {at for at in short if not self._is_whole(at)}
        """Those that are kept as less than they are."""
        made_again = [self._saved[at] for at in (*self._replayed, *self._widened)]
        self._gone = {self._values[number].storage for number in made_again}
        self._readers = Counter(made_again)
        self._holders: Counter[int] = Counter()
        self._operands: dict[int, list[int]] = {}
        """By value that is replayed, what is made again for that."""
        self._sources: dict[int, frozenset[int]] = {}
        """By such a value, the storages that are read for it, and for what it reads."""
        self._constants = constants
        self._keys = [self._key(at) for at in range(len(constants))]
        """By constant, its storage; a number below 0 for a copy."""
        self._held: dict[int, frozenset[int]] = {}
        """By saved tensor, the storages and copies that are held to make it again."""
        self._seen = frozenset(key for key in self._keys if key >= 0)
        self._holders.update(self._seen)
        self._forward, self._drawn = forward, drawn
        self._copied_at: Counter[int] = Counter()
        """By call, bytes of copies of constants."""
        for at in sorted((*self._replayed, *self._widened)):
            pack = None if packs is None else packs[at][0]
            self._hold(at, [] if pack is None else [self._keys[each] for each in pack.reads])
        self._left = Counter(self._values[each].storage for each in self._saved if each >= 0)
        """Saved tensors of each storage that are not released yet."""
        self._freed: set[int] = set()

    def _key(self, at: int) -> int:
        constant = self._constants[at]
        if constant.made_by < 0:
            return -1 - at
        return self._run.calls[constant.made_by].made[constant.output]

    def _hold(self, at: int, constants: list[int]) -> None:
        """Find out what is held until a saved tensor is released (Rules 1 and 4)."""
        number = self._saved[at]
        for key in constants:
            if key < 0 and not self._holders[key]:
                self._copied_at[self._values[number].call] += self._constants[
                    -1 - key
                ].storage_bytes
        held = frozenset(constants)
        if at in self._replayed:
            held |= self._kept_for(number, at, held)
        self._held[at] = held
        self._holders.update(held)

    def peak(self) -> int:
        """Most bytes over those before the step."""
        dropped: dict[int, list[int]] = {}
        for storage, at in self._run.dropped.items():
            if storage in self._gone:
                dropped.setdefault(at, []).append(storage)
        calls = 0
        for kind, number in self._run.events:
            if kind in ("call", "read"):
                if calls == self._forward:
                    self._let_go(self._seen)
                    self._forward = -1
                for storage in dropped.pop(calls, ()):
                    if self._holders[storage]:
                        self._freed.add(storage)
                    else:
                        self._drop(storage, self._alive)
                    self._now += self._short.get(storage, 0)
            if kind == "call":
                calls += 1
                call = self._run.calls[number]
                self._take(call.most_bytes, call.made, self._alive)
                self._now += self._copied_at[number]
            elif kind == "free":
                self._free(number)
            elif self._saved[number] >= 0:
                (self._read if kind == "read" else self._release)(number)
        return self._top

    def _is_whole(self, at: int) -> bool:
        return self._values[self._saved[at]].storage in self._kept_at

    def _kept_for(self, number: int, at: int, constants: frozenset[int]) -> frozenset[int]:
        """Find out what a value is replayed from, once a recipe for the saved tensor `at` is made.

        What is kept later than that is not known then. Counts the readers of all that is made
        again, which constants are not.
        """
        if number not in self._sources:
            found, again = set(), []
            call = self._values[number].call
            for each, _ in () if call in self._drawn else self._run.calls[call].read:
                storage = self._values[each].storage
                if storage in self._seen or storage in self._kept_at:
                    found.add(storage)
                    continue
                again.append(each)
                self._readers[each] += 1
                if storage not in self._short:
                    found |= self._kept_for(each, at, constants)
            self._operands[number], self._sources[number] = again, frozenset(found)
        return self._sources[number]

    def _take(self, most: int, made: Iterable[int], there: set[int]) -> None:
        self._top = max(self._top, self._now + most)
        for number in made:
            there.add(number)
            self._now += self._values[number].size_bytes
        self._top = max(self._top, self._now)

    def _drop(self, number: int, there: set[int]) -> None:
        if number in there:
            there.remove(number)
            self._now -= self._values[number].size_bytes

    def _free(self, storage: int) -> None:
        """Nobody held it any more, where nothing was checkpointed."""
        if self._holders[storage]:
            self._freed.add(storage)
        elif storage not in self._gone or storage not in self._run.dropped:
            self._drop(storage, self._alive)

    def _read(self, at: int) -> None:
        """Backward asks for a saved tensor."""
        number = self._saved[at]
        if at in self._replayed or at in self._widened:
            self._make(number)
            self._readers[number] -= 1

    def _release(self, at: int) -> None:
        """A node, or whoever lets go of the graph, is done with a saved tensor."""
        number = self._saved[at]
        storage = self._values[number].storage
        self._left[storage] -= 1
        self._let_go(self._held.get(at, ()))
        if storage in self._gone:
            if self._readers[number] <= 0:
                self._drop(number, self._made)
            if not self._left[storage]:
                self._now -= self._short.pop(storage, 0)

    def _let_go(self, held: Iterable[int]) -> None:
        """One who held storages and copies does so no more."""
        for each in held:
            self._holders[each] -= 1
            if self._holders[each]:
                continue
            if each < 0:
                self._now -= self._constants[-1 - each].storage_bytes
            elif each in self._freed:
                self._drop(each, self._alive)

    def _make(self, number: int) -> None:
        """Replay the call that made a value, or make it of what is kept, unless it is there."""
        storage = self._values[number].storage
        if number in self._made or (storage in self._gone and storage in self._alive):
            return
        if storage in self._short:
            self._take(0, (number,), self._made)
            return
        operands = self._operands[number]
        for each in operands:
            self._make(each)
        most = self._run.calls[self._values[number].call].most_bytes
        self._take(most, (number,), self._made)
        for each in operands:
            self._readers[each] -= 1
            if self._readers[each] <= 0:
                self._drop(each, self._made)
