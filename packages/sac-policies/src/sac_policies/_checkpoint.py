"""Runs a region under an engine; the functions users call.

Rule 1. Without a policy, `checkpoint` is torch's.
Rule 2. Compiled code is tagged, whatever engine is named: it is the only one there.
Rule 3. "auto" takes the recipe engine where it can follow the policy, else contexts. A plan
        says which engine it was solved for, and for which inputs that engine can follow it. Of a
        function whose first forward showed that much of what it saves has no recipe, later ones
        run under contexts: of custom operators under any policy, of others where it keeps nothing.
        So do functions with tensor subclasses that wrap others, from the first forward on.
Rule 4. On an accelerator "auto" compares bits in the first forward of a function under a policy.
        Comparing costs many small kernels there; versions of tensors are always compared.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import set_checkpoint_debug_enabled

from ._errors import EngineError, PolicyError, nested_refused, shown
from ._options import CHECKS, compares, debugs, refused_option, split
from ._tensors import is_accelerator, needing_gradients, tensors_in
from ._torch_compat import in_func_transform, is_traced, saved_tensor_hooks
from ._torch_compat._nested import asks_for_sizes
from .eager import _run as _tape
from .engines import _second_forward as second_forward
from .engines._engine_disabled import active
from .engines._tags import tags
from .engines._wrappers import reads_wrappers
from .engines.contexts._arguments import Arguments, Call, only_tensors, parted
from .engines.contexts._contexts import contexts, ended_if_left, guest
from .engines.recipe import _run as _recipe
from .engines.recipe._writes import Habit, habits_of, remember
from .policies._budget_plan import BudgetPlan
from .policies._functions import PolicyLike, as_policy
from .policies._handles import behind, handle_of
from .policies._modules import root_of
from .policies._policies import Policy
from .policies._rules import RECOMPUTE_ALL
from .policies._unmatched import watch_of

T = TypeVar("T")
ENGINES = ("auto", "recipe", "contexts", "tags")
_TAPE = "tape"
"""An engine that is not public yet."""


def modes(
    policy: PolicyLike,
    root: nn.Module | None = None,
    debug: bool = False,
    arguments: Arguments | None = None,
    function: object = None,
    is_compared: bool = True,
) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return the forward and the recompute mode of one region, eager or traced."""
    if is_traced():
        return tags(as_policy(policy))
    return contexts(
        as_policy(policy),
        root=root,
        debug=debug,
        arguments=arguments,
        function=function,
        compares=is_compared,
    )


def modes_of(policy: str, root: str | None = None) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Do the same for the policy and the module that have these handles."""
    return modes(behind(policy), None if root is None else behind(root))


def _compiled_modes(policy: PolicyLike) -> Callable[[], Any]:
    """Return what the compiler takes: a partial of a module's function over constants."""
    if isinstance(policy, Policy):
        return functools.partial(modes_of, policy.handle)
    return functools.partial(modes, policy)


def context_fn(
    policy: PolicyLike, *, root: nn.Module | None = None
) -> Callable[[], tuple[TorchDispatchMode, TorchDispatchMode]]:
    """Make the value for `context_fn=` of torch's checkpoint, or of a checkpoint wrapper.

    Args:
        policy: a policy, or what `as_policy` reads as one.
        root: module that paths in the policy are relative to; only for policies of modules.

    Returns:
        A partial of a module-level function, as torch.compile asks for.

    Raises:
        PolicyError: `policy` is none of these, or `root` is not a module.

    Example:
        >>> make = context_fn([torch.ops.aten.mm.default])
        >>> x = torch.ones(2, 2, requires_grad=True)
        >>> torch_checkpoint(torch.mm, x, x, use_reentrant=False, context_fn=make).shape
        torch.Size([2, 2])
    """
    if torch.compiler.is_compiling():
        return _compiled_modes(policy)
    checked = as_policy(policy)
    if not (root is None or isinstance(root, nn.Module)):
        raise PolicyError(
            f"sac_policies.context_fn: root {shown(root)} is a {type(root).__name__}, but paths "
            "are those below a module. Pass the module that is checkpointed, or leave it out."
        )
    handles = [checked.handle] if root is None else [checked.handle, handle_of(root)]
    made = functools.partial(modes_of, *handles)
    made.holds = (checked, root)  # type: ignore[attr-defined]  # handles keep nothing alive
    return made


