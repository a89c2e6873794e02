"""Pushes dispatch modes; the eager engine that works for any function.

Two modes around one region: `Forward` keeps what the policy says, `Recompute` puts it in
place of running the operator again. torch's own checkpoint calls the function under them, so
nesting, early stop, random state and autocast are torch's.

Rule 1. A region run inside another one keeps its values for both: when the outer region is
        recomputed, the inner one is found again by its place and hands out what it kept.
Rule 2. A recomputation that runs inside other regions (a backward in the middle of a function)
        is no work of theirs, be it one of them that is recomputed: they wait until it ends.
Rule 3. What FSDP does inside a region is not the region's: it runs, uncounted and unkept.
Rule 4. A recomputation of a region whose forward still runs (a gradient taken inside it) ends
        where the forward stands, with early stop or without: past it the function would work on
        what the forward has not yet made, grow caches before it, write before it. It leaves kept
        values for the backward to come.
Rule 5. What brings a value back for such a gradient (a replay of the recipe engine, hooks or a
        checkpoint around the region) is no work of any region: run again, the region finds its
        inputs there, so its calls would have other numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..._torch_compat import Hooks, end_if_left, saved_tensor_hooks
from ..._torch_compat._checkpoint_ends import leave_checkpoints
from ...policies._policies import Policy
from .._engine_disabled import active
from ._arguments import Arguments
from ._forward import Forward
from ._op_table import OpTable, op_table_of
from ._recompute import Recompute
from ._regions import Region


def contexts(
    policy: Policy,
    *,
    root: nn.Module | None = None,
    debug: bool = False,
    arguments: Arguments | None = None,
    function: object = None,
    compares: bool = True,
) -> tuple[Forward, Recompute]:
    """Return the two modes of one region.

    Args:
        policy: what to keep.
        root: the module that paths in the policy are relative to.
        debug: whether both list their operators.
        arguments: what the function is given, where a recomputation is to find it as it was.
        function: what runs in the region, None where unknown.
        compares: whether a recomputation looks at the bits of what it reads again.
    """
    about = root if function is None else function
    op_table = op_table_of(policy)
    if debug or op_table.watch.is_new(about):
        # A table of its own: it lists the operators of this region and no others.
        op_table = OpTable(policy, every=debug, beside=op_table)
    region = Region(policy, _user_hooks(), debug, arguments, compares)
    return Forward(region, op_table, root, about), Recompute(region, op_table)


Pair = tuple[TorchDispatchMode, TorchDispatchMode]


@contextmanager
def ended_if_left(make: Callable[[], Pair]) -> Iterator[Callable[[], Pair]]:
    """Give torch's checkpoint its modes, by `make`; end those that an interrupt leaves."""
    made: list[TorchDispatchMode] = []

    def noted() -> Pair:
        pair = make()
        made.append(pair[0])
        return pair

    try:
        yield noted
    except BaseException as error:
        leave_checkpoints(error)  # before torch 2.13 their modes are still entered, and end so
        for mode in made:
            end_if_left(mode, error)
        raise


@contextmanager
def guest(arguments: Arguments, policy: Policy) -> Iterator[None]:
    """Run a region of another engine inside one of this engine, which may run it again.

    It is given what it was given in the forward, as that was.
    """
    region = Region(policy, None, False, arguments)
    outer = active.modes[-1]
    if not outer.waits:
        region.start_from(outer.inside(region))
    try:
        yield
    finally:
        region.finished = True


def _user_hooks() -> Hooks | None:
    """Return the saved-tensor hooks around the region, unless a checkpoint put them there.

    The hooks of an outer region expect exactly what autograd saves, nothing else. A checkpoint
    pushes them just before it enters the region's mode, whoever's it is.
    """
    hooks = saved_tensor_hooks()
    own = ("torch.utils.checkpoint", __package__.rpartition(".")[0])
    if hooks is None or getattr(hooks[0], "__module__", "").startswith(own):
        return None
    return None if any(mode.hooks == hooks for mode in active.modes) else hooks
