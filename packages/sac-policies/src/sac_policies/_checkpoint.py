"""The public functions that run a region on the tape, or tag it in compiled code."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from ._errors import EngineError, PolicyError, shown
from ._torch_compat import in_func_transform, is_traced
from .compiled._tags import tags
from .eager import _tape as tape
from .policies._functions import PolicyLike, as_policy, is_selective, selective
from .policies._policies import Policy, behind

_OPTIONS = ("use_reentrant", "preserve_rng_state", "determinism_check", "early_stop", "debug")
CHECKS = ("default", "bits", "none")
"""When bits are compared: in the first step of each region, in each step, never."""

T = TypeVar("T")
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def checkpoint(
    function: Callable[..., T], *args: Any, policy: PolicyLike | None = None, **kwargs: Any
) -> T:
    """Call `function` so that backward uses the values that `policy` keeps and recomputes the rest.

    Has the signature and options of torch's checkpoint; always non-reentrant. In eager code
    `function` runs once: backward calls single operators again, and never Python code of
    `function`. Results that cannot be reproduced are kept: random numbers, results of in-place and
    unknown operators, integers. Compiled code is recomputed by the compiler; a compiled module
    inside an eager region runs again as a whole, as in torch's checkpoint, unless it wrote to
    something.

    Args:
        function: a module or any callable of tensors.
        args: its positional arguments.
        policy: what to keep: a policy, or a value that `as_policy` accepts. None runs torch's
            checkpoint, which keeps only the inputs and runs `function` twice.
        kwargs: torch's options and keyword arguments of `function`. `determinism_check` says when
            recomputed tensors are compared bit by bit with those of forward: "default" in the
            first step of each function under a policy, "bits" in each step, "none" never. Version
            counters are always compared. `preserve_rng_state`, `early_stop` and `debug` have no
            effect with a policy, since nothing runs twice.

    Returns:
        The result of `function`.

    Raises:
        PolicyError: `policy` is invalid, or names modules although `function` has none.
        EngineError: an option is refused, or a torch.func transform is active.
        UnmatchedNameError: nothing has a module path or name of the policy (raised by backward).
        RecomputeError: a recomputed tensor has other bits than in forward (raised by backward).
        MutationError: a saved value was changed in place (raised by backward).

    Example:
        >>> from sac_policies import save_ops
        >>> x = torch.ones(2, 2, requires_grad=True)
        >>> checkpoint(lambda a: (a @ a).sin(), x, policy=save_ops("aten.mm")).shape
        torch.Size([2, 2])
    """
    check_function(function, where="checkpoint")
    if policy is None:
        check_no_policy(args)
        kwargs.setdefault("use_reentrant", False)
        return torch_checkpoint(function, *args, **kwargs)
    if torch.compiler.is_compiling():
        return _run_traced(function, args, kwargs, _for_compiler(policy))
    if not isinstance(policy, Policy):
        policy = as_policy(policy)
    if kwargs or in_func_transform():
        check_call(function, kwargs, where="checkpoint")
    if is_traced():
        return _run_traced(function, args, kwargs, functools.partial(tags, policy))
    own = own_arguments(kwargs) if kwargs else {}
    return tape.run(function, args, own, policy, kwargs.get("determinism_check", "default"))


def _run_traced(
    function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any], make: Any
) -> T:
    kwargs.setdefault("use_reentrant", False)
    if kwargs.get("determinism_check") == "bits":
        del kwargs["determinism_check"]
    return torch_checkpoint(function, *args, context_fn=make, **kwargs)


# Compiled code, and wrappers that only take torch's context_fn


def modes_of(handle: str) -> Contexts:
    """Return the contexts of one region for the policy with this handle."""
    policy = behind(handle)
    if is_traced():
        return tags(policy)
    found: Contexts = create_selective_checkpoint_contexts(selective(policy))
    return found


def modes(policy: PolicyLike) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return the modes of one region that is traced."""
    return tags(as_policy(policy))


