"""The objects among the arguments of a call, given to its second run as they were.

An object here is a container or an instance that can change and is passed by reference: a cache
that a forward appends to, a record it writes to, a random generator it draws from.

Rule 1. What the first run, or anyone since, put into an object or took out of it, the second run
        does not see: it is given a copy of each object that changed, as it was before the first
        run, and of each object that leads there. The copies go when it ends, so what it does to
        them in turn reaches nobody.
Rule 2. An object that has not changed is passed as it is.
Rule 3. A tensor in an object that was changed in place cannot be had again: the call is refused
        as soon as its forward has done so, or in backward where it was done since.
Rule 4. What an object holds stays alive as long as backward may need it, but for one thing: what
        another checkpointed call has put into some other object beside the one that changed, as
        the layers of a model do that share a cache. That is the caller's to keep.
Rule 5. A call that puts tensors with gradients into an object keeps what checkpointing was to
        free, for as long as the caller keeps the object: said once for each class of object.

Followed are tuples, lists, deques, dicts, sets, and instances of classes written in Python, by
way of their items and attributes, `DEPTH` steps and `LIMIT` objects far. Not followed are modules
and instances of classes of torch and the standard library; of those, random generators are had
again. Nothing is followed, and nothing costs anything, where the arguments are tensors and
containers of tensors.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ckpt_wrap._torch_compat import version_of
from ckpt_wrap._where import Where
from ckpt_wrap.checkpointing._object_state import State, same_state, state_of
from ckpt_wrap.checkpointing._object_tensors import Leaf, Refused, is_put_there, note_put_there

DEPTH = 8
LIMIT = 4096


class Snapshot:
    """Objects that can be reached from `roots`, and what they hold now."""

    def __init__(self, roots: list[Any]) -> None:
        self.roots = roots
        self.states: dict[int, State] = {}
        self.tensors: dict[int, tuple[torch.Tensor, int]] = {}
        self._found: dict[int, tuple[int, str]] = {}  # from which object, and how
        self._classes = {id(root): type(root).__name__ for root in roots}
        self._walk()

    def _walk(self) -> None:
        level = [(0, "", root) for root in self.roots]
        for _ in range(DEPTH):
            below: list[tuple[int, str, Any]] = []
            for parent, how, value in level:
                below.extend(self._visit(parent, how, value))
            level = below

    def _visit(self, parent: int, how: str, value: Any) -> Iterator[tuple[int, str, Any]]:
        key = id(value)
        if isinstance(value, torch.Tensor):
            if key not in self.tensors:
                self.tensors[key] = (value, version_of(value))
                self._found[key] = (parent, how)
            return
        if key in self.states or len(self.states) >= LIMIT:
            return
        state = state_of(value)
        if state is None:
            return
        self.states[key] = state
        self._found[key] = (parent, how)
        for how_part, part in state.parts():
            yield key, how_part, part

    def name(self, key: int, noun: str) -> str:
        """Where an object or tensor stands, from the argument down, for messages.

        For example "tensor '.layers[0].keys' of the argument of class Cache".
        """
        path, (parent, how) = "", self._found[key]
        while parent:
            path, key = how + path, parent
            parent, how = self._found[key]
        return f"{noun} {path!r} of the argument of class {self._classes[key]}"

    def without(self, keys: set[int]) -> Snapshot:
        """The objects that are not among `keys`, and the tensors that these hold."""
        rest = Snapshot([])
        rest.states = {key: state for key, state in self.states.items() if key not in keys}
        held = {id(part) for state in rest.states.values() for _, part in state.parts()}
        rest.tensors = {key: tensor for key, tensor in self.tensors.items() if key in held}
        rest._found, rest._classes = self._found, self._classes
        return rest

    def changed(self) -> set[int]:
        """Objects that hold something else by now."""
        return {key for key, state in self.states.items() if not same_state(state)}

    def changed_in_place(self) -> int | None:
        """A tensor that was changed in place since, if any."""
        for key, (tensor, version) in self.tensors.items():
            if version_of(tensor) != version:
                return key
        return None


class Objects:
    """The objects among the arguments of one call."""

    def __init__(self) -> None:
        self._roots: list[Any] = []
        self._before: Snapshot | None = None
        self._again: Recipe | None = None

    def refer(self, value: Any) -> int:
        """Note an object; its place in `values()`."""
        for index, root in enumerate(self._roots):
            if root is value:
                return index
        self._roots.append(value)
        return len(self._roots) - 1

    def begin(self) -> list[torch.Tensor]:
        """Note what the objects hold before the first run; the tensors among it."""
        if not self._roots:
            return []
        self._before = Snapshot(self._roots)
        return [tensor for tensor, _ in self._before.tensors.values()]

    def settle(self) -> str:
        """After the first run: keep what the second one needs, see Rules 1 and 4.

        Returns:
            What is to be warned of, see Rule 5; mostly nothing.

        Raises:
            Refused: see Rule 3.
        """
        before = self._before
        if before is None:
            return ""
        _require_unchanged_tensors(before, "by its forward", "Replace it by a new one instead")
        changed = before.changed()
        if not changed:
            return ""
        self._again = Recipe(before, changed)
        after, grown = Snapshot(self._roots), ""
        for key, (tensor, _) in after.tensors.items():
            if key not in before.tensors:
                note_put_there(tensor)
                if tensor.requires_grad and not grown:
                    grown = after.name(key, "tensor")
        self._roots, self._before = [], None
        return grown

    def live(self) -> list[Any]:
        """The objects themselves, for the first run."""
        return self._roots

    def values(self) -> list[Any]:
        """The objects for one second run.

        Raises:
            Refused: see Rule 3.
        """
        if self._again is not None:
            return self._again.make()
        before = self._before
        if before is None:
            return self._roots
        _require_unchanged_tensors(before, *_SINCE)
        changed = before.changed()
        return Recipe(before, changed).make() if changed else self._roots


_warned: set[str] = set()  # classes of arguments, see Rule 5


def warn_of_grown(grown: str, where: Where) -> None:
    """Warn of what `settle` has returned, once for each class of argument.

    Warns:
        UserWarning: a cache, or another object among the arguments, keeps what the region made.
    """
    kind = grown.rpartition(" ")[2]
    if not grown or kind in _warned:
        return
    _warned.add(kind)
    warnings.warn(
        f"ckpt_wrap.{where.made_by}: module {where} puts a tensor that requires grad into an "
        f"argument, {grown}, but what is in an argument is not freed for recomputation: it stays "
        "in memory as long as the argument does. Pass use_cache=False to a transformers model, "
        "or no cache, in training.",
        stacklevel=2,
    )


_SINCE = "since the forward", "Change a clone of it instead"


def _require_unchanged_tensors(before: Snapshot, when: str, advice: str) -> None:
    key = before.changed_in_place()
    if key is not None:
        raise Refused(
            before.name(key, "tensor"),
            f"was changed in place {when}, but recomputation needs it as it was. {advice}, or "
            "leave this module out of checkpointing.",
        )


class Recipe:
    """How to make the objects again that changed, and those that lead there.

    The others may change as well until the second run, see Rule 1.
    """

    def __init__(self, before: Snapshot, changed: set[int]) -> None:
        wanted = _with_parents(before, changed | _holding_others(before))
        leaves: dict[tuple[int, bool], Leaf] = {}

        def encode(holder: int, part: Any) -> Any:
            key = id(part)
            if isinstance(part, torch.Tensor):
                keep = holder in changed or not is_put_there(part)
                if (key, keep) not in leaves:
                    leaves[key, keep] = Leaf(part, before.name(key, "tensor"), keep=keep)
                return leaves[key, keep]
            return ObjectKey(key) if key in before.states else part

        self._states = _mapped(before, wanted, encode)
        self._others = before.without(wanted)
        self._roots = [encode(0, root) for root in before.roots]

    def make(self) -> list[Any]:
        """New objects, holding what those they stand for held.

        Raises:
            Refused: see Rule 3.
        """
        others = self._others
        _require_unchanged_tensors(others, *_SINCE)
        late = _with_parents(others, others.changed())

        def encode(_: int, part: Any) -> Any:
            return ObjectKey(id(part)) if id(part) in late else part

        states = self._states | _mapped(others, late, encode)
        made = {k: s.blank() for k, s in states.items() if not s.is_tuple}

        def decode(part: Any) -> Any:
            if isinstance(part, Leaf):
                return part.get()
            if not isinstance(part, ObjectKey):
                return part
            if part.key not in states:
                return others.states[part.key].value
            if part.key not in made:
                made[part.key] = states[part.key].tuple_of(decode)
            return made[part.key]

        for key, state in states.items():
            if not state.is_tuple:
                state.fill(made[key], decode)
        return [decode(root) for root in self._roots]


def _mapped(
    snapshot: Snapshot, keys: set[int], encode: Callable[[int, Any], Any]
) -> dict[int, State]:
    """The states of objects to make again, with what each holds encoded.

    Raises:
        Refused: no new object of its class can be made.
    """
    found = {}
    for key in keys:
        state = snapshot.states[key]
        if not state.can_be_made():
            raise Refused(
                snapshot.name(key, "object"),
                "was changed and must be copied as it was before forward, but its class "
                f"{state.kind.__name__} makes no new ones. Give it a __new__ that needs no "
                "arguments, or leave this module out of checkpointing.",
            )
        found[key] = state.mapped(functools.partial(encode, key))
    return found


def _with_parents(before: Snapshot, keys: set[int]) -> set[int]:
    """The objects, and all through which they are reached."""
    parents: dict[int, list[int]] = {}
    for key, state in before.states.items():
        for _, part in state.parts():
            parents.setdefault(id(part), []).append(key)
    wanted, new = set(keys), list(keys)
    while new:
        for parent in parents.get(new.pop(), ()):
            if parent not in wanted:
                wanted.add(parent)
                new.append(parent)
    return wanted


def _holding_others(before: Snapshot) -> set[int]:
    """The objects that hold what another checkpointed call put there: Rule 4."""
    return {
        key
        for key, state in before.states.items()
        if any(isinstance(p, torch.Tensor) and is_put_there(p) for _, p in state.parts())
    }


class ObjectKey:
    """Stands for an object that is made again."""

    __slots__ = ("key",)

    def __init__(self, key: int) -> None:
        self.key = key