def checkpoint(
    function: Callable[..., T],
    *args: Any,
    policy: PolicyLike | None = None,
    engine: str = "auto",
    **kwargs: Any,
) -> T:
    """Call `function` so that backward uses what `policy` keeps and recomputes the rest.

    Has the call shape of torch's checkpoint, whose options it takes; non-reentrant.

    Args:
        function: a module or any callable of tensors.
        args: its positional arguments.
        policy: what to keep, a policy or what `as_policy` reads as one; None keeps only the
            inputs, as torch does.
        engine: "auto", "recipe", "contexts" or "tags"; compiled code is always tagged.
        kwargs: torch's options (`preserve_rng_state`, `determinism_check`, `early_stop`,
            `debug`) and keyword arguments of `function`. With `determinism_check="none"` no bits
            are compared: writes past version counters, as through `.data`, are not noticed. On an
            accelerator engine "auto" compares bits only in the first forward of each function
            under a policy. A named engine compares them in every step.

    Returns:
        What `function` returns.

    Raises:
        PolicyError: `policy` cannot be read, or names modules where there are none.
        EngineError: the engine is unknown, cannot follow the policy, or cannot run here.
        UnmatchedNameError: nothing has a module path or name of the policy (raised by backward).
        RecomputeError: the recomputation runs other operators (raised by backward).
        MutationError: a saved value was changed in place (raised by backward).

    Example:
        >>> from sac_policies import save_ops
        >>> x = torch.ones(2, 2, requires_grad=True)
        >>> checkpoint(lambda a: (a @ a).sin(), x, policy=save_ops("aten.mm")).shape
        torch.Size([2, 2])
    """
    check_function(function, engine, where="checkpoint")
    if policy is None:
        kwargs.setdefault("use_reentrant", False)
        return torch_checkpoint(function, *args, **kwargs)
    if torch.compiler.is_compiling():
        kwargs.setdefault("use_reentrant", False)
        fn = _compiled_modes(policy)
        return torch_checkpoint(function, *args, context_fn=fn, **kwargs)
    policy = as_policy(policy)
    if reason := _refusal(kwargs, engine):
        raise EngineError(f"sac_policies.checkpoint: {reason}")
    own = split(kwargs)[0] if kwargs else {}
    if engine == _TAPE and not is_traced():
        return _tape.run(function, args, own, policy, kwargs.get("determinism_check", "default"))
    is_compared = compares(kwargs)
    if engine == "auto":
        engine = "contexts" if not_recipe(function, policy, args, own, kwargs) else "recipe"
        is_compared = is_compared and not _was_compared(function, policy, args, own)
    if engine == "recipe":
        if not active.modes:
            return _recipe.run(function, args, own, policy, is_compared)
        return _run_recipe(function, args, own, policy, is_compared)
    return _run_contexts(function, args, kwargs, policy, is_compared)


def _was_compared(
    function: object, policy: Policy, args: tuple[Any, ...], own: Mapping[str, Any]
) -> bool:
    """Whether "auto" compares no bits on an accelerator: an earlier forward did (Rule 4).

    A forward inside others' hooks, which may run again in backward, saves the same both times. So
    does one under a plan, which knows what was saved.
    """
    return (
        _is_on_accelerator(args, own)
        and not active.modes
        and saved_tensor_hooks() is None
        and not isinstance(policy, BudgetPlan)
        and not watch_of(policy).is_new(function)
    )


def _is_on_accelerator(args: tuple[Any, ...], own: Mapping[str, Any]) -> bool:
    """Whether the first tensor that a function is given is on an accelerator."""
    for each in args:
        if isinstance(each, torch.Tensor):
            return is_accelerator(each.device)
    found = tensors_in((args, own))
    return bool(found) and is_accelerator(found[0].device)


def _run_contexts(
    function: Callable[..., T],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    policy: Policy,
    is_compared: bool,
) -> T:
    debug = debugs(kwargs)
    kwargs.pop("debug", None)
    root = root_of(function) if policy.reads_modules else None
    called, arguments = _restoring(function, args, kwargs)
    kwargs["use_reentrant"] = False
    # torch's debugging takes no contexts; this engine has its own. Off only until torch has asked.
    torchs = ExitStack()
    if debug:
        torchs.enter_context(set_checkpoint_debug_enabled(False))

    def make() -> tuple[TorchDispatchMode, TorchDispatchMode]:
        torchs.close()
        return modes(policy, root, debug, arguments, function, is_compared)

    try:
        with torchs, ended_if_left(make) as fn:
            return torch_checkpoint(called, *args, context_fn=fn, **kwargs)
    except RuntimeError as error:
        if not asks_for_sizes(error):
            raise
        raise nested_refused("checkpoint") from error


def _run_recipe(
    function: Callable[..., T],
    args: tuple[Any, ...],
    own: dict[str, Any],
    policy: Policy,
    is_compared: bool,
) -> T:
    if only_tensors(args, own):
        return _recipe.run(function, args, own, policy, is_compared)
    arguments = Arguments(function, args, own)
    with guest(arguments, policy):
        args, own = arguments.first(args)
        return _recipe.run(function, args, own, policy, is_compared)


def _restoring(
    function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., T], Arguments | None]:
    """Return what is called in place of `function`, so that it finds its arguments unchanged."""
    own, _ = split(kwargs)
    if only_tensors(args, own) or is_traced():
        return function, None
    arguments = Arguments(function, args, own)
    return Call(function, arguments), arguments


