"""A region's arguments may change: its recomputation is given them as they were."""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field

import pytest
import torch

from sac_policies import MutationError, checkpoint, recompute_all, save_ops
from sac_policies.engines.contexts._arguments import parted

_Pair = namedtuple("_Pair", "keys count")


@dataclass
class _Cache:
    keys: list = field(default_factory=list)
    seen: int = 0


class _Static:
    def __init__(self) -> None:
        self.keys = torch.zeros(12, 4)
        self.at = torch.zeros((), dtype=torch.int64)


def _w() -> torch.Tensor:
    return torch.linspace(-1, 1, 16).reshape(4, 4).requires_grad_()


def _grow(held: list, x: torch.Tensor) -> torch.Tensor:
    held.append(x)
    return torch.cat(list(held)).sin()


def _object(x, w, cache):
    cache.seen += 1
    return _grow(cache.keys, x @ w) * cache.seen


def _list(x, w, cache):
    return _grow(cache, x @ w)


def _dict(x, w, cache):
    cache[len(cache)] = x @ w
    return torch.cat(list(cache.values())).sin()


def _pair(x, w, cache):
    return _grow(cache.keys, x @ w)


def _nested(x, w, cache):
    return _grow(cache["layers"][1][0].keys, x @ w)


def _static(x, w, cache):
    at = int(cache.at)
    cache.keys[at : at + x.shape[0]] = x @ w
    cache.at += x.shape[0]
    return cache.keys.sin().cos()


def _swapped(x, w, cache):
    cache.keys = torch.cat([cache.keys, x @ w])
    return cache.keys.sin()


_KINDS = {
    "object": (_object, _Cache),
    "list": (_list, list),
    "deque": (_list, lambda: deque(maxlen=3)),
    "dict": (_dict, dict),
    "ordered": (_dict, OrderedDict),
    "defaultdict": (_dict, lambda: defaultdict(list)),
    "namedtuple": (_pair, lambda: _Pair([], 0)),
    "nested": (_nested, lambda: {"layers": [None, (_Cache(),)]}),
    "static": (_static, _Static),
    "swapped": (_swapped, _Static),
}


def _run(kind: str, times: int, by_name: bool, engine: str | None, policy=None):
    function, make = _KINDS[kind]
    torch.manual_seed(0)
    x, w, cache, out = torch.randn(3, 4, requires_grad=True), _w(), make(), 0
    for _ in range(times):
        args, kwargs = ((x, w), {"cache": cache}) if by_name else ((x, w, cache), {})
        if engine is None:
            made = function(*args, **kwargs)
        else:
            made = checkpoint(function, *args, policy=policy, engine=engine, **kwargs)
        out = out + made.square().sum()
    grads = torch.autograd.grad(out, [x, w], retain_graph=True)
    return [*grads, *torch.autograd.grad(out, [x, w])], cache


# Regions without a clone are warned of.
@pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning")
@pytest.mark.parametrize("engine", ["contexts", "recipe", "auto"])
@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize(
    "policy",
    [recompute_all(), save_ops("aten.mm"), save_ops("aten.clone", "aten.mm")],
    ids=["none", "mm", "clone"],
)
@pytest.mark.parametrize("kind", _KINDS)
def test_cache_that_grows_or_is_written_gives_plains_gradients(
    kind, policy, by_name, engine, equal
):
    """Two calls with one cache, two backwards; one call where plain autograd takes only one."""
    times = 1 if kind == "static" else 2
    plain, _ = _run(kind, times, by_name, None)
    found, _ = _run(kind, times, by_name, engine, policy)
    assert equal(plain, found)


def test_recomputation_leaves_the_cache_alone():
    """After backward the caller's cache holds what the forwards put there, as objects."""
    x, w, cache = torch.randn(3, 4, requires_grad=True), _w(), _Cache()
    out = checkpoint(_object, x, w, cache, policy=recompute_all(), engine="contexts")
    before = list(cache.keys)
    out.sum().backward()
    assert cache.seen == 1
    assert [a is b for a, b in zip(cache.keys, before, strict=True)] == [True]