def _for_compiler(policy: PolicyLike) -> Callable[[], Any]:
    """Make a partial of a module-level function over constants, as the compiler requires."""
    if isinstance(policy, Policy):
        return functools.partial(modes_of, policy.handle)
    return functools.partial(modes, policy)


def context_fn(policy: PolicyLike) -> Callable[[], Contexts]:
    """Make the value for `context_fn=` of torch's checkpoint, or of a checkpoint wrapper.

    For code that accepts only `context_fn`: eager regions then run torch's selective
    checkpointing, which runs the function twice. `checkpoint` is faster, keeps less and accepts
    every policy.

    Args:
        policy: operators, groups, or a function with torch's signature.

    Returns:
        A partial of a module-level function, as torch.compile requires.

    Raises:
        PolicyError: `policy` is invalid, or of another kind: by module, name, count, size.

    Example:
        >>> make = context_fn([torch.ops.aten.mm.default])
        >>> x = torch.ones(2, 2, requires_grad=True)
        >>> torch_checkpoint(torch.mm, x, x, use_reentrant=False, context_fn=make).shape
        torch.Size([2, 2])
    """
    if torch.compiler.is_compiling():
        return _for_compiler(policy)
    checked = as_policy(policy)
    if not is_selective(checked):
        raise PolicyError(
            f"sac_policies.context_fn: policy {shown(checked)} reads more than the operator, or "
            "offloads, but torch's selective checkpointing only keeps operators. Pass "
            "sac_policies.checkpoint with the policy to wrappers that take a checkpoint function, "
            "or name operators."
        )
    made = functools.partial(modes_of, checked.handle)
    made.holds = checked  # type: ignore[attr-defined]  # handles keep nothing alive
    return made


# Checks


def check_function(function: object, *, where: str) -> None:
    """Refuse values that cannot be called.

    Raises:
        EngineError: the message says what is accepted.
    """
    # In compiled code, not every callable counts as one (super().forward does not). torch checks
    # there.
    if torch.compiler.is_compiling() or (callable(function) and not isinstance(function, Policy)):
        return
    hint = "Pass it first, then its arguments, and the policy as policy=..."
    if isinstance(function, torch.Tensor):
        hint = f"Pass the module before its input and do not call it: {where}(module, x, ...)."
    raise EngineError(
        f"sac_policies.{where}: function {shown(function)} is a {type(function).__name__}, "
        f"but a region is a module or another callable. {hint}"
    )


def check_no_policy(args: tuple[Any, ...]) -> None:
    """Refuse a policy that is passed by position.

    Raises:
        PolicyError: with the keyword.
    """
    for each in args:
        if isinstance(each, Policy):
            raise PolicyError(
                f"sac_policies.checkpoint: policy {shown(each)} is passed as an argument of the "
                "function, but a policy is a keyword argument. Write policy=..."
            )


def check_call(function: object, kwargs: Mapping[str, Any], *, where: str) -> None:
    """Refuse options that have no meaning with a policy, and torch.func transforms.

    Raises:
        EngineError: with the reason.
    """
    check_function(function, where=where)
    check, reason = kwargs.get("determinism_check", "default"), ""
    if kwargs.get("use_reentrant"):
        reason = (
            "use_reentrant True goes with a policy, but reentrant checkpointing knows no "
            "policies. Leave it out."
        )
    elif not (isinstance(check, str) and check in CHECKS):
        reason = (
            f"determinism_check {shown(check)} is unknown, but it must be one of {CHECKS}. "
            "Leave it out: bits are then compared in the first step of each region."
        )
    elif "context_fn" in kwargs:
        reason = "context_fn is given beside policy, but both decide the same. Give one of them."
    elif in_func_transform():
        reason = (
            "a torch.func transform is active, but it does not take the saved-tensor hooks of "
            "checkpointing. Differentiate with torch.autograd.grad, or call the function plainly."
        )
    if reason:
        raise EngineError(f"sac_policies.{where}: {reason}")


def own_arguments(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of the function, without options of torch's checkpoint."""
    return {name: value for name, value in kwargs.items() if name not in _OPTIONS}
