"""One checkpointed call: forward keeps its inputs alone, and backward runs it again.

`Checkpoint` decides in this order:

| situation | what runs |
|---|---|
| gradients are off, or `torch.export` traces | the function, as it is |
| `torch.compile` traces | `torch.utils.checkpoint`, which the compiler knows; after a graph \
break inside the function the call runs in eager mode, the function with it |
| `torch.func` transforms the call | the function, as it is |
| `REENTRANT`, and an input or a tensor of the module requires grad | `torch.utils.checkpoint` \
over all tensors of the call |
| `debug=True` | `torch.utils.checkpoint`, which can print operators |
| otherwise | a `Region` |

A region follows these rules:

- Tensors saved in a region are handled by the innermost region alone.
- The inputs of a region are saved after forward returns, and only if forward saved something. They
  are saved as autograd saves any tensor: version-checked, and seen by the hooks that are active
  around the region, those of an outer region among them. Together with the first point, nested
  regions need no code of their own: reading a saved tensor of an inner region reads that region's
  inputs, which are saved tensors of the outer region, which recomputes first.
- A recomputed tensor is given up when the saved tensor that it replaces is read. A second backward
  recomputes again.
- The n-th tensor saved in recomputation replaces the n-th saved in forward. Both must have the same
  shape, dtype, device and type of autograd node.
- Recomputation stops at the last tensor that forward saved. An operator may save a tensor before
  it writes it, as `rrelu` does with its noise; then recomputation goes on to the next one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointFunction, noop_context_fn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ckpt_wrap._ambient import capture, first_run, replay, second_run
from ckpt_wrap._arguments import Arguments
from ckpt_wrap._errors import OptionError, RecomputeError, Where, owner
from ckpt_wrap._module_state import ModuleState
from ckpt_wrap._options import CheckpointImpl, CheckpointOptions
from ckpt_wrap._torch_compat import (
    Saved,
    active_transform,
    bypass_hooks,
    debug_override,
    early_stop_override,
    is_custom_node,
    is_exporting,
    is_parameter_view,
    never_compiled,
    never_compiled_inside,
    next_hook_number,
    next_node_number,
    remove_hooks,
    save_tensor,
    version_of,
)


class Checkpoint:
    """A checkpoint function: calls another so that backward recomputes what it saved.

    It is called as what `checkpoint_fn=` takes is, `checkpoint_fn(function, *args, **kwargs)`.
    All further arguments are the function's own.
    """

    __slots__ = ("made_by", "name", "options")

    def __init__(
        self, options: CheckpointOptions, made_by: str = "checkpoint_", name: str = ""
    ) -> None:
        self.options = options
        self.made_by = made_by  # the function the user called; for messages
        self.name = name  # of the module, where it is known; for messages

    @never_compiled
    def __call__(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """`function(*args, **kwargs)`, checkpointed."""
        if not torch.is_grad_enabled() or is_exporting():
            return function(*args, **kwargs)
        if torch.compiler.is_compiling():
            return _under_compile(self.options, function, args, kwargs)
        if active_transform() is not None:
            return function(*args, **kwargs)
        return self._in_eager_mode(function, args, kwargs)

    # Forward must save the same tensors as recomputation, which backward runs in eager mode.
    @never_compiled_inside
    def _in_eager_mode(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        where, override = Where(function, self.name, self.made_by), debug_override()
        call = Call(function, args, kwargs, self.options, where)
        if call.options.impl is CheckpointImpl.REENTRANT:
            return _reentrant(call, args, kwargs)
        if call.options.debug if override is None else override:
            return _with_debug(call, args, kwargs)
        region = Region(call)
        call.begin()
        with region.hooks():
            result = call.first(args, kwargs)
            region.finished = True
        call.end(keep=region.saved_something)
        return result


def by_position(
    function: Callable[..., Any], count: int, names: tuple[str, ...]
) -> Callable[..., Any]:
    """`function`, taking by position what it takes by keyword after `count` arguments."""

    def call(*flat: Any) -> Any:
        return function(*flat[:count], **dict(zip(names, flat[count:], strict=True)))

    return call


def _under_compile(
    options: CheckpointOptions,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    extra: dict[str, Any] = {}
    if options.context_fn is not noop_context_fn:
        extra["context_fn"] = options.context_fn
    return torch_checkpoint(
        by_position(function, len(args), tuple(kwargs)),
        *args,
        *kwargs.values(),
        use_reentrant=options.impl is CheckpointImpl.REENTRANT,
        preserve_rng_state=options.preserve_rng_state,
        **extra,
    )


class Call:
    """One call of a function, with everything needed to make the same call again."""

    __slots__ = (
        "_ambient",
        "_live",
        "_saved",
        "_versions",
        "arguments",
        "contexts",
        "function",
        "module",
        "options",
        "state",
        "where",
    )

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: CheckpointOptions,
        where: Where,
    ) -> None:
        self.function = function
        self.where = where
        self.module = owner(function)
        self.arguments = Arguments(args, kwargs)
        if options.impl is CheckpointImpl.REENTRANT and not self._finds_gradients():
            options = replace(options, impl=CheckpointImpl.NO_REENTRANT)
        self.options = options
        self.contexts = _contexts(options, where)
        self.state = ModuleState(self.module, where, own_hooks=function is self.module)
        self._ambient = capture(
            self.arguments.tensors,
            self.arguments.generators,
            preserve_rng_state=options.preserve_rng_state,
        )
        self._live: list[torch.Tensor] | None = None  # the inputs while forward runs
        self._versions: list[int] = []
        self._saved: list[Saved | None] = []  # None: changed by forward

    def begin(self) -> list[torch.Tensor]:
        """Forward starts: note the state of the inputs, which are returned, and of the module."""
        self._live = self.arguments.tensors + self.state.begin()
        self._versions = [version_of(tensor) for tensor in self._live]
        return self._live

    def first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call as forward."""
        with self.contexts[0], first_run(self.state):
            return self.function(*args, **kwargs)
        raise RecomputeError(
            f"ckpt_wrap.{self.where.made_by}: option 'context_fn' gave a forward context that "
            f"suppressed an exception of module {self.where}, but then there is no result. "
            "Let exceptions pass."
        )

    def end(self, *, keep: bool) -> None:
        """Forward has ended: keep what recomputation needs, or nothing."""
        tensors, self._live, self.arguments.tensors = self._live or [], None, []
        self.state.end(keep=keep)
        if not keep:
            self.arguments = Arguments((), {})
            return
        once: dict[int, Saved | None] = {}
        for tensor, version in zip(tensors, self._versions, strict=True):
            if id(tensor) not in once:
                unchanged = version_of(tensor) == version
                once[id(tensor)] = save_tensor(tensor) if unchanged else None
            self._saved.append(once[id(tensor)])
        self.arguments.end(tensors, self.where)

    @never_compiled_inside
    def again(self, tensors: Sequence[torch.Tensor] | None = None) -> Any:
        """Make the call as recomputation, in the ambient state it had.

        Args:
            tensors: instead of the inputs, those that torch's reentrant checkpoint detached.
        """
        inputs = self.inputs() if tensors is None else tensors
        args, kwargs = self.arguments.filled(inputs, self.where, rebuild=tensors is not None)
        first_hook = next_hook_number()
        try:
            with (
                self.state.put_in(inputs),
                replay(self._ambient),
                self.contexts[1],
                second_run(),
            ):
                return self.function(*args, **kwargs)
        finally:
            # Forward has registered its hooks already. Ended early, recomputation cannot have
            # removed them itself.
            remove_hooks(range(first_hook, next_hook_number()), list(inputs), self.module)

    def _finds_gradients(self) -> bool:
        """Whether an input, or a tensor that can be found in the module, requires grad."""
        modules = () if self.module is None else self.module.modules()
        places = [
            place.values()
            for module in modules
            for place in (module._parameters, module._buffers, vars(module))
        ]
        return self.module is None or any(
            isinstance(tensor, torch.Tensor) and tensor.requires_grad
            for place in (self.arguments.tensors, *places)
            for tensor in place
        )

    def inputs(self) -> list[torch.Tensor]:
        """The inputs of recomputation.

        Raises:
            RecomputeError: one was changed in place.
        """
        if self._live is not None:  # a backward inside forward
            return self._live
        cause = None
        try:
            if None not in self._saved:
                unique = {id(saved): saved for saved in self._saved if saved is not None}
                unpacked = {key: saved.unpack() for key, saved in unique.items()}
                return [unpacked[id(saved)] for saved in self._saved]
        except RuntimeError as error:
            if "inplace operation" not in str(error) or isinstance(error, RecomputeError):
                raise
            cause = error
        raise RecomputeError(
            f"ckpt_wrap.{self.where.made_by}: an input of module {self.where} has been modified by "
            "an inplace operation since the forward, but recomputation needs it as it was. Change "
            "a clone of it, or change it after backward."
        ) from cause