def test_unchanged_arguments_are_given_themselves():
    """What did not change keeps its identity: nothing is copied."""
    seen, sentinel = [], _Cache(seen=5)

    def function(x, held):
        seen.append(held)
        return x.sin().exp()

    x = torch.randn(3, requires_grad=True)
    checkpoint(function, x, sentinel, policy=recompute_all(), engine="contexts").sum().backward()
    assert len(seen) == 2
    assert seen[0] is seen[1]


def test_module_that_changes_is_given_itself():
    """A module counts on, as it does in the function's own closure; it is never copied."""
    seen = []

    def function(x, module):
        seen.append(module)
        module.calls += 1
        return module(x).sin()

    x, module = torch.randn(3, 4, requires_grad=True), torch.nn.Linear(4, 4)
    module.calls = 0
    checkpoint(function, x, module, policy=recompute_all(), engine="contexts").sum().backward()
    assert module.calls == 2
    assert [each is module for each in seen] == [True, True]


def test_tensor_that_others_wrote_to_is_refused_by_name_where_it_is_read():
    """A copy is made only of what the region itself writes."""

    def function(x, cache):
        return (x * cache.keys[:3]).sin()

    x, cache = torch.randn(3, 4, requires_grad=True), _Static()
    out = checkpoint(function, x, cache, policy=recompute_all(), engine="contexts")
    with torch.no_grad():
        cache.keys.add_(1)
    with pytest.raises(
        MutationError,
        match=r"checkpoint: argument cache\.keys was changed in place after its region had run, "
        r"but __getitem__ of the recomputation reads it as it was \(at .*\)\. Change it after",
    ):
        out.sum().backward()


def test_tensor_that_others_wrote_to_is_no_matter_where_nobody_reads_it(equal):
    """The cache of a whole model is given to each layer, which reads its own part."""

    def function(x, w, caches, at):
        return _static(x, w, caches[at])

    grads = []
    for region in (False, True):
        torch.manual_seed(0)
        x, w, caches = torch.randn(3, 4, requires_grad=True), _w(), [_Static(), _Static()]
        out = x
        for at in range(2):
            out = (
                checkpoint(function, out[:3], w, caches, at, policy=recompute_all())
                if region
                else function(out[:3], w, caches, at)
            )
        grads.append(list(torch.autograd.grad(out.sum(), [x, w])))
    assert equal(*grads)


def test_tensors_only_are_left_to_torch(monkeypatch):
    """Nothing is noted where all arguments are tensors and numbers."""
    monkeypatch.setattr("sac_policies._checkpoint.Arguments", None)
    x = torch.randn(3, requires_grad=True)
    checkpoint(
        lambda t, n: (t * n).sin(), x, 2.0, policy=recompute_all(), engine="contexts"
    ).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("parts", [1, 2])
def test_cache_that_the_region_around_holds_itself(depth, parts, equal):
    """A region inside is given it as it was, also when the one around is recomputed, and again."""

    def run(plain: bool) -> list[torch.Tensor]:
        x, w, cache = torch.ones(4, 4), _w(), [_w().detach() * 2]
        region = (lambda f, *a, **k: f(*a)) if plain else checkpoint

        def inner(t):
            for _ in range(2):
                t = region(_given, t, w, cache, policy=recompute_all(), engine="contexts")
            return t

        def nested(t, levels):
            if levels == 0:
                return inner(t) @ w
            f, policy = (lambda u: nested(u, levels - 1)), recompute_all()
            return region(f, t, policy=policy, engine="contexts").sin() @ w

        out = nested(x, depth)
        grown = len(cache)
        rows = out.square().sum(1).chunk(parts)
        grads = [torch.autograd.grad(r.sum(), w, retain_graph=r is not rows[-1])[0] for r in rows]
        assert len(cache) == grown
        return grads

    def _given(t, w, cache):
        cache.append(t @ w)
        return sum(cache[-2:]) * len(cache)

    assert equal(run(False), run(True))


