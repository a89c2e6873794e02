"""Recompute correctness, for both implementations and both layers."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import CheckpointError, set_checkpoint_early_stop

from ckpt_wrap import (
    CheckpointImpl,
    OptionError,
    RecomputeError,
    checkpoint_,
    checkpoint_wrapper,
    is_recomputing,
)

IMPLS = list(CheckpointImpl)
WRAPPERS = [
    pytest.param(partial(make, checkpoint_impl=impl), id=f"{make.__name__}-{impl.name}")
    for make in (checkpoint_, checkpoint_wrapper)
    for impl in IMPLS
]
Pair = namedtuple("Pair", "first second")


@dataclass
class Batch:
    x: torch.Tensor
    scale: torch.Tensor
    note: str = "kept"


@dataclass(frozen=True)
class Frozen:
    inner: Batch


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def compute(self, x, scale):
        return torch.nn.functional.dropout(torch.tanh(self.linear(x)) * scale, 0.5)


class Positional(Body):
    def forward(self, x, scale):
        return self.compute(x, scale)


class Keyword(Body):
    def forward(self, x, *, scale=None):
        return self.compute(x, scale)


class Nested(Body):
    def forward(self, batch, extra=None):
        x = batch["a"][0]
        return {"out": [self.compute(x, batch["pair"].first)], "none": None, "n": 3}


class DataClass(Body):
    def forward(self, frozen):
        batch = frozen.inner
        assert batch.note == "kept"
        return Batch(self.compute(batch.x, batch.scale), batch.scale * 2)


CALLS = {
    "positional": (Positional, lambda m, x, s: m(x, s)),
    "keyword": (Keyword, lambda m, x, s: m(x, scale=s)),
    "all keywords": (Positional, lambda m, x, s: m(scale=s, x=x)),
    "nested": (
        Nested,
        lambda m, x, s: m(OrderedDict(a=[x, 1], pair=Pair(s, None)), extra={"n": [1]})["out"],
    ),
    "dataclass": (DataClass, lambda m, x, s: m(Frozen(Batch(x, s)))),
}


@pytest.mark.parametrize("form", CALLS)
@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("inputs_require_grad", [True, False])
def test_gradients_equal_the_plain_modules_bit_for_bit(
    wrap, form, inputs_require_grad, gradients, equal
):
    """Wherever tensors stand in arguments and results, and if none requires grad."""
    make, call = CALLS[form]
    plain = make()
    wrapped = wrap(copy.deepcopy(plain))
    x = torch.randn(3, 6, requires_grad=inputs_require_grad)
    scale = torch.randn(3, 6, requires_grad=inputs_require_grad)
    expected = gradients(plain, lambda m: call(m, x, scale), x, scale)
    assert len(expected) == 4 if inputs_require_grad else 2
    assert equal(expected, gradients(wrapped, lambda m: call(m, x, scale), x, scale))


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_packed_sequences_are_rebuilt(wrap, gradients, equal):
    """A packed sequence, a named tuple with a constructor of its own, goes in and out."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(4, 4, batch_first=True)

        def forward(self, packed):
            return self.rnn(packed)[0]

    x = torch.randn(2, 5, 4, requires_grad=True)

    def call(module):
        packed = pack_padded_sequence(x, torch.tensor([5, 3]), batch_first=True)
        return pad_packed_sequence(module(packed), batch_first=True)[0]

    plain = Recurrent()
    wrapped = wrap(copy.deepcopy(plain))
    assert equal(gradients(plain, call, x), gradients(wrapped, call, x))


