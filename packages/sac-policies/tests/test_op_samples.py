"""Every differentiable operator with samples in torch, between recomputed values.

The samples come from torch's test suite (`op_db`) and were not chosen for replays.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from sac_policies import checkpoint, recompute_all

pytest.importorskip("expecttest")  # torch's samples import it
with warnings.catch_warnings(action="ignore"):
    from torch.testing._internal.common_methods_invocations import op_db

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of the operators themselves
MOST_SAMPLES = 5
"""Of each operator."""
LEFT_OUT = {
    *("empty", "empty_like", "new_empty", "new_empty_strided"),  # uninitialized memory
    "linalg.lstsq",  # two plain calls differ
    "sparse.mm",  # some samples cannot be created
}
OPS = [
    each
    for each in op_db
    if torch.float32 in each.supported_backward_dtypes("cpu") and each.name not in LEFT_OUT
]


def between(op: Any, sample: Any) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """A function that calls an operator between multiplications, and the function's tensors."""
    leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def function(*tensors: Tensor) -> Tensor:
        given = list(leaves)
        for at, tensor in zip(places, tensors, strict=True):
            given[at] = tensor * 1.0 if tensor.requires_grad else tensor
        first, args, kwargs = tree_unflatten(given, spec)
        out = [each for each in tree_leaves(op(first, *args, **kwargs)) if has_gradient(each)]
        return sum((each.sin() * each).abs().sum() for each in out)  # type: ignore[return-value]

    return function, [leaves[at] for at in places]


def has_gradient(value: Any) -> bool:
    """Whether a result is differentiable."""
    return isinstance(value, Tensor) and value.requires_grad and value.layout is torch.strided


def gradients(function: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor | None] | None:
    """Gradients of all tensors that require grad; None without any, or if the operator refuses."""
    torch.manual_seed(0)
    given = [each.detach().requires_grad_(each.requires_grad) for each in tensors]
    out = function(*given)
    needed = [each for each in given if each.requires_grad]
    if not isinstance(out, Tensor) or not needed:
        return None
    return list(torch.autograd.grad(out, needed, allow_unused=True))


def are_same(one: list[Tensor | None], other: list[Tensor | None]) -> bool:
    """Whether all are bit-identical; NaN equals NaN."""
    return all(
        (a is None) == (b is None) and (a is None or torch.equal(*(x.nan_to_num() for x in (a, b))))
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("op", OPS, ids=[f"{op.name}-{op.variant_test_name}" for op in OPS])
def test_gradients_are_plain(op: Any) -> None:
    """In a function's first two forwards and in the third, with and without comparison."""
    torch.manual_seed(0)
    samples = op.sample_inputs("cpu", torch.float32, requires_grad=True)
    for sample in itertools.islice(samples, MOST_SAMPLES):
        function, tensors = between(op, sample)
        try:
            plain, again = (gradients(function, tensors) for _ in range(2))
        except (NotImplementedError, RuntimeError):
            continue  # has no such gradient, for example a sparse result
        if plain is None or again is None or not are_same(plain, again):
            continue
        for check in ("default", "none"):
            options = {"policy": recompute_all(), "determinism_check": check}
            region = partial(checkpoint, function, **options)
            for _ in range(3):
                found = gradients(region, tensors)
                assert found is not None
                assert are_same(found, plain), (check, sample)
