"""Options of torch's checkpoint mean the same in every engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac_policies
from sac_policies import EngineError, MutationError, checkpoint, recompute_all
from sac_policies._options import compares, debugs, refused_option, split
from sac_policies.engines.recipe import _rebuilt, _recipes
from sac_policies.engines.recipe._proof import proof_of
from sac_policies.engines.recipe.regions import _region, _repeated

from ._recipe import leaf

Engine = pytest.mark.parametrize("engine", ["recipe", "contexts"])
FORWARDS = pytest.mark.parametrize("before", [0, 3], ids=["first", "followed"])
UNCHECKED = {"determinism_check": "none"}


def _body(x: Tensor) -> Tensor:
    return x.sin().cos().exp()


def _large() -> Tensor:
    """More than is copied."""
    return leaf(128, 64)


def _changed(run: Callable[[Tensor], Tensor]) -> Tensor | None:
    """The gradient after a change past the version counter, between forward and backward."""
    x = _large()
    out = run(x)
    x.data.add_(1.0)
    out.sum().backward()
    return x.grad


@Engine
@FORWARDS
def test_without_a_check_changes_past_version_counters_go_unnoticed(
    engine: str, before: int
) -> None:
    """As torch's "none" says; beside it the default notices them, with the same policy."""

    def run(x: Tensor, **options: Any) -> Tensor:
        return checkpoint(_body, x, policy=recompute_all(), engine=engine, **options)

    for _ in range(before):
        for options in (UNCHECKED, {}):
            run(_large(), **options).sum().backward()
    assert _changed(lambda x: run(x, **UNCHECKED)) is not None
    with pytest.raises(MutationError):
        _changed(run)


def test_plan_is_followed_without_a_check() -> None:
    """Plans replay under every rule, whatever a policy says."""
    plan = sac_policies.solve(sac_policies.profile(_body, _large(), repeats=1), "0%")
    assert plan
    options: dict[str, Any] = {"policy": plan, "engine": "recipe"}
    assert _changed(lambda x: checkpoint(_body, x, **options, **UNCHECKED)) is not None
    with pytest.raises(MutationError):
        _changed(lambda x: checkpoint(_body, x, **options))


@Engine
def test_without_a_check_gradients_are_those_of_no_checkpointing(engine: str) -> None:
    """Whatever a norm's eps is: nothing is guessed where nobody looks."""
    norm = nn.Sequential(
        nn.LayerNorm(64, eps=1e-5), nn.GELU(), nn.LayerNorm(64, eps=3e-4), nn.Linear(64, 64)
    )
    for _ in range(4):
        x, y = leaf(128, 64), leaf(128, 64)
        norm.zero_grad()
        norm(y).square().sum().backward()
        plain = [y.grad, *(p.grad for p in norm.parameters())]
        norm.zero_grad()
        out = checkpoint(norm, x, policy=recompute_all(), engine=engine, **UNCHECKED)
        out.square().sum().backward()
        ours = [x.grad, *(p.grad for p in norm.parameters())]
        assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))  # type: ignore[arg-type]


@Engine
def test_changes_that_a_version_counter_shows_are_noticed_all_the_same(engine: str) -> None:
    """That is autograd's own check."""
    x = _large()
    given = x * 1.0
    out = checkpoint(_body, given, policy=recompute_all(), engine=engine, **UNCHECKED)
    with torch.no_grad():
        given.add_(1.0)
    with pytest.raises(MutationError):
        out.sum().backward()


W, BIAS = leaf(4, 4), leaf(4)
BESIDE: dict[str, tuple[Tensor, Callable[[Tensor], Tensor]]] = {
    "behind an edge": (W, lambda x: (x + W).sin()),
    "behind two, and a view": (W, lambda x: (x + W.t()).mul(x).sin()),
    "of the node": (BIAS, lambda x: torch.addmm(BIAS, x, W).sin()),
    "of a node behind an edge": (
        BIAS,
        lambda x: (torch.addmm(BIAS, x, W.detach()) + x).view(2, 8).sin(),
    ),
}


