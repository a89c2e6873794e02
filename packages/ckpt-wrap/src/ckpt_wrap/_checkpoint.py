"""One checkpointed call: forward keeps its inputs alone, and backward runs it again.

`Checkpoint` decides in this order:

| situation | what runs |
|---|---|
| gradients are off, or `torch.export` traces | the function, as it is |
| `torch.compile` traces | `torch.utils.checkpoint`, which the compiler knows; after a graph \
break inside the function the call runs in eager mode, the function with it |
| `torch.func` transforms the call | the function, as it is |
| otherwise | a `Region` |

A region follows these rules:

- Tensors saved in a region are handled by the innermost region alone.
- The inputs of a region are saved after forward returns, and only if forward saved something. They
  are saved as autograd saves any tensor: version-checked, and seen by hooks around the region.
- Nested regions need no special code. Reading a saved tensor of the inner region reads its inputs.
  The outer region saved these, so it recomputes first.
- A recomputed tensor is dropped when the saved tensor that it replaces is read. A second backward
  recomputes again.
- The n-th tensor saved in recomputation replaces the n-th saved in forward. Both must have the same
  shape, dtype, device and type of autograd node.
- Recomputation stops at the last tensor that forward saved. An operator may save a tensor before
  it writes it, as `rrelu` does with its noise; then recomputation goes on to the next one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import noop_context_fn

from ckpt_wrap._ambient import capture, replay, running
from ckpt_wrap._arguments import Arguments, warn_if_grown
from ckpt_wrap._errors import OptionError, RecomputeError, describe, owner
from ckpt_wrap._module_state import ModuleState
from ckpt_wrap._options import CheckpointOptions
from ckpt_wrap._torch_compat import (
    CustomNode,
    Saved,
    active_transform,
    announced,
    bypass_hooks,
    early_stop_override,
    is_exporting,
    is_parameter_view,
    never_compiled,
    never_compiled_inside,
    next_hook_number,
    next_node_number,
    remove_hooks,
    save_tensor,
    unseen_by_modes,
    version_of,
    versions_of,
)


class Checkpoint:
    """A checkpoint function: calls a function so that backward recomputes its saved tensors.

    Called like any `checkpoint_fn`: `checkpoint_fn(function, *args, **kwargs)`. All further
    arguments are the function's own.
    """

    def __init__(self, options: CheckpointOptions, name: str = "") -> None:
        self.options = options
        self.name = name  # of the module, if known; for messages

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
        call = Call(function, args, kwargs, self.options, self.name)
        try:
            call.begin()
            region = Region(call)
            with region.hooks():
                result = call.first(args, kwargs)
        finally:
            call.state.stop_watching()
        if region.saved_something and call.arguments.can_change:
            warn_if_grown(args, kwargs, call.known(), call.where)
        can_repeat = call.state.settle()
        region.finish(keep_all=not can_repeat)
        call.end(keep=region.saved_something and (can_repeat or not region.keeps_all))
        return result


def by_position(
    function: Callable[..., Any], count: int, names: tuple[str, ...]
) -> Callable[..., Any]:
    """Return `function` with keyword arguments as positional ones after `count` arguments."""

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
        use_reentrant=False,
        preserve_rng_state=options.preserve_rng_state,
        **extra,
    )


class Call:
    """One call of a function, with everything needed to make the same call again.

    Args:
        name: of the module, if known.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: CheckpointOptions,
        name: str,
    ) -> None:
        self.function = function
        self.options = options
        self.name = name
        self.module = owner(function)
        self.arguments = Arguments(args, kwargs)
        self.contexts = options.context_fn()
        if options.context_fn is not noop_context_fn:
            self._require_two_contexts()
            bypass_hooks(self.contexts[0])
        self.state = ModuleState(
            self.module,
            name,
            own_hooks=function is self.module,
            random=options.preserve_rng_state,
        )
        self._ambient = capture(
            self.arguments.tensors,
            self.arguments.generators,
            preserve_rng_state=options.preserve_rng_state,
        )
        self._running = True  # forward
        self._versions: list[int] = []
        self._saved: list[Saved | None] = []  # None: changed by forward

    def _require_two_contexts(self) -> None:
        made: Any = self.contexts
        if not isinstance(made, (tuple, list)) or len(made) != 2:
            raise OptionError(
                f"ckpt_wrap.checkpoint_: option 'context_fn' returned {made!r} for module "
                f"{self.where}, but it must return two context managers. Return one for forward "
                "and one for recomputation."
            )

    @property
    def where(self) -> str:
        """The module, for messages."""
        return describe(self.function, self.name)

    def begin(self) -> None:
        """Record the state of the inputs and of the module, before forward."""
        self.state.begin()
        self._versions = versions_of(self._live())

    def _live(self) -> list[torch.Tensor]:
        """The inputs, while forward runs."""
        return self.arguments.tensors + self.state.weights

    def first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call in forward."""
        with self.contexts[0], running(again=False):
            return self.function(*args, **kwargs)
        raise RecomputeError(
            "ckpt_wrap.checkpoint_: option 'context_fn' gave a forward context that "
            f"suppressed an exception of module {self.where}, but then there is no result. "
            "Let exceptions pass."
        )

    def known(self) -> set[int]:
        """Ids of the inputs, while forward runs."""
        return set(map(id, self._live()))

    def end(self, *, keep: bool) -> None:
        """Keep the inputs of recomputation after forward, or nothing."""
        tensors, self._running = self._live(), False
        self._weights = len(self.state.weights)
        self.arguments.tensors, self.state.weights = [], []
        if not keep:
            self.arguments = Arguments((), {})
            self.state.drop()
            return
        once: dict[int, Saved | None] = {}
        present = versions_of(tensors)
        # Weights that were read during forward have only the present version.
        before = self._versions + present[len(self._versions) :]
        for tensor, then, now in zip(tensors, before, present, strict=True):
            if id(tensor) not in once:
                once[id(tensor)] = save_tensor(tensor) if then == now else None
            self._saved.append(once[id(tensor)])

    @never_compiled_inside
    def again(self) -> Any:
        """Make the call in recomputation, in its ambient state."""
        inputs = self._inputs()
        weights = len(self.state.weights) if self._running else self._weights
        count = len(inputs) - weights
        args, kwargs = self.arguments.filled(inputs[:count])
        first_hook = next_hook_number()
        try:
            with (
                self.state.put_in(inputs[count:]),
                replay(self._ambient),
                self.contexts[1],
                running(again=True),
            ):
                return self.function(*args, **kwargs)
        finally:
            # Forward has registered its hooks already. A recomputation that ends early cannot have
            # removed them itself.
            hooks = range(first_hook, next_hook_number())
            if hooks:
                remove_hooks(hooks, inputs, self.module)

    def _inputs(self) -> list[torch.Tensor]:
        """Return the inputs of recomputation.

        Raises:
            RecomputeError: one was changed in place.
        """
        if self._running:  # a backward inside forward
            return self._live()
        cause = None
        try:
            if None not in self._saved:
                unpacked: dict[Saved | None, torch.Tensor] = {}  # each once, as hooks see it
                for saved in self._saved:
                    if saved is not None and saved not in unpacked:
                        unpacked[saved] = saved.unpack()
                return list(map(unpacked.__getitem__, self._saved))
        except RuntimeError as error:
            if "inplace operation" not in str(error) or isinstance(error, RecomputeError):
                raise
            cause = error
        raise RecomputeError(
            f"ckpt_wrap.checkpoint_: an input of module {self.where} has been modified by "
            "an inplace operation since the forward, but recomputation needs it as it was. Change "
            "a clone of it, or change it after backward. For a cache that forward fills in place, "
            "pass checkpoint_fn=sac_policies.checkpoint."
        ) from cause


Metadata = tuple[torch.Size, torch.dtype, torch.device, str | None]

# Which of them an operator uses depends on the active dispatch modes.
_RESHAPES: dict[str | None, str] = dict.fromkeys(
    ("ReshapeAliasBackward0", "UnsafeViewBackward0"), "ViewBackward0"
)


class EnoughRecomputed(Exception):
    """Ends a recomputation early.

    It is an `Exception` so that hooks registered with `always_call=True` still run.
    """


class SavedSlot:
    """Replaces a saved tensor in the graph.

    It has its value from recomputation until it is read, or always, if the region keeps all.
    """

    __slots__ = ("__weakref__", "value", "version")
    value: torch.Tensor | None
    version: int  # of a value that is kept


class Region:
    """The saved tensors of one call, each replaced by a slot."""

    def __init__(self, call: Call) -> None:
        override = early_stop_override()
        self._call = call
        self._check = call.options.determinism_check != "none"
        self.stops_early = call.options.early_stop if override is None else override
        self._slots: list[weakref.ref[SavedSlot]] = []
        self._metadata: list[Metadata] = []
        self._node = -1  # number of the node that saved last
        self._unwritten = -2  # number of the last node that may write a tensor after saving it
        self._other_nodes = call.state.graph_tensors
        self.keeps_all = call.state.may_keep_all  # until forward ends, at least
        self.finished = False

    @property
    def saved_something(self) -> bool:
        """Whether forward saved anything for backward."""
        return bool(self._slots)

    def hooks(self) -> saved_tensors_hooks:
        """Context in which the forward runs."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> SavedSlot:
        slot = SavedSlot()
        slot.value = None
        self._slots.append(weakref.ref(slot))
        metadata = _metadata(tensor)
        if id(tensor) in self._other_nodes:
            metadata = (*metadata[:3], None)
        self._metadata.append(metadata)
        if self.keeps_all:
            with unseen_by_modes(tensor):
                slot.value = tensor.detach()
        self._node = next_node_number()
        # The operator may write to the tensor after saving it. A result that requires grad is
        # complete when it is saved.
        may_change = not tensor.requires_grad and tensor.is_floating_point()
        if may_change and not is_parameter_view(tensor):
            self._unwritten = self._node
        return slot

    def finish(self, *, keep_all: bool) -> None:
        """Forward has ended: keep its saved tensors if it cannot be repeated, else drop them."""
        self.finished = True
        if self.keeps_all:
            self.keeps_all = keep_all
            for slot in [slot for ref in self._slots if (slot := ref()) is not None]:
                if keep_all and slot.value is not None:
                    slot.version = version_of(slot.value)
                else:
                    slot.value = None

    def _unpack(self, slot: SavedSlot) -> torch.Tensor:
        if self.keeps_all and slot.value is not None:
            if self.finished and version_of(slot.value) != slot.version:
                raise RecomputeError(
                    f"ckpt_wrap.checkpoint_: a tensor that module {self._call.where} saved has "
                    "been modified by an inplace operation since. Change a clone of it, or change "
                    "it after backward."
                )
            return slot.value
        if slot.value is None:
            self._recompute()
        value, slot.value = slot.value, None
        if value is None:
            raise self.error("fewer", len(self._slots))
        return value

    def error(self, found: int | str, expected: int) -> RecomputeError:
        """Return the error for a recomputation that saved another number of tensors."""
        return RecomputeError(
            f"ckpt_wrap.checkpoint_: module {self._call.where} saved {found} tensors in "
            f"recomputation, but {expected} in forward. Make its forward depend on its inputs only."
        )

    @property
    def last_may_be_unwritten(self) -> bool:
        """Whether the last operator may write a tensor after saving it.

        Recomputation then continues to the next saved tensor, or to the end of forward. That is
        cheap: a matmul would have saved a tensor.
        """
        return self._node == self._unwritten

    def _recompute(self) -> None:
        run = _SecondRun(self, len(self._slots))
        try:
            with saved_tensors_hooks(run.pack, _same), torch.enable_grad():
                announced(-1, self._call.again)
        except Exception as error:
            # The module, or TorchScript, may raise another error instead of ours.
            if run.stopped:
                return
            if run.failure is not None:
                raise run.failure from error
            raise
        run.require_complete()


