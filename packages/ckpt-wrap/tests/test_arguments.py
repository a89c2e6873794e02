"""Arguments and results of any form: both runs see the same tensors in them."""

from __future__ import annotations

import copy
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

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
