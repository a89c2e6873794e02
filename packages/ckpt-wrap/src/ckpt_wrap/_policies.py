"""Rules that say which modules of a model are meant, and with which options.

A policy sees all modules at once and answers with the options of those it selects, so that
policies form a set algebra: `a | b`, `a & b`, `~a`. Where both sides of `|` or `&` give an
option, the right one counts.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ckpt_wrap._errors import PolicyError
from ckpt_wrap._where import has_forward

Selection = dict[int, dict[str, Any]]  # options by position in the sequence of modules
Decision = bool | Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class ModuleInfo:
    """What a policy can see of one module.

    Args:
        name: fully qualified; the first name if the module is shared; `""` for the model.
        module: the module.
        depth: 0 for the model, 1 for its children, and so on.
        index: position among the children of its parent.
        numel: elements of its parameters, including those of its submodules.
        aliases: the other names of a shared module.
    """

    name: str
    module: nn.Module = field(repr=False)
    depth: int
    index: int
    numel: int
    aliases: tuple[str, ...] = ()


class Policy(ABC):
    """A rule that selects modules; combine with `|`, `&` and `~`.

    `~` leaves out containers without a forward, such as `nn.ModuleList`.
    """

    @abstractmethod
    def select(self, modules: Sequence[ModuleInfo]) -> Selection:
        """Options of the selected modules, by position in `modules`."""

    def wishes(self) -> tuple[str, ...]:
        """Names or classes this policy looks for, used to suggest others when it finds none."""
        return ()

    def __or__(self, other: Policy) -> Policy:
        return _Either(self, _require_policy(other, "Policy"))

    def __and__(self, other: Policy) -> Policy:
        return _Both(self, _require_policy(other, "Policy"))

    def __invert__(self) -> Policy:
        return _Not(self)


@dataclass(frozen=True)
class _Where(Policy):
    function: Callable[[ModuleInfo], Decision]
    sought: tuple[str, ...] = ()

    def select(self, modules: Sequence[ModuleInfo]) -> Selection:
        decisions = {i: self.function(info) for i, info in enumerate(modules)}
        return {i: _options(d) for i, d in decisions.items() if d is True or isinstance(d, Mapping)}

    def wishes(self) -> tuple[str, ...]:
        return self.sought


@dataclass(frozen=True)
class _Either(Policy):
    left: Policy
    right: Policy

    def select(self, modules: Sequence[ModuleInfo]) -> Selection:
        left, right = self.left.select(modules), self.right.select(modules)
        return {i: {**left.get(i, {}), **right.get(i, {})} for i in sorted({*left, *right})}

    def wishes(self) -> tuple[str, ...]:
        return self.left.wishes() + self.right.wishes()


@dataclass(frozen=True)
class _Both(Policy):
    left: Policy
    right: Policy

    def select(self, modules: Sequence[ModuleInfo]) -> Selection:
        left, right = self.left.select(modules), self.right.select(modules)
        return {i: {**left[i], **right[i]} for i in left if i in right}

    def wishes(self) -> tuple[str, ...]:
        return self.left.wishes() + self.right.wishes()


@dataclass(frozen=True)
class _Not(Policy):
    inner: Policy

    def select(self, modules: Sequence[ModuleInfo]) -> Selection:
        selected = self.inner.select(modules)
        rest = (i for i in range(len(modules)) if i not in selected)
        return {i: {} for i in rest if has_forward(modules[i].module)}


@dataclass(frozen=True)
class _EveryNth(Policy):
    n: int
    of: Policy
    start: int

    def select(self, modules: Sequence[ModuleInfo]) -> Selection:
        selected = self.of.select(modules)
        return {i: selected[i] for i in sorted(selected)[self.start :: self.n]}

    def wishes(self) -> tuple[str, ...]:
        return self.of.wishes()


def by_class(*classes: type[nn.Module]) -> Policy:
    """Modules that are instances of one of these classes.

    Raises:
        PolicyError: no class, or something that is not a module class.

    Example:
        >>> by_class(nn.Linear, nn.Conv2d).wishes()
        ('Linear', 'Conv2d')
    """
    for kind in classes or (None,):
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise PolicyError(
                f"ckpt_wrap.by_class: class {kind!r}, but it must be a subclass of nn.Module. "
                "Pass one or more module classes."
            )
    return _Where(lambda m: isinstance(m.module, classes), tuple(c.__name__ for c in classes))


def by_name(*patterns: str) -> Policy:
    """Modules with a name that matches one of these globs, such as `"layers.*.mlp"`.

    `*` matches any characters, dots included.

    Raises:
        PolicyError: no pattern, or something that is not a string.

    Example:
        >>> by_name("layers.*", "head").wishes()
        ('layers.*', 'head')
    """
    for pattern in patterns or (None,):
        if not isinstance(pattern, str):
            raise PolicyError(
                f"ckpt_wrap.by_name: pattern {pattern!r}, but it must be a string. "
                "Pass one or more globs of module names."
            )

    def matches(info: ModuleInfo) -> bool:
        return any(fnmatchcase(n, p) for n in (info.name, *info.aliases) for p in patterns)

    return _Where(matches, patterns)


def by_size(*, at_least: int = 0, at_most: int | None = None) -> Policy:
    """Modules with this many parameter elements, including those of submodules.

    Containers without a forward, such as `nn.ModuleList`, are left out.

    Raises:
        PolicyError: `at_least` is negative or above `at_most`.

    Example:
        >>> policy = by_size(at_least=1000)
    """
    if not isinstance(at_least, int) or not isinstance(at_most, int | None):
        raise PolicyError(
            f"ckpt_wrap.by_size: range {at_least!r} to {at_most!r}, but both must be numbers of "
            "elements. Pass integers."
        )
    if at_least < 0 or (at_most is not None and at_most < at_least):
        raise PolicyError(
            f"ckpt_wrap.by_size: range {at_least} to {at_most}, but it must start at 0 or above "
            "and not end before it starts. Swap or drop a bound."
        )

    def matches(info: ModuleInfo) -> bool:
        fits = at_least <= info.numel and (at_most is None or info.numel <= at_most)
        return fits and has_forward(info.module)

    return _Where(matches)


def every_nth(n: int, of: Policy, *, start: int = 0) -> Policy:
    """Of the modules another policy selects, every n-th in the order of the model.

    Raises:
        PolicyError: `n` is below 1 or `start` is negative.

    Example:
        >>> policy = every_nth(2, of=by_class(nn.Linear))
    """
    if not isinstance(n, int) or not isinstance(start, int) or n < 1 or start < 0:
        raise PolicyError(
            f"ckpt_wrap.every_nth: n is {n!r} and start is {start!r}, but n must be at least 1 and "
            "start at least 0. Pass such numbers."
        )
    return _EveryNth(n, _require_policy(of, "every_nth"), start)


def _require_policy(value: object, function: str) -> Policy:
    if isinstance(value, Policy):
        return value
    raise PolicyError(
        f"ckpt_wrap.{function}: policy {value!r}, but only policies of this package can be "
        "combined. Wrap a function in by_function; give torch's policies to make_plan alone."
    )


def by_function(function: Callable[[ModuleInfo], Decision]) -> Policy:
    """Modules for which the function returns True, or the options to use for that module.

    Raises:
        PolicyError: it does not take one argument; when selecting, if it returns anything but a
            bool, a mapping or None.

    Example:
        >>> policy = by_function(lambda info: info.depth == 1 and {"early_stop": False})
    """
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise PolicyError(
            f"ckpt_wrap.by_function: function {function!r} cannot be called with one argument "
            f"({error}), but it is given a ModuleInfo. Pass a function of one argument."
        ) from None
    except ValueError:  # some built-in functions have no signature
        pass
    return _Where(lambda info: _checked(function(info), info))


def _checked(decision: Decision, info: ModuleInfo) -> Decision:
    if decision is None or isinstance(decision, (bool, Mapping)):
        return decision
    raise PolicyError(
        f"ckpt_wrap.by_function: decision for module {info.name!r} is {decision!r}, but it must "
        "be a bool, a mapping of options or None. Return one of them."
    )


def _options(decision: Decision) -> dict[str, Any]:
    return dict(decision) if isinstance(decision, Mapping) else {}
