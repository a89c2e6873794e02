"""A backward that runs inside another: what each of them reads again."""

from __future__ import annotations

import pytest
import torch

from torchparts_conformance import requirement

from .test_changes import Fresh, add_unseen, leaf


def _with_bias(t, given):
    return (t + given[0]).sin()


def _or_refusal(call):
    """What a backward gives, or what its error says."""
    try:
        return call()[0]
    except RuntimeError as error:
        return str(error)


@requirement(
    "SP-209",
    level="MUST",
    text=(
        "Where a backward runs inside another, what a region of either reads again and was "
        "changed past its version counter MUST lead to the gradients of no checkpointing, or to"
        " an error of that backward, which names an operator of the region; the other one MUST "
        "have the gradients of no checkpointing, bitwise."
    ),
    rationale=(
        "where comparisons are looked at when a backward ends, one inside another ended them "
        "for both: gradients were those of the changed value, without a word"
    ),
    since="0.1.0",
    profile="replay",
)
@pytest.mark.parametrize("size", [4, 96])
@pytest.mark.parametrize("changed", [None, "read before", "read after", "read inside"])
def test_change_is_noticed_by_the_backward_that_reads_it(part, device, changed, size):
    """A hook between two regions runs the backward of a third; each adds something it was given."""
    x, y = leaf(device, size, size), leaf(device, size, size)
    given = {which: leaf(device, size, size) for which in ("before", "after", "inside")}
    inner = []

    def run(t, which, checkpointed):
        if not checkpointed:
            return _with_bias(t, [given[which]])
        policy = part.recompute_all()
        return part.checkpoint(Fresh(_with_bias), t, [given[which]], policy=policy)

    def backward(checkpointed, change=None):
        inside = run(y, "inside", checkpointed).sum()

        def hook(grad):
            inner.append(_or_refusal(lambda: torch.autograd.grad(inside, y)))

        between = run(x, "after", checkpointed)
        between.register_hook(hook)
        out = run(between, "before", checkpointed).sum()
        if change is not None:
            add_unseen(given[change])
        return _or_refusal(lambda: torch.autograd.grad(out, x))

    expected = [backward(checkpointed=False), *inner]
    inner.clear()
    found = [backward(True, changed and changed.split()[1]), *inner]
    refused = [isinstance(each, str) for each in found]
    assert refused[0] or len(found) == 2
    assert not refused[0] or changed in ("read before", "read after")
    assert not any(refused[1:]) or changed == "read inside"
    for each, plain in zip(found, expected, strict=False):
        if isinstance(each, str):
            assert "aten.add" in each or "aten.sin" in each, each
        else:
            assert torch.equal(each, plain)
