"""One call is made again with what it was given, and keeps nothing it does not need for that."""

from __future__ import annotations

import copy
import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from ckpt_wrap import RecomputeError
from ckpt_wrap._where import Where
from ckpt_wrap.checkpointing._ambient_state import capture
from ckpt_wrap.checkpointing._call import Arguments, Call, _each_once, refused_error
from ckpt_wrap.checkpointing._module_state import ModuleState
from ckpt_wrap.checkpointing._object_tensors import Refused


def _call(function, *args, **kwargs):
    """A call, as `Checkpoint` makes it of a function."""
    arguments = Arguments(args, kwargs)
    arguments.tensors += arguments.objects.begin()
    return Call(
        function,
        None,
        Where(function, "", "checkpoint_"),
        arguments,
        capture(arguments.tensors, preserve_rng_state=True),
        nullcontext(),
        ModuleState(None),
    )


def _run(call, *args, keep=True, **kwargs):
    """Make it for the first time, with the arguments themselves."""
    call.begin()
    result = call.function(*args, **kwargs)
    call.end(keep=keep)
    return result


def _given(*args, **kwargs):
    return args, kwargs


def test_the_second_run_is_given_the_same():
    """Tensors wherever they stand, and everything else."""
    x = torch.ones(2, requires_grad=True) * 1
    args, kwargs = (x, [x, 3], "a"), {"b": {"c": (x,)}, "d": None}
    call = _call(_given, *args, **kwargs)
    _run(call, *args, **kwargs)
    (first, (second, three), word), named = call.again()
    assert torch.equal(first, x)
    assert first is second is named["b"]["c"][0]
    assert (three, word, named["d"]) == (3, "a", None)


def test_a_random_state_is_that_of_the_first_run():
    """As captured before it; what is drawn in between stays drawn."""
    call = _call(torch.rand_like, torch.ones(3))
    first = _run(call, torch.ones(3))
    torch.rand(1)
    assert torch.equal(call.again(), first)


def test_a_call_that_saved_nothing_keeps_nothing():
    """Neither tensors nor objects among the arguments."""

    class Note:
        pass

    for keep in (False, True):
        x, note = torch.ones(2), Note()
        gone = weakref.ref(note)
        call = _call(_given, x, note)
        _run(call, x, note, keep=keep)
        del x, note
        gc.collect()
        assert (gone() is None) is not keep
        assert call.arguments.tensors == []
        assert bool(call._saved) is keep


@pytest.mark.parametrize("when", ["in the first run", "since"])
def test_a_tensor_that_was_changed_is_refused(when):
    """By the first run itself, or by anybody since; the error names the function."""

    def double(x):
        return x.mul_(2) if when == "in the first run" else x * 2

    x = torch.ones(2)
    call = _call(double, x)
    _run(call, x)
    if when == "since":
        x.mul_(2)
    with pytest.raises(RecomputeError) as caught:
        call.again()
    assert str(caught.value) == (
        "ckpt_wrap.checkpoint_: an input of module double has been modified by an inplace "
        "operation since the forward, but recomputation needs it as it was. Change a clone of "
        "it, or change it after backward."
    )


def test_one_that_was_changed_before_is_not_refused():
    """What counts is what it was when the first run began."""
    x = torch.ones(2).add_(1)
    call = _call(_given, x)
    _run(call, x)
    assert torch.equal(call.again()[0][0], x)


def test_a_second_run_inside_the_first_has_the_inputs_as_they_are():
    """They have not been saved by then."""
    x = torch.ones(2)
    call = _call(lambda t: t, x)
    call.begin()
    x.add_(1)
    assert call.again() is x


def test_tensors_of_inference_mode_are_had_again():
    """They count no versions, and autograd does not save them."""
    with torch.inference_mode():
        x = torch.ones(2)
    call = _call(_given, x)
    _run(call, x)
    assert call.again()[0][0] is x


def test_hooks_that_the_first_run_registered_have_numbers():
    """By which the second one knows that there are any."""
    x = torch.ones(2, requires_grad=True) * 1

    def hooked(t):
        t.register_hook(lambda grad: grad)
        t.register_hook(lambda grad: grad)
        return t

    call = _call(hooked, x)
    _run(call, x)
    assert len(call.hooks) == 2
    assert call.again() is not x
    none = _call(_given, x)
    _run(none, x)
    assert not none.hooks


def test_a_refusal_is_told_with_what_and_where():
    """The function that was called, the thing, the module and the rule."""
    where = Where(nn.ReLU(), "layers.0", "checkpoint_wrapper")
    error = refused_error(Refused("buffer 'b'", "was lost. Find it."), where)
    assert isinstance(error, RecomputeError)
    assert str(error) == (
        "ckpt_wrap.checkpoint_wrapper: buffer 'b' of module 'layers.0' (ReLU) was lost. Find it."
    )


def test_a_list_that_the_first_run_changed_is_as_it_was():
    """And the caller has what the first run made of it, once."""

    def append(x, into):
        into.append(x)
        return copy.copy(into)

    x, notes = torch.ones(2), ["a"]
    call = _call(append, x, notes)
    assert _run(call, x, notes) == ["a", x]
    assert [type(item) for item in call.again()] == [str, torch.Tensor]
    assert len(notes) == 2


def test_a_tensor_given_twice_is_one_in_the_second_run():
    """Though autograd would hand it out anew each time."""
    a, b, calls = torch.ones(2), torch.zeros(2), []
    found = _each_once(lambda item: calls.append(item) or item.clone(), [a, b, a])
    assert found[0] is found[2]
    assert found[0] is not found[1]
    assert len(calls) == 2
