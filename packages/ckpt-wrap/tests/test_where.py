"""Errors of forward and backward say which module they are about."""

from __future__ import annotations

import contextlib
import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.utils.checkpoint import CheckpointError

from ckpt_wrap import (
    CheckpointImpl,
    OffloadError,
    OptionError,
    RecomputeError,
    apply_activation_checkpointing,
    checkpoint_,
    checkpoint_wrapper,
    make_plan,
    offload_,
)


class Block(nn.Module):
    """Multiplies by an input; runs `second` in its second run, where there is one."""

    def __init__(self, second=None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.second = second
        self.runs = 0

    def forward(self, x, scale=None):
        self.runs += 1
        y = x * self.weight
        if self.second is not None and self.runs > 1:
            return self.second(y)
        return torch.tanh(y) * (1 if scale is None else torch.sin(scale))


class Model(nn.Module):
    """The block in question is `layers.1`."""

    def __init__(self, block) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ReLU(), block])

    def forward(self, x, scale=None):
        return self.layers[1](self.layers[0](x), scale=scale)


def _is_block(module):
    return isinstance(module, Block)


def _planned(model, action="checkpoint", **options):
    return make_plan(model, lambda _, m: _is_block(m), action=action, **options).apply(model)


def _applied(make, model, **options):
    apply_activation_checkpointing(model, partial(make, **options), check_fn=_is_block)
    return model


def _alone(make, model, **options):
    model.layers[1] = make(model.layers[1], **options)
    return model


CHECKPOINTS = {
    "plan": (_planned, "'layers.1' (Block)"),
    "applied wrapper": (partial(_applied, checkpoint_wrapper), "'layers.1' (Block)"),
    "applied in place": (partial(_applied, checkpoint_), "'layers.1' (Block)"),
    "wrapper alone": (partial(_alone, checkpoint_wrapper), "Block"),
    "in place alone": (partial(_alone, checkpoint_), "Block"),
}
OFFLOADS = {
    "plan": (partial(_planned, action="offload"), "'layers.1' (Block)"),
    "applied": (partial(_applied, offload_), "'layers.1' (Block)"),
    "alone": (partial(_alone, offload_), "Block"),
}


def _made_by(how):
    """The function the user called, with which a message begins."""
    return "ckpt_wrap.checkpoint_wrapper" if "wrapper" in how else "ckpt_wrap.checkpoint_"


NEXT_STEP = "Make its forward depend on its inputs only."


def _x():
    return torch.ones(2, 3, requires_grad=True)


def _backward_fails(loss, error=RecomputeError):
    with pytest.raises(error) as raised:
        loss.backward()
    return str(raised.value)


CHANGED = (
    "{}: an input of module {} has been modified by an inplace operation since "
    "the forward, but recomputation needs it as it was. "
    "Change a clone of it, or change it after backward."
)


@pytest.mark.parametrize("impl", CheckpointImpl)
@pytest.mark.parametrize("how", CHECKPOINTS)
def test_an_input_changed_in_place(how, impl):
    """The same sentence under both implementations."""
    change, where = CHECKPOINTS[how]
    scale = torch.ones(3)
    loss = change(Model(Block()), checkpoint_impl=impl)(_x(), scale=scale).sum()
    scale.add_(1)
    assert _backward_fails(loss) == CHANGED.format(_made_by(how), where)


def test_an_input_changed_in_place_with_debug(quiet_debug):
    """Torch adds its list of operators; the sentence is the cause of its error."""
    quiet_debug()
    scale = torch.ones(3)
    loss = _planned(Model(Block()), debug=True)(_x(), scale=scale).sum()
    scale.add_(1)
    with pytest.raises(CheckpointError, match="logs of latest computation") as raised:
        loss.backward()
    assert str(raised.value.__cause__) == CHANGED.format(
        "ckpt_wrap.checkpoint_", "'layers.1' (Block)"
    )