def run_again(
    function: Callable[..., T],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    around: Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]] | None,
    rewrites: bool = False,
) -> T:
    """Call `function` so that backward runs it a second time and keeps nothing else.

    A second forward does that, or torch's checkpoint where something looks on. Both hold tensors,
    and refuse those that were written to; what else may have changed, contexts give back as it was.

    Args:
        function: what is run.
        args: its positional arguments.
        kwargs: its keyword arguments.
        around: what both runs are to be in; None for nothing. Where a second forward will not do,
            values are then replayed instead.
        rewrites: whether the function writes to tensors that it is given.
    """
    call = None if rewrites or torch.compiler.is_compiling() else parted(function, args, kwargs)
    if call is not None and second_forward.is_possible(call[1]):
        name = getattr(function, "__qualname__", type(function).__name__)
        return second_forward.run(*call, name, None if around is None else around())
    if call is not None:
        options: dict[str, Any] = {} if around is None else {"context_fn": around}
        return checkpoint(call[0], *call[1], **options)
    engine = "contexts" if around is None else "recipe"
    return checkpoint(function, *args, policy=RECOMPUTE_ALL, engine=engine, **kwargs)


def check_function(function: object, engine: object, *, where: str) -> None:
    """Refuse what cannot be called, and engines that there are not.

    Raises:
        EngineError: with what is needed.
    """
    # Compiled, not every callable is known as one: super().forward is not. There torch finds out.
    if not (torch.compiler.is_compiling() or callable(function)):
        raise EngineError(
            f"sac_policies.{where}: function {shown(function)} is a {type(function).__name__}, "
            "but a region is a module or another callable. Pass it first, then its arguments."
        )
    if not (isinstance(engine, str) and engine in (*ENGINES, _TAPE)):
        raise EngineError(
            f"sac_policies.{where}: engine {shown(engine)} is unknown, but it must be one of "
            f"{ENGINES}. Leave it 'auto'."
        )


def check_call(function: object, kwargs: Mapping[str, Any], engine: str, *, where: str) -> None:
    """Refuse what no engine runs.

    Raises:
        EngineError: with the reason.
    """
    check_function(function, engine, where=where)
    if reason := _refusal(kwargs, engine):
        raise EngineError(f"sac_policies.{where}: {reason}")


def check_recipe(policy: Policy, *, where: str) -> None:
    """Refuse a policy that the recipe engine cannot follow.

    Raises:
        EngineError: with the reason.
    """
    if reason := _recipe.refusal(policy):
        raise EngineError(
            f"sac_policies.{where}: policy {shown(policy)} {reason}. "
            'Use engine="contexts", or "auto" to let it be chosen.'
        )


def not_recipe(
    function: object,
    policy: Policy,
    args: tuple[Any, ...],
    own: Mapping[str, Any],
    options: Mapping[str, Any],
) -> str:
    """Say why "auto" does not take the recipe engine; "" where it does (Rule 3).

    Args:
        function: what is to be run.
        policy: what is to be followed.
        args: positional arguments of the function.
        own: keyword arguments of the function.
        options: those of torch's checkpoint; others are not looked at.
    """
    if debugs(options):
        return "debug=True compares operators with those of a second forward"
    if is_traced():
        return "the region is being traced"
    if active.modes and not only_tensors(args, dict(own)):
        return "a region around it is recomputed, and is to give it its arguments as they were"
    if reason := _recipe.refusal(policy):
        return f"the policy {reason}"
    if isinstance(policy, BudgetPlan):
        same = policy.is_for(needing_gradients((args, own)))
        return "" if same else "the plan was profiled where other inputs needed gradients"
    habits = habits_of(function)
    if Habit.WRAPS in habits or reads_wrappers(function, args, own):
        # Remembered: a unit of FSDP inside has whole parameters when backward runs it again.
        if Habit.WRAPS not in habits:
            remember(function, Habit.WRAPS)
        return "no rule rebuilds tensor subclasses that wrap others, such as DTensor"
    # Under hooks, which may be a checkpoint's, one forward is run as the one before it.
    keeps = Habit.OPAQUE in habits or (Habit.KEEPS in habits and policy == RECOMPUTE_ALL)
    if keeps and saved_tensor_hooks() is None:
        return "no rule rebuilds much of what an earlier forward of the function saved"
    return ""


def _refusal(kwargs: Mapping[str, Any], engine: str) -> str:
    if engine == "tags" and not is_traced():
        return (
            "engine 'tags' is for compiled code, but nothing is being compiled. "
            "Leave it 'auto', which tags under torch.compile."
        )
    checks = _tape.CHECKS if engine == _TAPE else CHECKS
    if kwargs and (reason := refused_option(kwargs, checks)):
        return reason
    if in_func_transform():
        return (
            "a torch.func transform is active, but it does not take the saved-tensor hooks of "
            "checkpointing. Differentiate with torch.autograd.grad, or call the function plainly."
        )
    return ""
