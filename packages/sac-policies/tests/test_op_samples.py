"""Every differentiable operator with samples in torch, between recomputed values.

Also its in-place and out variants. The samples come from torch's test suite (`op_db`) and were not
chosen for replays. Fresh memory is filled with NaN, so that memory read before it is written shows.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from sac_policies import Policy, checkpoint, recompute_all, save_all

pytest.importorskip("expecttest")  # torch's samples import it
with warnings.catch_warnings(action="ignore"):
    from torch.testing._internal.common_methods_invocations import op_db

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of the operators themselves
BOTH = [recompute_all(), save_all()]
MOST_SAMPLES = 5
"""Of each operator."""
LEFT_OUT = {
    *("empty", "empty_like", "new_empty", "new_empty_strided"),  # uninitialized memory
    "linalg.lstsq",  # two plain calls differ
    "sparse.mm",  # some samples cannot be created
}
OWN_UNDER_A_MODE = {("linalg.cond", ""), ("norm", "nuc")}
"""Their `out` variants compute singular values by another kernel under any dispatch mode."""


def name_of(op: Any) -> tuple[str, str]:
    """Name of an operator and of its variant."""
    return op.name, op.variant_test_name


OPS = [
    each
    for each in op_db
    if torch.float32 in each.supported_backward_dtypes("cpu") and each.name not in LEFT_OUT
]
IN_PLACE = [op for op in OPS if op.inplace_variant is not None]
OUT = [op for op in OPS if op.supports_out and name_of(op) not in OWN_UNDER_A_MODE]


def parameters(ops: list[Any]) -> list[Any]:
    """Every twentieth operator; the others run at night."""
    return [
        pytest.param(op, id="-".join(name_of(op)), marks=[pytest.mark.nightly] * (at % 20 > 0))
        for at, op in enumerate(ops)
    ]


@pytest.fixture(autouse=True)
def _fresh_memory_is_nan(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


Fill = Callable[..., tuple[Any, tuple[Any, ...], dict[str, Any]]]


def opened(sample: Any) -> tuple[Fill, list[Tensor]]:
    """A function that puts tensors into a sample, and the tensors that are there.

    Those that require grad become values that can be recomputed.
    """
    leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def fill(tensors: tuple[Tensor, ...], recomputed: bool = True) -> Any:
        given = list(leaves)
        for at, tensor in zip(places, tensors, strict=True):
            given[at] = tensor * 1.0 if recomputed and tensor.requires_grad else tensor
        return tree_unflatten(given, spec)

    return fill, [leaves[at] for at in places]


def between(op: Any, fill: Fill, *tensors: Tensor) -> Tensor:
    """Call an operator between multiplications."""
    first, args, kwargs = fill(tensors)
    out = [each for each in tree_leaves(op(first, *args, **kwargs)) if has_gradient(each)]
    return sum((each.sin() * each).abs().sum() for each in out)  # type: ignore[return-value]


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


def in_place(op: Any, fill: Fill, *tensors: Tensor) -> Tensor:
    """Write to a recomputed value, which was read before and is read after."""
    first, args, kwargs = fill(tensors)
    before = first + 1
    out = op.inplace_variant(first, *args, **kwargs)
    return size_of(before) + size_of(first * before) + size_of(out)


def into(op: Any, fill: Fill, *tensors: Tensor) -> Tensor:
    """Write results twice into tensors that are read before and after."""
    first, args, kwargs = fill(tensors, recomputed=False)
    scale = next(each for each in tensors if each.requires_grad).flatten()[:1].sum()
    read: list[Tensor] = []
    with torch.no_grad():
        made = op(first, *args, **kwargs)
        outs = [torch.empty_like(each) for each in tree_leaves(made)]
    out = outs[0] if isinstance(made, Tensor) else tuple(outs)
    for _ in range(2):
        read += [scale + each.nan_to_num() for each in outs]
        with torch.no_grad():
            op(first, *args, **kwargs, out=out)
        read += [scale + each for each in outs]
        with torch.no_grad():
            for each in outs:
                each.logical_not_() if each.dtype is torch.bool else each.add_(1)
    return sum(map(size_of, read))  # type: ignore[return-value]


def size_of(value: Tensor) -> Tensor:
    """A number that depends on each element, with a gradient that depends on its value."""
    number = value if value.is_floating_point() or value.is_complex() else value.double()
    return (number.sin() * number).abs().sum()


def check(body: Any, op: Any, most: int, policies: Sequence[Policy], checks: Sequence[str]) -> None:
    """Compare gradients, inputs and the generator after a region with those after a plain run.

    Args:
        body: calls the operator.
        op: the operator.
        most: number of samples.
        policies: of the regions.
        checks: how their bits are compared.
    """
    torch.manual_seed(0)
    samples = op.sample_inputs("cpu", torch.float32, requires_grad=True)
    for sample in itertools.islice(samples, most):
        fill, tensors = opened(sample)
        function = partial(body, op, fill)
        try:
            plain, again = (gradients(function, tensors) for _ in range(2))
        except (NotImplementedError, RuntimeError, TypeError, AttributeError):
            continue  # autograd refuses the write, or there is no such gradient
        if plain is None or again is None or not are_same(plain, again):
            continue
        for policy, way in itertools.product(policies, checks):
            region = partial(checkpoint, function, policy=policy, determinism_check=way)
            found = gradients(region, tensors)
            assert found is not None
            assert are_same(found, plain), (policy, way, sample)


@pytest.mark.parametrize("op", parameters(OPS))
def test_gradients_are_plain(op: Any) -> None:
    """In the first forwards of a function and in later ones, with and without comparison."""
    check(between, op, MOST_SAMPLES, [recompute_all()] * 3, ["default", "none"])


@pytest.mark.parametrize("op", parameters(IN_PLACE))
def test_in_place_variant_is_plain(op: Any) -> None:
    """The value before the write, the one after it, and the result."""
    check(in_place, op, 2, BOTH, ["bits", "none"])


@pytest.mark.parametrize("op", parameters(OUT))
def test_out_variant_is_plain(op: Any) -> None:
    """Values before and after each write."""
    check(into, op, 2, BOTH, ["bits", "none"])