def test_cache_of_an_inner_region_is_as_it_was_under_auto(gradients, equal):
    """Recomputing the region around grows no cache twice, whichever engine the inner one had."""
    a, b = (torch.randn(4, 4, requires_grad=True) for _ in range(2))

    def grow(t, cache):
        cache.append(t @ b)
        return sum(cache[-2:]) * len(cache)

    def run(p, q, region, around):
        del q
        cache = []

        def outer(t):
            return region(grow, region(grow, t.sin(), cache).cos(), cache).tanh()

        return around(outer, p)

    def region(function, *args):
        return checkpoint(function, *args, policy=save_ops("aten.mm"))

    def around(function, t):
        return checkpoint(function, t, policy=recompute_all())

    def plainly(function, *args):
        return function(*args)

    plain = gradients(lambda p, q: run(p, q, plainly, plainly), a, b)
    assert equal(gradients(lambda p, q: run(p, q, region, around), a, b), plain)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("kind", ["grown", "written"])
@pytest.mark.parametrize("inner", ["recipe", "auto", "contexts"])
def test_cache_of_a_recipe_inside_contexts_is_as_it_was(
    inner, kind, early_stop, depth, gradients, equal
):
    """The regions around run it again, whichever engine was asked for."""
    a, b = (torch.randn(4, 4, requires_grad=True) for _ in range(2))

    def grow(t, cache):
        cache["keys"].append(t @ b)
        return sum(cache["keys"][-2:]) * len(cache["keys"])

    def write(t, cache):
        cache["all"][: len(t)].add_((t @ b).sin())
        return (cache["all"] * 1.5).exp()

    used = grow if kind == "grown" else write

    def run(p, q, region, around):
        cache = {"keys": [], "all": torch.zeros(6, 4)}

        def outer(t):
            t = region(used, t.sin(), cache).cos()
            return region(used, t[:4], cache).tanh() @ q

        for _ in range(depth):
            outer = functools.partial(around, outer)
        out = outer(p)
        assert len(cache["keys"]) == (2 if kind == "grown" else 0)
        return out

    def region(function, *args):
        return checkpoint(function, *args, policy=save_ops("aten.mm"), engine=inner)

    def around(function, t):
        return checkpoint(
            function, t, policy=recompute_all(), engine="contexts", early_stop=early_stop
        )

    def plainly(function, *args):
        return function(*args)

    plain = gradients(lambda p, q: run(p, q, plainly, plainly), a, b)
    assert equal(gradients(lambda p, q: run(p, q, region, around), a, b), plain)


def test_tensors_are_taken_out_of_a_call_each_once() -> None:
    """Those in tuples and by name too; who is given one of them twice is given it twice again."""
    x, y, given = torch.ones(2), torch.zeros(2), []

    def function(*args, **kwargs):
        given.append((args, kwargs))
        return "made"

    call, tensors = parted(function, (x, 2, (y, (x, None))), {"mask": y, "name": "a"})
    assert len(tensors) == 2
    assert tensors[0] is x
    assert tensors[1] is y
    other, another = torch.ones(3), torch.ones(4)
    assert call(other, another) == "made"
    (first, two, (second, (third, none))), kwargs = given[0]
    assert (first, third, second) == (other, other, another)
    assert first is third is other
    assert second is kwargs["mask"] is another
    assert (two, none, kwargs["name"]) == (2, None, "a")


def test_call_without_its_tensors_holds_none() -> None:
    """Who keeps it for backward does not keep what it was given."""
    x = torch.ones(2)
    gone = weakref.ref(x)
    call, tensors = parted(torch.sin, ((x,),), {"out": x})
    assert call is not None
    del x, tensors
    assert gone() is None


@pytest.mark.parametrize("given", [[1], {"a": 1}, _Cache(), _Static(), _Pair(1, 2), deque()])
def test_call_whose_arguments_may_change_is_not_taken_apart(given: object) -> None:
    """A recomputation is to find their contents as they were."""
    assert parted(torch.sin, (torch.ones(2), given), {}) is None
    assert parted(torch.sin, (), {"cache": (given,)}) is None
