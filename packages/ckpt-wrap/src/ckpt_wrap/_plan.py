"""Decide first which modules are changed and how, look at it, then do it.

A `Plan` holds names and options, no module: it can be printed, compared between ranks by its
digest, and applied to any model with these names.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from torch import nn
from torch.nn.parameter import is_lazy

from ckpt_wrap._errors import (
    OptionError,
    PolicyError,
    about,
    describe,
    require_forward,
    require_module,
    takes,
)
from ckpt_wrap._in_place import Action, become, planned, require_changeable, set_name
from ckpt_wrap._wrapper import ActivationWrapper, innermost

Rule = Callable[[str, nn.Module], bool | Mapping[str, Any] | None]


@dataclass(frozen=True, slots=True)
class Step:
    """One change of one module.

    Args:
        name: of the module, fully qualified; the first name if it is shared.
        class_name: of the module.
        numel: elements of its parameters, including those of its submodules.
        action: "checkpoint" or "offload".
        options: given to `checkpoint_` or `offload_`.
    """

    name: str
    class_name: str
    numel: int
    action: Action
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """Which modules are changed in place, and how. Prints as a table.

    Args:
        steps: in the order of the model.
    """

    steps: tuple[Step, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Name of each module, in the order of the model."""
        return tuple(dict.fromkeys(step.name for step in self.steps))

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that are equal on two ranks if their plans are."""
        text = [(s.name, s.class_name, s.numel, s.action, _show(s.options)) for s in self.steps]
        return hashlib.sha256(repr(text).encode()).hexdigest()[:16]

    def apply(self, model: nn.Module) -> nn.Module:
        """Change the planned modules of `model` in place; a second call changes nothing.

        Raises:
            PolicyError: the model has no module of a planned name; nothing is changed.
            ModuleError: the class of a planned module cannot be changed; nothing is changed.
            OffloadError: a folder cannot be made or written to; nothing is changed.
        """
        require_module(model, "Plan.apply")
        found = [(step, _find(model, step.name)) for step in self.steps]
        for step, module in found:
            require_changeable(module, "Plan.apply", step.name)
        changes = [(step, module, _change(step, module)) for step, module in found]
        for step, module, change in changes:
            become(module, **change)
            set_name(module, step.name)
        return model

    def __str__(self) -> str:
        rows = [("action", "modules", "class", "count", "parameters", "options")]
        for key, group in itertools.groupby(self.steps, _group_key):
            steps = list(group)
            numel = sum(step.numel for step in steps)
            names = _names(steps)
            rows.append((key[0], names, key[2], str(len(steps)), f"{numel:,}", key[4]))
        widths = [max(len(row[column]) for row in rows) for column in range(6)]
        lines = []
        for action, names, kind, count, numel_text, options in rows:
            left = f"{action:<{widths[0]}}  {names:<{widths[1]}}  {kind:<{widths[2]}}"
            right = f"{count:>{widths[3]}}  {numel_text:>{widths[4]}}  {options}"
            lines.append(f"{left}  {right}".rstrip())
        return "\n".join(lines)


def make_plan(
    model: nn.Module, rule: Rule, *, action: Action = "checkpoint", **options: Any
) -> Plan:
    """Decide which modules of a model to checkpoint or offload, without changing any.

    Args:
        model: the model to plan for.
        rule: called as `rule(name, module)` for each module below the model, wrappers left out.
            It returns True, False, or options for this module.
        action: `"checkpoint"` or `"offload"`.
        **options: options for every selected module; those of the rule are added to them.

    Raises:
        ModuleError: `model` is not an `nn.Module`, or the rule selects a module without a forward,
            such as `nn.ModuleList`.
        OptionError: an unknown action, or an option that cannot work.
        PolicyError: the rule is not a function, returns something else, or selects nothing.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        >>> plan = make_plan(model, lambda name, module: isinstance(module, nn.Linear))
        >>> print(plan)
        action      modules  class   count  parameters  options
        checkpoint  0, 2     Linear      2          12
        >>> plan.apply(model) is model
        True
    """
    require_module(model, "make_plan")
    if action not in get_args(Action):
        raise OptionError(
            f"ckpt_wrap.make_plan: action is {action!r}, but it must be 'checkpoint' or "
            "'offload'. Pass one of them."
        )
    _require_rule(rule, model)
    steps = []
    for name, module in below(model):
        chosen = rule(name, module)
        if chosen is not None and not isinstance(chosen, (bool, Mapping)):
            raise PolicyError(
                f"ckpt_wrap.make_plan: the rule returned {chosen!r} for module {name!r}, but it "
                "must return a bool or a mapping of options."
            )
        if chosen is not False and chosen is not None:
            own = {} if chosen is True else chosen
            steps.append(make_step(name, module, action, {**options, **own}))
    if not steps:
        found = dict.fromkeys(type(module).__name__ for _, module in below(model))
        raise PolicyError(
            f"ckpt_wrap.make_plan: the rule selects no module of {type(model).__name__}, but it "
            f"must select at least one. Classes of its modules: {', '.join(found) or 'none'}."
        )
    return Plan(tuple(steps))


def _require_rule(rule: object, model: nn.Module) -> None:
    if isinstance(rule, type) and issubclass(rule, nn.Module):
        advice = f"Pass lambda name, module: isinstance(module, {rule.__name__})."
    elif not callable(rule) or not takes(rule, "", model):
        advice = "Pass such a function."
    else:
        return
    raise PolicyError(
        f"ckpt_wrap.make_plan: rule is {rule!r}, but it must be a function of a name and a "
        f"module that returns a bool or options. {advice}"
    )


def make_step(name: str, module: nn.Module, action: Action, options: Mapping[str, Any]) -> Step:
    """A step, once its module and options are checked."""
    require_forward(module, "make_plan", name)
    step = Step(name, type(module).__name__, count_elements(module), action, dict(options))
    _change(step, module, check_only=True)
    return step


def count_elements(module: nn.Module) -> int:
    """Elements of a module's parameters; lazy ones have none yet."""
    return sum(p.numel() for p in module.parameters() if not is_lazy(p))


def below(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of every module below a model once, wrappers left out."""
    for name, module in model.named_modules():
        if innermost(model) is not module and not isinstance(module, ActivationWrapper):
            yield name, module


def _change(step: Step, module: nn.Module, *, check_only: bool = False) -> dict[str, Any]:
    with about(f"module {describe(module, step.name)}"):
        return planned(step.action, step.options, check_only=check_only)


def _find(model: nn.Module, name: str) -> nn.Module:
    try:
        module = model.get_submodule(name)
    except AttributeError:
        raise PolicyError(
            f"ckpt_wrap.Plan.apply: module {name!r} is missing in {type(model).__name__}, but "
            "every planned module must be there. Make the plan from this model."
        ) from None
    return innermost(module)


def _group_key(step: Step) -> tuple[str, str, str, int, str]:
    parent = step.name.rpartition(".")[0]
    return step.action, parent, step.class_name, step.numel, _show(step.options)


def _names(steps: Sequence[Step]) -> str:
    names = [step.name for step in steps]
    return ", ".join(names if len(names) <= 4 else [*names[:2], "...", names[-1]])


def _show(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{k}={getattr(v, '__qualname__', v)}" for k, v in options.items())