def _contexts(
    options: CheckpointOptions, where: Where
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts that `context_fn` returns for one call."""
    made = options.context_fn()
    try:
        forward_context, context = made
    except (TypeError, ValueError):
        raise OptionError(
            f"ckpt_wrap.{where.made_by}: option 'context_fn' of module {where} returned "
            f"{made!r}, but it must return two context managers. Return one for forward and "
            "one for recomputation."
        ) from None
    bypass_hooks(forward_context)
    return forward_context, context


def _with_debug(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call in torch's checkpoint, which prints the operators of both runs."""
    first = [(args, kwargs)]  # taken out, so that the closure does not keep the inputs

    def run() -> Any:
        if not first:
            return call.again()
        call.begin()
        return call.first(*first.pop())

    result = torch_checkpoint(
        run,
        use_reentrant=False,
        preserve_rng_state=False,  # the call does it
        determinism_check=call.options.determinism_check,
        debug=True,
        early_stop=call.options.early_stop,
    )
    call.end(keep=True)  # here, where the hooks of torch's checkpoint do not see it
    return result


class _Reentrant(CheckpointFunction):
    """Torch's reentrant checkpoint, with an error that names the module of a changed input."""

    @staticmethod
    def forward(ctx: Any, call: Call, *args: Any) -> Any:
        ctx.call = call
        return CheckpointFunction.forward(ctx, *args)

    @staticmethod
    @never_compiled_inside
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.call.inputs()
        return (None, *CheckpointFunction.backward(ctx, *grads))


def _reentrant(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call in torch's reentrant checkpoint.

    Torch sees tensors only where they are arguments or results themselves. So all tensors of the
    call are handed over one by one, and put back into place inside.
    """
    first = [(args, kwargs)]
    results: list[Arguments] = []
    looks: list[list[Any]] = []

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if first:
            results.append(result := Arguments([call.first(*first.pop())], {}))
            call.end(keep=True)
        else:
            result = Arguments([call.again(tensors[:count])], {})
        looks.append([(t.shape, t.dtype, t.device) for t in result.tensors])
        if looks[-1] != looks[0] and call.options.determinism_check != "none":
            raise RecomputeError(
                f"ckpt_wrap.{call.where.made_by}: the result of module {call.where} is {looks[-1]} "
                f"in recomputation, but was {looks[0]} in forward. "
                "Make its forward depend on its inputs only."
            )
        return tuple(result.tensors)

    inputs = call.begin()
    count = len(inputs)
    # Torch's checkpoint has no backward where no input requires grad, as for a first layer.
    anchor = () if any(t.requires_grad for t in inputs) else (torch.empty(0, requires_grad=True),)
    tensors = _Reentrant.apply(call, run, False, *inputs, *anchor)  # the call replays random state
    return results.pop().filled(tensors, call.where, rebuild=True)[0][0]


Metadata = tuple[torch.Size, torch.dtype, torch.device, str | None]

# Which of them an operator uses depends on the dispatch modes that are active.
_RESHAPES: dict[str | None, str] = dict.fromkeys(
    ("ReshapeAliasBackward0", "UnsafeViewBackward0"), "ViewBackward0"
)


class EnoughRecomputed(Exception):
    """Ends a recomputation early.

    An `Exception`, so that hooks registered with `always_call=True` still run.
    """


class SavedSlot:
    """Takes the place of one saved tensor in the graph; has its value from recompute to read."""

    __slots__ = ("__weakref__", "value")

    def __init__(self) -> None:
        self.value: torch.Tensor | None = None


class Region:
    """The saved tensors of one call, none of which is kept."""

    __slots__ = (
        "_call",
        "_check",
        "_early_stop",
        "_metadata",
        "_node",
        "_slots",
        "_unwritten",
        "finished",
    )

    def __init__(self, call: Call) -> None:
        override = early_stop_override()
        self._call = call
        self._check = call.options.determinism_check != "none"
        self._early_stop = call.options.early_stop if override is None else override
        self._slots: list[weakref.ref[SavedSlot]] = []
        self._metadata: list[Metadata] = []
        self._node = -1  # number of the node that saved last
        self._unwritten = -2  # of the last node that saved a tensor it may still have to write
        self.finished = False

    @property
    def saved_something(self) -> bool:
        """Whether backward may ask for anything."""
        return bool(self._slots)

    def hooks(self) -> saved_tensors_hooks:
        """Context under which the forward runs."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> SavedSlot:
        slot = SavedSlot()
        self._slots.append(weakref.ref(slot))
        self._metadata.append(_metadata(tensor))
        self._node = next_node_number()
        if _may_be_unwritten(tensor):
            self._unwritten = self._node
        return slot

    def _unpack(self, slot: SavedSlot) -> torch.Tensor:
        if slot.value is None:
            self._recompute()
        value, slot.value = slot.value, None
        if value is None:
            raise self._error("fewer", len(self._slots))
        return value

    def _error(self, less_or_more: str, expected: int) -> RecomputeError:
        where = self._call.where
        return RecomputeError(
            f"ckpt_wrap.{where.made_by}: module {where} saved {less_or_more} tensors in "
            f"recomputation than the {expected} of its forward, but the two must be the same. "
            "Make its forward depend on its inputs only."
        )

    def stops_early(self) -> bool:
        """Whether recomputation ends at the last tensor that forward saved."""
        return self._early_stop and not self._call.state.asked

    @property
    def last_may_be_unwritten(self) -> bool:
        """Whether the operator that saved last may have saved before it wrote.

        Recomputation then runs on to the next saved tensor, or to the end of forward. That is
        cheap: a matmul would have saved a tensor.
        """
        return self._node == self._unwritten

    def _recompute(self) -> None:
        run = _SecondRun(self, len(self._slots))
        try:
            with saved_tensors_hooks(run.pack, _same), torch.enable_grad():
                self._call.again()
        except Exception as error:
            # The module, or TorchScript, may raise another error in the place of ours.
            if run.stopped:
                return
            if run.failure is not None:
                raise run.failure from error
            raise
        run.require_complete()


class _SecondRun:
    """Hands each tensor saved in a recomputation to its slot."""

    __slots__ = ("_expected", "_region", "_seen", "failure", "stopped")

    def __init__(self, region: Region, expected: int) -> None:
        self._region = region
        self._expected = expected
        self._seen = 0
        self.stopped = False
        self.failure: RecomputeError | None = None

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        index = self._seen
        self._seen += 1
        if index >= self._expected:
            return self._beyond(tensor)
        self._hand_over(index, tensor)
        is_last = self._seen == self._expected and self._region.stops_early()
        if is_last and not self._region.last_may_be_unwritten:
            self.stopped = True
            raise EnoughRecomputed
        return _detached(tensor)

    def _hand_over(self, index: int, tensor: torch.Tensor) -> None:
        region = self._region
        if region._check:
            found, wanted = _metadata(tensor), region._metadata[index]
            if found != wanted and not (
                found[:3] == wanted[:3] and (found[3] is None or wanted[3] is None)
            ):
                self.failure = self._mismatch(index, found, wanted)
                raise self.failure
        slot = region._slots[index]()
        if slot is not None:
            slot.value = _detached(tensor)

    def _mismatch(self, index: int, found: Metadata, wanted: Metadata) -> RecomputeError:
        where = self._region._call.where
        return RecomputeError(
            f"ckpt_wrap.{where.made_by}: saved tensor {index} of module {where} is "
            f"{_described(found)} in recomputation, but was {_described(wanted)} in forward. "
            "Make its forward depend on its inputs only, and run forward and backward in the same "
            "mode: compiled or not, with the same dispatch modes."
        )

    def _beyond(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._region.stops_early():
            # The module caught the exception that was to end its recomputation, or recomputation
            # went on until the last tensor was written.
            self.stopped = True
            raise EnoughRecomputed
        if self._region._check and self._region.finished:
            self.failure = self._region._error("more", self._expected)
            raise self.failure
        return _detached(tensor)

    def require_complete(self) -> None:
        if self.failure is not None:  # the module caught it
            raise self.failure
        if self._region._check and self._seen < self._expected:
            where = self._region._call.where
            raise RecomputeError(
                f"ckpt_wrap.{where.made_by}: module {where} saved {self._seen} tensors in "
                f"recomputation, but {self._expected} in forward. "
                "Make its forward depend on its inputs only."
            )


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach() if tensor.requires_grad else tensor


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _metadata(tensor: torch.Tensor) -> Metadata:
    """Shape, dtype, device and the name of the node that made the tensor.

    The name is None for nodes of `torch.autograd.Function`, which are not compared: FSDP2 and
    hooks add such nodes in forward but not in recomputation.
    """
    node: Any = tensor.grad_fn
    name = "" if node is None else None if is_custom_node(node) else node.name()
    return tensor.shape, tensor.dtype, tensor.device, _RESHAPES.get(name, name)


def _described(metadata: Metadata) -> str:
    shape, dtype, device, node = metadata
    made = {None: "", "": ", without a node"}.get(node, f", made by {node}")
    return f"{tuple(shape)} of {dtype} on {device}{made}"


def _may_be_unwritten(tensor: torch.Tensor) -> bool:
    """Whether the operator that saves the tensor may still have to write it.

    Results require grad when they are saved, and are written by then.
    """
    return tensor.is_floating_point() and not tensor.requires_grad and not is_parameter_view(tensor)