class _SecondRun:
    """Stores each tensor that recomputation saves in its slot."""

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
        region = self._region
        if region._check:
            found, wanted = _metadata(tensor), region._metadata[index]
            if found != wanted and not (
                found[:3] == wanted[:3] and (found[3] is None or wanted[3] is None)
            ):
                self.failure = self._mismatch(index, found, wanted)
                raise self.failure
        value = tensor.detach() if tensor.requires_grad else tensor
        slot = region._slots[index]()
        if slot is not None:
            slot.value = value
        is_last = self._seen == self._expected and region.stops_early
        if is_last and not region.last_may_be_unwritten:
            self.stopped = True
            raise EnoughRecomputed
        return value

    def _mismatch(self, index: int, found: Metadata, wanted: Metadata) -> RecomputeError:
        where = self._region._call.where
        return RecomputeError(
            f"ckpt_wrap.checkpoint_: saved tensor {index} of module {where} is "
            f"{_described(found)} in recomputation, but was {_described(wanted)} in forward. "
            "Make its forward depend on its inputs only, and run forward and backward in the same "
            "mode: compiled or not, with the same dispatch modes."
        )

    def _beyond(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._region.stops_early:
            # The module caught the exception that ends recomputation early, or recomputation went
            # on until the last tensor was written.
            self.stopped = True
            raise EnoughRecomputed
        if self._region._check and self._region.finished:
            self.failure = self._region.error("more", self._expected)
            raise self.failure
        return tensor.detach() if tensor.requires_grad else tensor

    def require_complete(self) -> None:
        if self.failure is not None:  # the module caught it
            raise self.failure
        if self._region._check and self._seen < self._expected:
            raise self._region.error(self._seen, self._expected)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _metadata(tensor: torch.Tensor) -> Metadata:
    """Return shape, dtype, device and the name of the node that made the tensor.

    The name is None for nodes of `torch.autograd.Function`, which are not compared: FSDP2 and
    hooks add such nodes in forward but not in recomputation.
    """
    node: Any = tensor.grad_fn
    name = "" if node is None else None if isinstance(node, CustomNode) else node.name()
    return tensor.shape, tensor.dtype, tensor.device, _RESHAPES.get(name, name)


def _described(metadata: Metadata) -> str:
    shape, dtype, device, node = metadata
    made = {None: "", "": ", without a node"}.get(node, f", made by {node}")
    return f"{tuple(shape)} of {dtype} on {device}{made}"
