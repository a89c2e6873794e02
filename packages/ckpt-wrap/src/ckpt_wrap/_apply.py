"""The drop-in way to wrap the modules of a model."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from ckpt_wrap._errors import ModuleError, PolicyError, about, describe, require_module
from ckpt_wrap._in_place import set_name
from ckpt_wrap._torch_compat import edges, is_torch_policy, run_torch_policy
from ckpt_wrap._wrapper import ActivationWrapper, checkpoint_wrapper

Targets = dict[nn.Module, dict[str, Any]]


def _every_module(_: nn.Module) -> bool:
    return True


def apply_activation_checkpointing(
    model: nn.Module,
    checkpoint_wrapper_fn: Callable[..., nn.Module] = checkpoint_wrapper,
    check_fn: Callable[[nn.Module], bool] = _every_module,
    auto_wrap_policy: Any = None,
) -> None:
    """Wrap modules below `model`, in place.

    The model itself is never wrapped. A module found in several places is wrapped once, and all
    places get the same wrapper. A module that has this kind of wrapper already keeps it. All
    wrappers are made before the first one is set. For the repeated blocks of a model, without a
    wrapper around them, call `checkpoint_layers_`.

    Args:
        model: the model to change.
        checkpoint_wrapper_fn: makes the wrapper, called with the module, and with the options that
            torch's `CustomPolicy` returns for it. `checkpoint_` and `offload_` can be passed.
        check_fn: called with each module below the model; whether to wrap it. The default wraps
            every module, each layer in a separate region: pass a function that selects blocks.
        auto_wrap_policy: instead of `check_fn`: one of torch's policies, or a function called as
            `policy(module=..., recurse=..., nonwrapped_numel=...)`, with the number of elements of
            parameters that are not wrapped yet.

    Raises:
        ModuleError: `model`, or the result of `checkpoint_wrapper_fn`, is not an `nn.Module`.
        PolicyError: one of the other arguments is not what is described above.

    Warns:
        UserWarning: no module is selected, so nothing is wrapped.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, nn.Linear))
        >>> type(model[0]).__name__, type(model[1]).__name__
        ('CheckpointWrapper', 'ReLU')
    """
    require_module(model, "apply_activation_checkpointing")
    if not callable(check_fn) or isinstance(check_fn, type):
        raise PolicyError(
            f"ckpt_wrap.apply_activation_checkpointing: option 'check_fn' is {check_fn!r}, but it "
            "must be a function of a module. Pass such a function."
        )
    if not callable(checkpoint_wrapper_fn):
        raise PolicyError(
            "ckpt_wrap.apply_activation_checkpointing: option 'checkpoint_wrapper_fn' is "
            f"{checkpoint_wrapper_fn!r}, but it must be a function that wraps a module. Pass "
            "checkpoint_wrapper or offload_wrapper."
        )
    targets = _select(model, check_fn, auto_wrap_policy)
    names = {module: name for name, module in model.named_modules()}
    wrappers: dict[nn.Module, nn.Module] = {}
    for module, options in targets.items():
        with about(f"module {describe(module, names[module])}"):
            wrappers[module] = checkpoint_wrapper_fn(module, **options)
        if not isinstance(wrappers[module], nn.Module):
            raise ModuleError(
                "ckpt_wrap.apply_activation_checkpointing: option 'checkpoint_wrapper_fn' "
                f"returned {wrappers[module]!r} for module {names[module]!r}, but it must "
                "return an nn.Module. Return the wrapped module."
            )
    _replace(model, wrappers)
    for module, wrapper in wrappers.items():
        set_name(wrapper, names[module])
    if not targets:
        warnings.warn(
            "ckpt_wrap.apply_activation_checkpointing: no module below "
            f"{type(model).__name__} was selected, so nothing is wrapped.",
            stacklevel=2,
        )


def _select(model: nn.Module, check_fn: Callable[[nn.Module], bool], policy: Any) -> Targets:
    """Return the options of each module to wrap."""
    below = [m for m in model.modules() if m is not model and not isinstance(m, ActivationWrapper)]
    if policy is None:
        return {module: {} for module in below if check_fn(module)}
    if callable(policy):
        targets = _select_bottom_up(model, policy)
    elif is_torch_policy(policy):
        targets = run_torch_policy(policy, model)
    else:
        raise PolicyError(
            f"ckpt_wrap.apply_activation_checkpointing: Expected {policy} to be callable or be a "
            "pre-defined wrap policy. Pass a torch.distributed.fsdp.wrap policy or a function."
        )
    return {module: targets[module] for module in below if module in targets}


def _select_bottom_up(model: nn.Module, policy: Callable[..., bool]) -> Targets:
    """Call the policy on children before parents, with the count of elements not wrapped yet."""
    targets: Targets = {}
    wrapped_numel: dict[nn.Module, int] = {}

    def visit(module: nn.Module) -> int:
        if module not in wrapped_numel:
            numel = sum(p.numel() for p in module.parameters() if not is_lazy(p))
            wrapped_numel[module] = decide(module, numel)
        return wrapped_numel[module]

    def decide(module: nn.Module, numel: int) -> int:
        if not policy(module=module, recurse=True, nonwrapped_numel=numel):
            return 0
        wrapped = sum(visit(child) for child in module.children())
        if module is model or isinstance(module, ActivationWrapper):
            return wrapped
        if not policy(module=module, recurse=False, nonwrapped_numel=numel - wrapped):
            return wrapped
        targets[module] = {}
        return numel

    visit(model)
    return targets


def _replace(model: nn.Module, wrappers: dict[nn.Module, nn.Module]) -> None:
    """Put each wrapper in all places of its module, unless it has a wrapper of that kind."""
    around: dict[nn.Module, list[type]] = {}
    for wrapper in model.modules():
        if isinstance(wrapper, ActivationWrapper):
            for _, inner in edges(wrapper):
                around[inner] = [*around.get(wrapper, []), type(wrapper)]
    places = [
        (parent, name, wrappers[child])
        for parent in model.modules()
        for name, child in edges(parent)
        if child in wrappers and type(wrappers[child]) not in around.get(child, ())
    ]
    for parent, name, wrapper in places:
        setattr(parent, name, wrapper)
