"""Decide first which modules are changed and how, look at it, then do it.

A `Plan` holds names and options, no module: it can be printed, compared between ranks by its
digest, and applied to any model with these names.
"""

from __future__ import annotations

import difflib
import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from torch import nn

from ckpt_wrap._apply import count_elements, select_bottom_up
from ckpt_wrap._errors import OptionError, PolicyError, about
from ckpt_wrap._policies import ModuleInfo, Policy, Selection, by_function
from ckpt_wrap._torch_compat import is_torch_policy, run_torch_policy
from ckpt_wrap._where import describe
from ckpt_wrap.checkpointing._checkpoint_fn import make_checkpoint_fn
from ckpt_wrap.checkpointing._options import require_module
from ckpt_wrap.modules._in_place import (
    Action,
    Behaviour,
    become,
    planned,
    tell_name,
)
from ckpt_wrap.modules._inner_state import innermost
from ckpt_wrap.modules._subclass import require_changeable, require_forward
from ckpt_wrap.modules._wrapper import ActivationWrapper
from ckpt_wrap.offload._offload_options import offload_options


@dataclass(frozen=True, slots=True)
class Step:
    """One module of a plan.

    Args:
        name: fully qualified; the first name if the module is shared.
        aliases: the other names of a shared module.
        class_name: of the module.
        numel: elements of its parameters, including those of its submodules.
        options: given to `checkpoint_` or `offload_`.
    """

    name: str
    aliases: tuple[str, ...]
    class_name: str
    numel: int
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """Which modules are changed in place, and how. Prints as a table.

    Args:
        action: what to do to them, "checkpoint" or "offload".
        steps: one for each module, in the order of the model.
    """

    action: Action
    steps: tuple[Step, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Name of each module, in the order of the model."""
        return tuple(step.name for step in self.steps)

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that are equal on two ranks if their plans are."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:16]

    def apply(self, model: nn.Module) -> nn.Module:
        """Change the planned modules of `model` in place; a second call changes nothing.

        Raises:
            PolicyError: the model has no module of a planned name; nothing is changed.
            ModuleError: the class of a planned module cannot be changed; nothing is changed.
            OffloadError: a folder cannot be made or written to; nothing is changed.
        """
        require_module(model, "Plan.apply")
        planned_modules = [(step, _find(model, step.name)) for step in self.steps]
        for step, module in planned_modules:
            require_changeable(module, "Plan.apply", step.name)
        changes = [
            (step, module, _change(module, step, self.action)) for step, module in planned_modules
        ]
        for step, module, change in changes:
            tell_name(become(module, change), step.name)
        return model

    def __str__(self) -> str:
        rows = [(_label(s), s.class_name, f"{s.numel:,}", _show(s.options)) for s in self.steps]
        total = f"{sum(step.numel for step in self.steps):,}"
        return _table(
            [
                (self.action, "class", "parameters", "options"),
                *rows,
                (f"{len(rows)} modules", "", total, ""),
            ]
        )


def make_plan(
    model: nn.Module,
    policy: Any,
    *,
    action: Action = "checkpoint",
    include_root: bool = False,
    **options: Any,
) -> Plan:
    """Decide which modules of a model to checkpoint or offload, without changing any.

    Args:
        model: the model to plan for.
        policy: a `Policy`, a function of `ModuleInfo`, or one of torch's wrap policies.
        action: `"checkpoint"` or `"offload"`.
        include_root: whether the model itself may be selected.
        **options: options for every selected module; options from the policy are added to them.

    Raises:
        ModuleError: `model` is not an `nn.Module`, or the policy selects a module without a
            forward, such as `nn.ModuleList`.
        OptionError: an unknown action, or an option that cannot work.
        PolicyError: not a policy, or one that selects nothing; lists close matches.

    Example:
        >>> from ckpt_wrap import by_class
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        >>> plan = make_plan(model, by_class(nn.Linear))
        >>> print(plan)
        checkpoint  class   parameters  options
        0           Linear           6
        2           Linear           6
        2 modules                   12
        >>> plan.apply(model) is model
        True
    """
    require_module(model, "make_plan")
    _require_action(action)
    modules = look(model)[0 if include_root else 1 :]
    chosen = as_policy(policy, model)
    selection = chosen.select(modules)
    if not selection:
        raise PolicyError(_nothing_selected(chosen, modules, model))
    steps = [_step(modules[i], {**options, **selection[i]}, action) for i in sorted(selection)]
    return Plan(action, tuple(steps))


def look(model: nn.Module) -> list[ModuleInfo]:
    """Every module of the model once, wrappers left out, the model itself first."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    index: dict[nn.Module, int] = {}
    for parent in names:
        for position, child in enumerate(parent.children()):
            index.setdefault(child, position)
    return [
        ModuleInfo(
            name=first,
            module=module,
            depth=first.count(".") + 1 if first else 0,
            index=index.get(module, 0),
            numel=count_elements(module),
            aliases=tuple(dict.fromkeys(others)),
        )
        for module, (first, *others) in names.items()
        if not isinstance(module, ActivationWrapper)
    ]


class _TorchPolicy(Policy):
    """A policy of torch's, or a function with the parameters torch calls policies with."""

    def __init__(self, policy: Any, model: nn.Module) -> None:
        self._policy = policy
        self._model = model

    def select(self, modules: Sequence[ModuleInfo]) -> Selection:
        run = run_torch_policy if is_torch_policy(self._policy) else _run_function
        targets = run(self._policy, self._model)
        return {i: targets[m.module] for i, m in enumerate(modules) if m.module in targets}


def _run_function(policy: Any, model: nn.Module) -> dict[nn.Module, dict[str, Any]]:
    return select_bottom_up(model, policy)


def as_policy(policy: Any, model: nn.Module) -> Policy:
    """The policy, whatever form it was given in.

    Raises:
        PolicyError: none of the forms.
    """
    if isinstance(policy, Policy):
        return policy
    if is_torch_policy(policy) or (callable(policy) and _called_by_torch(policy)):
        return _TorchPolicy(policy, model)
    if callable(policy) and not isinstance(policy, type):
        return by_function(policy)
    raise PolicyError(
        f"ckpt_wrap.make_plan: policy {policy!r}, but it must be a Policy, a function or one of "
        "torch's wrap policies. Pass by_class(...), by_name(...) or the like."
    )


def _called_by_torch(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return anything or {"module", "recurse", "nonwrapped_numel"} <= set(parameters)


def _require_action(action: str) -> None:
    if action not in get_args(Action):
        raise OptionError(
            f"ckpt_wrap.make_plan: action is {action!r}, but it must be 'checkpoint' or "
            "'offload'. Pass one of them."
        )


def _step(info: ModuleInfo, options: dict[str, Any], action: Action) -> Step:
    require_forward(info.module, "make_plan", info.name)
    with about(f"module {describe(info.module, info.name)}"):
        _check_options(options, action)
    return Step(info.name, info.aliases, type(info.module).__name__, info.numel, options)


def _check_options(options: Mapping[str, Any], action: Action) -> None:
    if action == "checkpoint":
        make_checkpoint_fn("checkpoint_", **options)
        return
    try:
        offload_options(**options)
    except TypeError as error:  # an unknown name
        raise OptionError(f"ckpt_wrap.make_plan: {error}. Pass options of offload_.") from None


def _change(module: nn.Module, step: Step, action: Action) -> Behaviour:
    with about(f"module {describe(module, step.name)}"):
        return planned(module, action, step.options)


def _find(model: nn.Module, name: str) -> nn.Module:
    try:
        module = model.get_submodule(name)
    except AttributeError:
        raise PolicyError(
            f"ckpt_wrap.Plan.apply: module {name!r} is missing in {type(model).__name__}, but "
            "every planned module must be there. Make the plan from this model."
        ) from None
    return innermost(module)


def _nothing_selected(policy: Policy, modules: Sequence[ModuleInfo], model: nn.Module) -> str:
    candidates = list(dict.fromkeys(t for m in modules for t in (m.name, type(m.module).__name__)))
    close = [
        match
        for wish in policy.wishes()
        for match in difflib.get_close_matches(wish, candidates, n=3, cutoff=0.4)
    ]
    shown = ", ".join(repr(c) for c in dict.fromkeys(close or candidates[:5])) or "none"
    return (
        f"ckpt_wrap.make_plan: policy {_wanted(policy)}selects no module of "
        f"{type(model).__name__}, but it must select at least one. Closest candidates: {shown}."
    )


def _wanted(policy: Policy) -> str:
    wishes = policy.wishes()
    return f"for {', '.join(map(repr, wishes))} " if wishes else ""


def _label(step: Step) -> str:
    name = step.name or "(model)"
    return f"{name} = {', '.join(step.aliases)}" if step.aliases else name


def _show(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{k}={getattr(v, '__qualname__', v)}" for k, v in options.items())


def _table(rows: Sequence[tuple[str, str, str, str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = (
        f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}  {d}".rstrip() for a, b, c, d in rows
    )
    return "\n".join(lines)
