"""Unusual modules, arguments, results and callers."""

from __future__ import annotations

import copy
import sys
import threading
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from ckpt_wrap import OffloadStats, is_recomputing, offload_, offload_stats

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
    """A layer, followed by the function under test."""

    def __init__(self, call) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.call = call

    def forward(self, *args, **kwargs):
        return self.call(lambda x: torch.tanh(self.linear(x)), *args, **kwargs)


def _x():
    return torch.linspace(-1, 1, 8).reshape(2, 4).requires_grad_()


def _block():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


def _generated(run, x, scale):
    return (run(x) * factor for factor in (1, scale))


def _nested(run, batch, extra=None):
    y = run(batch["a"][0]) * batch["pair"].first
    return {"a": y, "none": None, "list": [batch["pair"].first * extra["n"][0], 1, (y * 2,)]}


def _data_class(run, frozen):
    batch = frozen.inner
    assert batch.note == "kept"
    return Batch(run(batch.x) * batch.scale, batch.scale * 2)


def _product(run, x, scale):
    return run(x) * scale


FORMS = {  # what forward does, and how it is called
    "positional": (_product, lambda m, x, s: m(x, s)),
    "keyword only": (
        lambda run, x, *, scale=None: run(x) * scale,
        lambda m, x, s: m(x, scale=s),
    ),
    "all keywords": (_product, lambda m, x, s: m(scale=s, x=x)),
    "nested": (
        _nested,
        lambda m, x, s: m(OrderedDict(a=[x, 1], pair=Pair(s, None)), extra={"n": [2]}),
    ),
    "data class": (_data_class, lambda m, x, s: m(Frozen(Batch(x, s)))),
    "generator": (_generated, lambda m, x, s: list(m(x, s))),
    "its input": (lambda run, x, s: (x, run(x) * s), lambda m, x, s: m(x, s)),
    "a view": (lambda run, x, s: (run(x) * s).view(-1)[1:], lambda m, x, s: m(x, s)),
    "a scalar": (lambda run, x, s: (run(x) * s).sum(), lambda m, x, s: m(x, s)),
    "complex": (lambda run, x, s: torch.fft.fft(run(x) * s), lambda m, x, s: m(x, s).abs()),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("inputs_require_grad", [True, False])
def test_arguments_and_results_of_any_form(layer, form, inputs_require_grad, gradients, equal):
    """Gradients match the plain module, for tensors anywhere and if no input requires grad."""
    forward, call = FORMS[form]
    plain = Body(forward)
    changed = layer(copy.deepcopy(plain))
    x = _x().detach().requires_grad_(inputs_require_grad)
    scale = torch.full((2, 4), 0.5, requires_grad=inputs_require_grad)
    expected = gradients(plain, lambda m: call(m, x, scale), x, scale)
    assert len(expected) == (4 if inputs_require_grad else 2)
    assert equal(expected, gradients(changed, lambda m: call(m, x, scale), x, scale))


def test_packed_sequences_are_rebuilt(layer, gradients, equal):
    """A packed sequence is a named tuple with its own constructor; it can be input and output."""

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
    changed = layer(copy.deepcopy(plain))
    assert equal(gradients(plain, call, x), gradients(changed, call, x))


def test_keywords_named_like_options_reach_the_module(layer):
    """A keyword argument of the module is never taken for an option."""
    names = ("debug", "early_stop", "determinism_check", "context_fn", "preserve_rng_state")
    names += ("use_reentrant", "function", "args", "kwargs", "module", "options")
    given, seen = dict.fromkeys(names, "mine"), []

    def forward(run, x, **kwargs):
        seen.append(kwargs)
        return run(x)

    layer(Body(forward))(_x(), **given).sum().backward()
    assert all(kwargs == given for kwargs in seen)
    assert seen


def test_no_result_and_no_input(layer):
    """None is returned unchanged; a module without inputs gets its gradients."""
    assert layer(Body(lambda run, x: None))(_x()) is None
    module = layer(Body(lambda run: run(torch.ones(2, 4))))
    module().sum().backward()
    assert all(p.grad is not None for p in module.parameters())


def test_gradients_of_gradients_and_several_backwards(layer, equal):
    """As in the plain module; without `retain_graph`, a second backward raises torch's error."""

    def values(module, x):
        loss = module(x).sum()
        first = torch.autograd.grad(loss, x, retain_graph=True)
        again = torch.autograd.grad(loss, x, create_graph=True)
        slope = again[0].pow(2).sum()
        second = torch.autograd.grad(slope, [x, *module.parameters()][:2], retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
        return [*first, *again, *second, x.grad]

    plain = _block()
    assert equal(values(plain, _x()), values(layer(copy.deepcopy(plain)), _x()))


@pytest.mark.parametrize("in_recomputation", [False, True])
def test_an_exception_comes_out_and_leaves_the_module_usable(layer, offloads, in_recomputation):
    """The exception is raised in forward, and in recomputation where there is one."""
    armed = [True]

    def call(run, x):
        if armed and is_recomputing() is in_recomputation:
            raise KeyError("the module's own")
        return run(x)

    module = layer(Body(call))
    if offloads and in_recomputation:
        module(_x()).sum().backward()
    else:
        with pytest.raises(KeyError, match="the module's own"):
            module(_x()).sum().backward()
    armed.clear()
    module(_x()).sum().backward()
    assert not is_recomputing()


def test_threads_do_not_disturb_each_other(layer):
    """Four threads with one module each: plain gradients, and every copy-out has a copy-in."""
    plain, x = _block(), _x()
    plain(x).sum().backward()
    failures = []

    def train(module):
        for _ in range(5):
            mine = _x()
            module.zero_grad()
            module(mine).sum().backward()
            if not torch.equal(mine.grad, x.grad) or is_recomputing():
                failures.append(mine.grad)
        if offload_stats(module).bytes_away:
            failures.append(offload_stats(module))

    modules = [layer(_block()) for _ in range(4)]
    threads = [threading.Thread(target=train, args=(module,)) for module in modules]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures


def test_threads_with_one_folder_keep_their_own_order(tmp_path):
    """Each of four alternating threads makes the same copies as it does alone.

    A thread that fetched or held another thread's storages would change the counts.
    """
    expected = OffloadStats(
        copies_out=10,  # the input of Linear and the result of Tanh, five times
        bytes_out=10 * 32,
        copies_in=10,
        bytes_in=10 * 32,
        shared=0,
        kept=5,  # the weight, five times
        bytes_away=0,
        peak_bytes_away=64,
        late=10,  # the first call in backward has no prefetched storages
    )
    failures = []

    def train(module):
        try:
            for _ in range(5):
                module(_x()).sum().backward()
        except BaseException as error:
            failures.append(error)
        if offload_stats(module) != expected:
            failures.append(offload_stats(module))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(20):
            modules = [offload_(_block(), to=tmp_path, min_bytes=1) for _ in range(4)]
            threads = [threading.Thread(target=train, args=(module,)) for module in modules]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
    finally:
        sys.setswitchinterval(before)
    assert not failures


def test_transforms_of_torch_func(layer):
    """Every transform gives the result of the plain module."""
    plain, changed = _block(), layer(_block())
    x = _x().detach()
    for transform in (torch.func.jacrev, torch.func.jacfwd, torch.func.vmap):
        torch.testing.assert_close(transform(changed)(x), transform(plain)(x))
    for direction in (torch.func.jvp, torch.func.vjp):
        tangents = ((x,), (x,)) if direction is torch.func.jvp else (x,)
        torch.testing.assert_close(direction(changed, *tangents)[0], direction(plain, *tangents)[0])


def test_moving_and_freezing_after_the_change(layer):
    """dtype, train mode and requires_grad reach every parameter."""
    module = layer(_block()).double().eval().requires_grad_(False)
    assert not module(_x().detach().double()).requires_grad
    assert {p.dtype for p in module.parameters()} == {torch.float64}
    assert not any(m.training for m in module.modules())