@FORWARDS
@pytest.mark.parametrize("what", BESIDE)
def test_without_a_check_no_leaf_that_a_replay_reads_may_be_written_to(
    before: int, what: str
) -> None:
    """Autograd does not save it and has no check; with ours it is a copy, or compared."""
    beside, body = BESIDE[what]
    options: dict[str, Any] = {"policy": recompute_all(), "engine": "recipe", **UNCHECKED}
    for _ in range(before):
        checkpoint(body, leaf(4, 4), **options).sum().backward()
    out, again = (checkpoint(body, leaf(4, 4), **options) for _ in range(2))
    out.sum().backward()
    with torch.no_grad():
        beside.add_(0.0)
    with pytest.raises(MutationError, match=r"leaf of shape \(4.*\) was changed in place"):
        again.sum().backward()


@FORWARDS
def test_without_a_check_nothing_is_copied(monkeypatch: pytest.MonkeyPatch, before: int) -> None:
    """Of the parameters that norms and products read."""
    layers = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.LayerNorm(16), nn.SiLU())
    copied = []
    for module in (_recipes, _repeated):
        monkeypatch.setattr(module, "small_copy", lambda tensor: copied.append(tensor))
    options: dict[str, Any] = {"policy": recompute_all(), "engine": "recipe"}
    for _ in range(before):
        checkpoint(layers, leaf(4, 16), **options, **UNCHECKED).sum().backward()
    assert not copied
    checkpoint(layers, leaf(4, 16), **options)
    assert copied


@FORWARDS
@pytest.mark.parametrize("is_inside", [False, True], ids=["alone", "in contexts"])
def test_without_a_check_nothing_is_summed_up(
    monkeypatch: pytest.MonkeyPatch, before: int, is_inside: bool
) -> None:
    """That is what the option is for."""
    asked = []

    def counted(tensor: Tensor) -> Any:
        asked.append(tensor.shape)
        return proof_of(tensor)

    for module in (_rebuilt, _region, _repeated):
        monkeypatch.setattr(module, "proof_of", counted)

    def region(x: Tensor, options: dict[str, Any]) -> Tensor:
        return checkpoint(_body, x, policy=recompute_all(), engine="recipe", **options)

    def step(**options: Any) -> int:
        asked.clear()
        if is_inside:
            around = {"policy": recompute_all(), "engine": "contexts"}
            checkpoint(region, _large(), options, **around).sum().backward()
        else:
            region(_large(), options).sum().backward()
        return len(asked)

    for _ in range(before):
        step()
        step(**UNCHECKED)
    assert step(**UNCHECKED) == 0
    assert step() > 0


def test_region_inside_checks_by_its_own_option() -> None:
    """Its values are its own, and so is what is said of them."""

    def inner(x: Tensor, **options: Any) -> Tensor:
        return checkpoint(_body, x.exp(), policy=recompute_all(), **options)

    def run(x: Tensor, outer: dict[str, Any], own: dict[str, Any]) -> Tensor:
        return checkpoint(lambda t: inner(t.sin(), **own), x, policy=recompute_all(), **outer)

    for outer, own in ((UNCHECKED, {}), ({}, UNCHECKED), (UNCHECKED, UNCHECKED), ({}, {})):
        x, y = _large(), _large()
        run(x, outer, own).sum().backward()
        _body(y.sin().exp()).sum().backward()
        assert torch.equal(x.grad, y.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("engine", ["auto", "recipe", "contexts"])
@pytest.mark.parametrize("check", ["banana", None, True, torch.ones(2)], ids=str)
def test_unknown_check_is_refused(engine: str, check: Any) -> None:
    """By every engine, before anything runs; torch's error knows nothing of policies."""
    with pytest.raises(EngineError, match=r"determinism_check .+ one of \('default', 'none'\)"):
        checkpoint(_body, _large(), policy=recompute_all(), engine=engine, determinism_check=check)


def test_options_are_parted_from_what_the_function_takes() -> None:
    """By name, as torch does."""
    given = {"scale": 2, "debug": True, "early_stop": False}
    assert split(given) == ({"scale": 2}, {"debug": True, "early_stop": False})
    assert split({}) == ({}, {})


def test_what_options_say() -> None:
    """Where none is given torch's defaults hold."""
    assert debugs({"debug": True}) and not debugs({})
    assert compares({}) and compares({"determinism_check": "default"})
    assert not compares(UNCHECKED)
    assert not refused_option({"early_stop": False, "determinism_check": "none"})
    assert "reentrant" in refused_option({"use_reentrant": True})
    assert "decide the same" in refused_option({"context_fn": None})