@pytest.mark.parametrize("place", ["positional", "keyword", "nested"])
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_input_changed_in_place_is_an_error(wrap, place):
    """An input changed between forward and backward raises wherever it stood."""
    module = wrap({"positional": Positional, "keyword": Keyword, "nested": Nested}[place]())
    x, scale = torch.randn(3, 6, requires_grad=True), torch.randn(3, 6)
    form = {"positional": "positional", "keyword": "keyword", "nested": "nested"}[place]
    result = CALLS[form][1](module, x, scale)
    scale.add_(1)
    result = result[0] if isinstance(result, list) else result
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_input_changed_in_place_names_the_module():
    """The error of this package's own recompute path says where, and what to do."""
    scale = torch.randn(3, 6)
    result = checkpoint_(Keyword())(torch.randn(3, 6, requires_grad=True), scale=scale)
    scale.add_(1)
    sentence = "an input of module Keyword has been modified by an inplace operation since"
    with pytest.raises(RecomputeError, match=sentence) as raised:
        result.sum().backward()
    assert str(raised.value).endswith("Change a clone of it, or change it after backward.")


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_keywords_named_like_options_reach_the_module(wrap):
    """No keyword of the module is taken for an option."""

    class Echo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x, **kwargs):
            self.seen = kwargs
            return x * self.weight

    given = dict.fromkeys(
        [
            "debug",
            "early_stop",
            "determinism_check",
            "context_fn",
            "preserve_rng_state",
            "use_reentrant",
            "function",
            "self",
            "args",
            "kwargs",
            "module",
            "options",
        ],
        "mine",
    )
    given.pop("self")  # nn.Module.__call__ has a parameter of that name
    module = wrap(Echo())
    module(torch.ones(2, requires_grad=True), **given).sum().backward()
    assert module.seen == given


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_batch_norm_advances_once(wrap):
    """Running statistics after a step are those of the plain module, and the same tensors."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None))
    wrapped = wrap(copy.deepcopy(plain))
    counter = wrapped[1].running_mean
    x = torch.randn(8, 4, requires_grad=True)
    for module in (plain, wrapped):
        for _ in range(3):
            module(x).sum().backward()
    for name, buffer in plain.named_buffers():
        assert torch.equal(buffer, dict(wrapped.named_buffers())[name]), name
    assert wrapped[1].running_mean is counter


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_is_recomputing_only_while_recomputing(wrap):
    """False in forward, True in the second run, False again after."""

    class Watch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.seen = []

        def forward(self, x):
            self.seen.append(is_recomputing())
            return torch.tanh(self.linear(x))

    module = wrap(Watch())
    module(torch.randn(1, 2, requires_grad=True)).sum().backward()
    assert module.seen == [False, True]
    assert not is_recomputing()


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_nothing_is_done_where_gradients_are_off(wrap, context, monkeypatch):
    """The module just runs, without hooks."""
    module = wrap(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    monkeypatch.setattr("ckpt_wrap.checkpointing._checkpoint.capture", None)
    monkeypatch.setattr("ckpt_wrap.checkpointing._checkpoint.checkpoint_reentrant", None)
    with context():
        assert not module(torch.ones(1, 2)).requires_grad


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_nothing_is_kept_where_nothing_requires_grad(wrap):
    """Not even the inputs, which hooks around the call would see."""
    module = wrap(nn.Sequential(nn.Linear(2, 2), nn.Tanh())).requires_grad_(False)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(packed.append, lambda t: t):
        result = module(x := torch.ones(1, 2))
    assert not result.requires_grad
    assert not packed
    gone = weakref.ref(x)
    del x
    assert gone() is None


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_torch_func_differentiates_through(wrap):
    """`torch.func.grad` and `vmap` of it give autograd's gradients."""
    module = wrap(nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    x = torch.randn(4, 3, requires_grad=True)
    module(x).sum().backward()
    slope = torch.func.grad(lambda t: module(t).sum())
    torch.testing.assert_close(slope(x.detach()), x.grad)
    torch.testing.assert_close(torch.func.vmap(slope)(x.detach()), x.grad)


def test_random_state_outside_is_not_touched(block_class):
    """Recomputing leaves the random state as backward found it."""
    module = checkpoint_(block_class())
    loss = module(torch.randn(2, 8, requires_grad=True)).sum()
    before = torch.get_rng_state()
    loss.backward()
    assert torch.equal(before, torch.get_rng_state())


def test_preserve_rng_state_false_does_not_replay(block_class):
    """Without preserving, dropout differs in recomputation: the option has an effect."""
    torch.manual_seed(0)
    masks = []
    module = checkpoint_(block_class(64), preserve_rng_state=False)
    module.dropout.register_forward_hook(lambda _, __, out: masks.append(out == 0))
    module(torch.randn(8, 64, requires_grad=True)).sum().backward()
    assert not torch.equal(*masks)


def test_autocast_and_default_device_are_replayed():
    """A recomputation after leaving autocast and `torch.device` runs as if inside."""

    class Notes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.seen = []

        def forward(self, x):
            y = self.linear(x)
            self.seen.append((y.dtype, torch.get_default_device().type))
            return torch.tanh(y) * 2

    module = checkpoint_(Notes())
    x = torch.randn(1, 2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
        loss = module(x).sum()
    loss.backward()
    assert module.seen == [(torch.bfloat16, "meta")] * 2


def test_early_stop_ends_at_the_last_saved_tensor(block_class):
    """What comes after the last saved tensor is not run again, unless asked to be."""
    ran = []

    class Tail(nn.Module):
        def forward(self, x):
            ran.append("tail")
            return x + 1

    for early_stop, expected in ((True, ["tail"]), (False, ["tail"] * 2)):
        ran.clear()
        module = checkpoint_(nn.Sequential(block_class(), Tail()), early_stop=early_stop)
        module(torch.randn(1, 8, requires_grad=True)).sum().backward()
        assert ran == expected
    ran.clear()
    module = checkpoint_(nn.Sequential(block_class(), Tail()))
    with set_checkpoint_early_stop(False):
        loss = module(torch.randn(1, 8, requires_grad=True)).sum()
    loss.backward()
    assert ran == ["tail"] * 2


def test_nested_regions_recompute_outer_then_inner(block_class, gradients, equal):
    """A checkpointed module inside a checkpointed module has the plain gradients."""
    plain = nn.Sequential(block_class(), nn.Sequential(block_class(), block_class()))
    wrapped = copy.deepcopy(plain)
    checkpoint_(checkpoint_(wrapped)[1])
    checkpoint_(wrapped[1][0])
    x = torch.randn(2, 8, requires_grad=True)
    assert equal(gradients(plain, lambda m: m(x), x), gradients(wrapped, lambda m: m(x), x))


def test_second_backward_and_double_backward(equal):
    """`retain_graph`, `autograd.grad` and gradients of gradients agree with the plain module."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1), nn.Sigmoid())
    wrapped = checkpoint_(copy.deepcopy(plain))
    x = torch.randn(2, 4, requires_grad=True)

    def values(module):
        loss = module(x).sum()
        first = torch.autograd.grad(loss, x, retain_graph=True)
        again = torch.autograd.grad(loss, x, create_graph=True)
        second = torch.autograd.grad(again[0].pow(2).sum(), [x, *module.parameters()][:3])
        return [*first, *again, *second]

    assert equal(values(plain), values(wrapped))


def test_backward_inside_the_region(equal):
    """A module that differentiates inside its own forward can be checkpointed."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            y = torch.tanh(self.linear(x))
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return y * slope

    plain = Inner()
    wrapped = checkpoint_(copy.deepcopy(plain))

    def values(module):
        x = torch.linspace(0, 1, 6).reshape(2, 3).requires_grad_()
        module(x).sum().backward()
        return [x.grad, module.linear.weight.grad]

    assert equal(values(plain), values(wrapped))


def test_nothing_stays_alive_after_backward(block_class):
    """No reference cycle keeps an input or a recomputed tensor."""
    gc.collect()
    gc.disable()
    try:
        module = checkpoint_(block_class())
        x = torch.randn(2, 8, requires_grad=True) * 1
        ref = weakref.ref(x)
        module(x).sum().backward()
        del x
        assert ref() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("early_stop", [True, False])
def test_recomputed_tensors_are_given_up_when_read(early_stop):
    """Even where the graph is retained, and without help from the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        module = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh())
        made = []
        for layer in module:
            layer.register_forward_hook(
                lambda m, args, result: made.append(StorageWeakRef(result.untyped_storage()))
            )
        checkpoint_(module, early_stop=early_stop)
        loss = module(torch.randn(2, 3, requires_grad=True)).sum()
        loss.backward(retain_graph=True)
        assert len(made) >= 6
        assert all(storage.expired() for storage in made)
    finally:
        gc.enable()


def test_what_a_region_saves_is_its_inputs(block_class):
    """Outer saved-tensor hooks see each input once, keyword inputs too, and nothing else."""
    module = checkpoint_(block_class())
    x, scale = torch.randn(2, 8, requires_grad=True), torch.randn(2, 8)
    packed = []

    def pack(tensor):
        packed.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        module(x, scale=scale)
    assert [t.data_ptr() for t in packed] == [x.data_ptr(), scale.data_ptr()]


class Fickle(nn.Module):
    """Saves something else in its second run."""

    def __init__(self, second) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.runs = 0
        self.second = second

    def forward(self, x):
        self.runs += 1
        return torch.tanh(x * self.weight) if self.runs == 1 else self.second(x, self.weight)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (lambda x, w: x.sum(), "saved 0 tensors in recomputation, but 3 in forward"),
        (lambda x, w: torch.tanh(x[:, :2] * w[:2]), "saved tensor 0 of module Fickle is"),
    ],
)
def test_a_forward_that_does_not_repeat_is_an_error(second, message):
    """Fewer saved tensors or other shapes in recomputation raise and name the module."""
    loss = checkpoint_(Fickle(second))(torch.ones(2, 3, requires_grad=True)).sum()
    with pytest.raises(RecomputeError, match=message) as error:
        loss.backward()
    assert isinstance(error.value, CheckpointError)


def test_more_saved_tensors_are_an_error_without_early_stop():
    """With `early_stop=False` a longer recomputation is noticed."""
    module = checkpoint_(Fickle(lambda x, w: torch.tanh(torch.tanh(x * w))), early_stop=False)
    with pytest.raises(RecomputeError, match="saved more tensors in recomputation than the 3"):
        module(torch.ones(2, 3, requires_grad=True)).sum().backward()


def test_fewer_saved_tensors_are_an_error_even_unchecked():
    """`determinism_check="none"` allows other shapes, but a missing tensor is still an error."""
    module = checkpoint_(Fickle(lambda x, w: x.sum()), determinism_check="none")
    with pytest.raises(RecomputeError, match="saved fewer tensors"):
        module(torch.ones(2, 3, requires_grad=True)).sum().backward()


def test_a_module_that_swallows_exceptions_still_stops_early():
    """`except Exception` in the module cannot make recomputation run on."""

    class Swallows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            try:
                y = torch.tanh(x * self.weight)
            except Exception:
                y = torch.sin(x * self.weight)
            return y

    module = Swallows()
    x = torch.ones(2, 3, requires_grad=True)
    module(x).sum().backward()
    expected = module.weight.grad.clone()
    module.zero_grad()
    checkpoint_(module)(x).sum().backward()
    assert torch.equal(expected, module.weight.grad)


def test_a_forward_that_raises_leaves_the_module_usable(block_class):
    """An exception in forward passes through and nothing is left behind."""
    module = checkpoint_(block_class())
    with pytest.raises(RuntimeError):
        module(torch.randn(2, 5))
    module(torch.randn(2, 8, requires_grad=True)).sum().backward()
    assert module.linear.weight.grad is not None


class Careless(nn.Module):
    """Catches every exception of its body and goes on, or raises another."""

    def __init__(self, then=None) -> None:
        super().__init__()
        self.body = Fickle(lambda x, w: torch.tanh(x[:, :2] * w[:2]))
        self.then = then

    def forward(self, x):
        try:
            return self.body(x)
        except Exception:
            if self.then is not None:
                raise self.then from None
            return x


@pytest.mark.parametrize("then", [None, KeyError("other")])
def test_a_module_that_swallows_exceptions_cannot_hide_a_difference(then):
    """The error is raised after all, not lost together with the gradients."""
    loss = checkpoint_(Careless(then))(torch.ones(2, 3, requires_grad=True)).sum()
    with pytest.raises(RecomputeError, match="saved tensor 0 of module Careless is"):
        loss.backward()


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_scripted_modules_inside_a_wrapper():
    """TorchScript saves other tensors once it has optimised: an error says so, then it works."""
    wrapped = checkpoint_wrapper(torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh())))
    loss = wrapped(torch.randn(3, 4, requires_grad=True)).sum()
    with contextlib.suppress(RecomputeError):
        loss.backward()
    wrapped(torch.randn(3, 4, requires_grad=True)).sum().backward()
    assert wrapped.get_parameter("0.weight").grad is not None


def test_debug_reports_operators():
    """`debug=True` shows what both runs did when they differ."""
    module = checkpoint_(Fickle(lambda x, w: torch.tanh(x[:, :2] * w[:2])), debug=True)
    loss = module(torch.ones(2, 3, requires_grad=True)).sum()
    with pytest.raises(CheckpointError, match="Operations executed during recomputation"):
        loss.backward()


def test_context_fn_and_reentrant_conflict():
    """The option that cannot work is named when the module is wrapped."""
    with pytest.raises(OptionError, match="'context_fn' is set with checkpoint_impl"):
        checkpoint_(nn.Linear(1, 1), checkpoint_impl=CheckpointImpl.REENTRANT, context_fn=dict)


def test_a_context_that_suppresses_the_modules_exception_is_an_error(block_class):
    """There would be no result to return."""
    module = checkpoint_(
        block_class(),
        context_fn=lambda: (contextlib.suppress(RuntimeError), contextlib.nullcontext()),
    )
    with pytest.raises(RecomputeError, match="suppressed an exception"):
        module(torch.randn(2, 5, requires_grad=True))
