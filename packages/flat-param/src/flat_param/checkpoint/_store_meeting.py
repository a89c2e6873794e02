"""The ranks of one save find each other, through the process group's store alone.

Rule 1: a call of `save_sharded` has a random name, and a rank is in at most one. The first rank,
        which leads, waits until every other one is in a call; these calls are one attempt.
Rule 2: a call that is behind the others, since its rank has gone on without them, is dismissed:
        it returns, and its rank's next call may join.
Rule 3: a rank that leaves, by an error or since its time is over, takes its name away. The leader
        then ends the attempt for all. A later call is not mistaken for it: it has another name.
Rule 4: the leader decides, once every rank has reported, and all ranks hear the same.
Rule 5: the leader goes last, since the store may live in its process: it waits until the others
        have heard that the save was good. One that died after its report is not waited for long.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from .._errors import CommError
from ..comm._peer_messages import MessageStore

_PAUSES_S = (0.0005, 0.05)
_HEARD_WITHIN_S = 5.0

Notes = list[dict[str, Any]]

_spent: dict[str, dict[int, str]] = {}
"""By place and rank, the call that has last been in an attempt or dismissed."""


@dataclass
class StoreMeeting:
    """Through a store, with no collective.

    Args:
        store: shared by all ranks.
        place: the same for all ranks that meet, and for no others.
        ranks: names of all members, the leader's first.
        member: this rank's position among them.
        timeout_s: how long to wait for others.
    """

    store: MessageStore
    place: str
    ranks: Sequence[str]
    member: int
    timeout_s: float
    attempt: str = ""
    _call: str = ""
    _calls: dict[int, str] = field(default_factory=dict)

    def join(
        self,
        note: dict[str, Any],
        *,
        behind: Callable[[Notes], set[int]],
        prepare: Callable[[], None],
    ) -> str:
        """As the protocol has it."""
        self._call = uuid.uuid4().hex
        self._set(f"call/{self.member}", {"call": self._call, **note})
        self.attempt = self._lead(behind, prepare) if self.member == 0 else self._follow()
        return self.attempt

    def _lead(self, behind: Callable[[Notes], set[int]], prepare: Callable[[], None]) -> str:
        spent = _spent.setdefault(self.place, {})
        notes: dict[int, dict[str, Any]] = {}

        def all_here() -> bool:
            self._look(notes, set(range(len(self.ranks))) - set(notes), spent)
            if len(notes) == len(self.ranks):
                self._look(notes, set(notes), spent)  # a rank may have left since
            if len(notes) < len(self.ranks):
                return False
            dismissed = behind([notes[member] for member in sorted(notes)])
            for member in dismissed:
                spent[member] = notes.pop(member)["call"]
                self._set(f"dismissed/{member}", {"call": spent[member]})
            return not dismissed or 0 in dismissed

        self._wait(all_here, lambda: set(range(len(self.ranks))) - set(notes))
        if len(notes) < len(self.ranks):
            return ""
        prepare()
        self._forget_last()
        self._calls = {member: note["call"] for member, note in notes.items()}
        spent.update(self._calls)
        attempt = uuid.uuid4().hex[:12]
        self._set("start", {"attempt": attempt, "calls": list(self._calls.values())})
        return attempt

    def _look(
        self, notes: dict[int, dict[str, Any]], members: set[int], spent: dict[int, str]
    ) -> None:
        """Note the calls that these members are in."""
        for member in members:
            notes.pop(member, None)
            note = self._get(f"call/{member}")
            if note is not None and note["call"] != spent.get(member):
                notes[member] = note

    def _forget_last(self) -> None:
        last = self._get("start")
        keys = [f"report/{member}" for member in range(len(self.ranks))]
        for key in ["verdict", *keys] if last else []:
            with suppress(RuntimeError, NotImplementedError):  # some stores keep what they have
                self.store.delete_key(self._key(f"{last['attempt']}/{key}"))

    def _follow(self) -> str:
        found: list[str] = []

        def answered() -> bool:
            start, dismissed = self._get("start"), self._get(f"dismissed/{self.member}")
            if start is not None and self._call in start["calls"]:
                found.append(start["attempt"])
                self._calls[0] = start["calls"][0]
            elif dismissed is not None and dismissed["call"] == self._call:
                found.append("")
            return bool(found)

        self._wait(answered, self._absent)
        return found[0]

    def _absent(self) -> set[int]:
        """Members that are in no call; the leader, if all are."""
        members = range(len(self.ranks))
        return {m for m in members if m != self.member and not self._get(f"call/{m}")} or {0}

    def settle(self, report: dict[str, Any], decide: Callable[[Notes], str]) -> str:
        """As the protocol has it."""
        self._set(f"{self.attempt}/report/{self.member}", report)
        if self.member == 0:
            diagnosis = self._decide(decide)
            self._set(f"{self.attempt}/verdict", {"verdict": diagnosis})
            if not diagnosis:
                self._wait_until_heard()
            return diagnosis
        found: list[str] = []

        def decided() -> bool:
            left = self._has_left(0)
            diagnosis = self._get(f"{self.attempt}/verdict")
            if diagnosis is not None:
                found.append(diagnosis["verdict"])
            elif left:
                raise self._error({0}, "has left the save before it was decided")
            return bool(found)

        self._wait(decided, lambda: {0})
        return found[0]

    def _decide(self, decide: Callable[[Notes], str]) -> str:
        reports: dict[int, dict[str, Any]] = {}

        def all_reported() -> bool:
            for member in set(range(len(self.ranks))) - set(reports):
                left = self._has_left(member)
                report = self._get(f"{self.attempt}/report/{member}")
                if report is not None:
                    reports[member] = report
                elif left:
                    raise self._error({member}, "has left the save")
            failed = any(report.get("error") for report in reports.values())
            return failed or len(reports) == len(self.ranks)

        try:
            self._wait(all_reported, lambda: set(range(len(self.ranks))) - set(reports))
            gone = {member for member in reports if self._has_left(member)}
            if gone and not any(report.get("error") for report in reports.values()):
                raise self._error(gone, "has left the save")
        except CommError as error:
            return str(error)
        return decide([reports[member] for member in sorted(reports)])

    def _wait_until_heard(self) -> None:
        """Until the others have gone, or for a while (Rule 5)."""
        there = set(range(1, len(self.ranks)))

        def all_gone() -> bool:
            there.difference_update([member for member in there if self._has_left(member)])
            return not there

        with suppress(CommError):
            replace(self, timeout_s=min(self.timeout_s, _HEARD_WITHIN_S))._wait(all_gone, set)

    def _has_left(self, member: int) -> bool:
        note = self._get(f"call/{member}")
        return note is None or note["call"] != self._calls[member]

    def leave(self) -> None:
        """As the protocol has it."""
        with suppress(RuntimeError):
            self._set(f"call/{self.member}", None)

    def _wait(self, done: Callable[[], bool], missing: Callable[[], set[int]]) -> None:
        deadline = time.monotonic() + self.timeout_s
        pause, longest = _PAUSES_S
        try:
            while not done():
                if time.monotonic() > deadline:
                    raise self._error(missing(), f"did not answer within {self.timeout_s:g} s")
                time.sleep(pause)
                pause = min(2 * pause, longest)
        except RuntimeError as error:
            if isinstance(error, CommError):
                raise
            raise CommError(
                "flat_param.save_sharded: the process group's store does not answer, but ranks "
                "meet there. The process that started it is gone: restart from the checkpoint."
            ) from error

    def _error(self, members: set[int], what: str) -> CommError:
        names = ", ".join(self.ranks[member] for member in sorted(members))
        return CommError(
            f"flat_param.save_sharded: rank {names} {what}, but every rank must call save_sharded "
            "after the same step. Call it on all ranks, again on all after an error."
        )

    def _key(self, name: str) -> str:
        return f"flat_param/save/{self.place}/{name}"

    def _set(self, name: str, value: Any) -> None:
        self.store.set(self._key(name), json.dumps(value))

    def _get(self, name: str) -> Any:
        key = self._key(name)
        return json.loads(self.store.get(key)) if self.store.check([key]) else None