@pytest.mark.parametrize("how", CHECKPOINTS)
def test_a_recomputation_that_differs(how):
    """Fewer tensors, other shapes, more tensors."""
    change, where = CHECKPOINTS[how]
    loss = change(Model(Block(lambda y: y.sum())))(_x()).sum()
    assert _backward_fails(loss) == (
        f"{_made_by(how)}: module {where} saved 2 tensors in recomputation, but 3 in forward."
        f" {NEXT_STEP}"
    )
    loss = change(Model(Block(lambda y: y.sum())), determinism_check="none")(_x()).sum()
    assert _backward_fails(loss) == (
        f"{_made_by(how)}: module {where} saved fewer tensors in recomputation than the 3 of "
        f"its forward, but the two must be the same. {NEXT_STEP}"
    )
    loss = change(Model(Block(lambda y: torch.tanh(y[:, :1]))))(_x()).sum()
    assert _backward_fails(loss).startswith(
        f"{_made_by(how)}: saved tensor 2 of module {where} is (2, 1) of torch.float32"
    )
    loss = change(Model(Block(lambda y: torch.tanh(torch.tanh(y)))), early_stop=False)(_x()).sum()
    assert _backward_fails(loss) == (
        f"{_made_by(how)}: module {where} saved more tensors in recomputation than the 3 of "
        f"its forward, but the two must be the same. {NEXT_STEP}"
    )


@pytest.mark.parametrize("how", CHECKPOINTS)
def test_a_reentrant_result_that_differs(how):
    """The second run gives a tensor of another shape."""
    change, where = CHECKPOINTS[how]
    impl = CheckpointImpl.REENTRANT
    loss = change(Model(Block(lambda y: y[:, :1])), checkpoint_impl=impl)(_x()).sum()
    cpu = "torch.float32, device(type='cpu')"
    assert _backward_fails(loss) == (
        f"{_made_by(how)}: the result of module {where} is [(torch.Size([2, 1]), {cpu})] in "
        f"recomputation, but was [(torch.Size([2, 3]), {cpu})] in forward. {NEXT_STEP}"
    )


@pytest.mark.parametrize("how", CHECKPOINTS)
def test_contexts_that_are_no_contexts(how):
    """What `context_fn` returned is shown; the module works again with one that is right."""
    change, where = CHECKPOINTS[how]
    wrong = [3]
    model = change(
        Model(Block()),
        context_fn=lambda: wrong.pop() if wrong else (contextlib.nullcontext(),) * 2,
    )
    with pytest.raises(OptionError) as raised:
        model(_x())
    assert str(raised.value) == (
        f"{_made_by(how)}: option 'context_fn' of module {where} returned 3, but it must "
        "return two context managers. Return one for forward and one for recomputation."
    )
    model(_x()).sum().backward()


@pytest.mark.parametrize("how", CHECKPOINTS)
def test_a_context_that_suppresses_an_exception(how):
    """There is no result to return."""
    change, where = CHECKPOINTS[how]
    model = change(
        Model(Block()),
        context_fn=lambda: (contextlib.suppress(RuntimeError), contextlib.nullcontext()),
    )
    with pytest.raises(RecomputeError) as raised:
        model(torch.ones(2, 5, requires_grad=True))
    assert str(raised.value) == (
        f"{_made_by(how)}: option 'context_fn' gave a forward context that suppressed an "
        f"exception of module {where}, but then there is no result. Let exceptions pass."
    )


@pytest.mark.parametrize("how", OFFLOADS)
def test_a_kept_tensor_changed_in_place(how, tmp_path):
    """Below `min_bytes`, so it stayed."""
    change, where = OFFLOADS[how]
    model = change(Model(Block()), to=str(tmp_path))
    scale = torch.ones(3, requires_grad=True) * 1
    loss = model(_x(), scale=scale).sum()
    with torch.no_grad():
        scale.add_(1)
    assert _backward_fails(loss, OffloadError) == (
        f"ckpt_wrap.offload_: a tensor saved by module {where} was changed in place after it was "
        "saved, but backward needs it as it was. Change a clone of it, or change it after backward."
    )


@pytest.mark.parametrize("damage", ["gone", "short"])
@pytest.mark.parametrize("how", OFFLOADS)
def test_a_file_that_cannot_be_read_back(how, damage, tmp_path):
    """The file, the module, and how to go on; the next step works."""
    change, where = OFFLOADS[how]
    model = change(Model(Block()), to=str(tmp_path), min_bytes=1)
    loss = model(_x()).sum()
    files = sorted(tmp_path.glob("*/*.bin"), key=lambda path: int(path.stem))
    for file in files:
        if damage == "gone":
            file.unlink()
        else:
            file.write_bytes(b"")
    message = _backward_fails(loss, OffloadError)
    assert message in [
        f"ckpt_wrap.offload_: file '{file}' cannot be read back, but backward needs its 24 bytes. "
        "Run forward again, and leave the folder alone until backward has run. "
        f"This was for a tensor saved by module {where}."
        for file in files
    ]
    model(_x()).sum().backward()


def test_a_prefetch_that_fails_is_the_error_of_the_module_that_needs_it(tmp_path):
    """Backward of the second layer, which brings the first one's tensors in early, succeeds."""
    model = nn.Sequential(nn.Tanh(), nn.Sigmoid())
    make_plan(model, lambda *_: True, action="offload", to=str(tmp_path), min_bytes=1).apply(model)
    x = _x()
    hidden = model[0](x)
    (first,) = tmp_path.glob("*/*.bin")
    result = model[1](hidden)
    first.unlink()
    (slope,) = torch.autograd.grad(result.sum(), hidden, retain_graph=True)
    assert slope.shape == hidden.shape
    assert _backward_fails(result.sum(), OffloadError).endswith("saved by module '0' (Tanh).")


def test_offload_around_a_checkpoint_names_the_module(tmp_path):
    """Checkpoint and offload of a module know its name, whichever came first."""
    model = Model(Block())
    _planned(_alone(checkpoint_, model), action="offload", to=str(tmp_path))
    scale = torch.ones(3)
    loss = model(_x(), scale=scale).sum()
    scale.add_(1)
    assert "module 'layers.1' (Block)" in _backward_fails(loss, OffloadError)


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("how", ["plan", "applied wrapper"])
def test_copies_know_their_name(how, twin_of):
    """deepcopy and pickle keep it."""
    model = twin_of(CHECKPOINTS[how][0](Model(Block())))
    scale = torch.ones(3)
    loss = model(_x(), scale=scale).sum()
    scale.add_(1)
    assert "module 'layers.1' (Block)" in _backward_fails(loss)


def test_wrapping_errors_name_the_module_and_change_nothing(tmp_path):
    """A wrong option or folder for one module, found after another was changed."""
    model = Model(Block())
    policy = CustomPolicy(lambda m: isinstance(m, nn.ReLU) or (_is_block(m) and {"bogus": 1}))
    for make in (checkpoint_, checkpoint_wrapper):
        with pytest.raises(OptionError, match=r"This was for module 'layers.1' \(Block\)\.$"):
            apply_activation_checkpointing(model, make, auto_wrap_policy=policy)
        assert [type(m) for m in model.layers] == [nn.ReLU, Block]
    (tmp_path / "file").write_text("")
    folders = {"layers.0": tmp_path / "a", "layers.1": tmp_path / "file" / "b"}
    plan = make_plan(
        model,
        lambda name, _: name in folders and {"to": folders[name], "create": True},
        action="offload",
    )
    with pytest.raises(
        OffloadError, match=r"file.b' cannot be made .* module 'layers.1' \(Block\)\.$"
    ):
        plan.apply(model)
    assert [type(m) for m in model.layers] == [nn.ReLU, Block]


def test_a_failing_apply_in_place_puts_back_what_was_there():
    """A module that was offloaded before is offloaded after, and not checkpointed."""
    model = Model(Block())
    offload_(model.layers[0])
    before = vars(model.layers[0])["_ckpt_wrap"]
    policy = CustomPolicy(lambda m: isinstance(m, nn.ReLU) or (_is_block(m) and {"bogus": 1}))
    with pytest.raises(OptionError):
        apply_activation_checkpointing(model, checkpoint_, auto_wrap_policy=policy)
    assert vars(model.layers[0])["_ckpt_wrap"] is before


class CallsWhatItIsGiven(nn.Module):
    """Its first argument can be called, and is no module."""

    def forward(self, function, x):
        return function(x).exp() * 2


def test_an_offloaded_module_that_is_given_a_function_is_named(tmp_path):
    """Not the function."""
    module = offload_(CallsWhatItIsGiven(), to=tmp_path)
    kept = []
    out = module(lambda x: kept.append(x.exp()) or kept[0], torch.ones(3, requires_grad=True))
    kept[0].add_(1)
    with pytest.raises(RuntimeError, match="CallsWhatItIsGiven"):
        out.sum().backward()
