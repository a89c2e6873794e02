"""Behaviour that users of fairscale's `FlattenParamsWrapper` rely on, tested with `flatten`."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from _checks import assert_same, assert_same_grads, tensors_of
from _flat import assert_flat, lies_in, pair
from _models import need
from torch import Tensor, nn

import flat_param


class Net(nn.Module):
    """An encoder and a decoder; with `shared`, the decoder uses the embedding's weight."""

    def __init__(self, *, shared: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, 16)
        self.net = nn.Transformer(16, 2, 2, 2, 24, dropout=0.0, batch_first=True)
        self.out = nn.Linear(16, 23, bias=False)
        if shared:
            self.out.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros(3))

    def forward(self, ids: Tensor) -> Tensor:
        """`(batch, position)` to `(batch, position, word)`."""
        hidden = self.embed(ids)
        out: Tensor = self.out(self.net(hidden, hidden.flip(1)))
        return out


def shared_net() -> nn.Module:
    return Net(shared=True)


def plain_net() -> nn.Module:
    """A net without shared parameters."""
    return Net(shared=False)


NETS = pytest.mark.parametrize("make", [plain_net, shared_net])


@NETS
def test_the_wrapper_and_flatten_have_the_same_elements(make: Callable[[], nn.Module]) -> None:
    """A vector without padding has one element per parameter element, shared ones counted once."""
    wrapper = need("fairscale.nn.misc").FlattenParamsWrapper
    plain = make()
    expected = sum(param.numel() for param in plain.parameters())
    flat = flat_param.flatten(copy.deepcopy(plain), align_bytes=1)
    wrapped = wrapper(copy.deepcopy(plain))
    assert flat.numel == expected == sum(param.numel() for param in wrapped.parameters())
    assert torch.equal(flat.as_vector().norm(), wrapped.flat_param.detach().norm())


@NETS
def test_output_and_norm_after_a_step_are_the_wrappers(make: Callable[[], nn.Module]) -> None:
    """One optimizer over the whole vector, as with the wrapper's flat parameter."""
    wrapper = need("fairscale.nn.misc").FlattenParamsWrapper
    plain = make()
    model = copy.deepcopy(plain)
    flat = flat_param.flatten(model, align_bytes=1)
    wrapped = wrapper(copy.deepcopy(plain))
    ids = torch.randint(0, 23, (2, 5))
    parameters = [list(m.parameters()) for m in (plain, wrapped)] + [flat.chunks(1 << 30)]
    outs, vectors = [], []
    for m, params in zip((plain, wrapped, model), parameters, strict=True):
        optimizer = torch.optim.SGD(params, lr=0.01, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            m(ids).pow(2).sum().backward()
            optimizer.step()
        outs.append(m(ids).detach())
        vectors.append(torch.cat([p.detach().reshape(-1) for p in m.parameters()]))
    assert torch.equal(outs[0], outs[2])
    assert torch.equal(vectors[0], vectors[2])
    torch.testing.assert_close(outs[1], outs[2])


@NETS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_state_dicts_go_both_ways(make: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    """Plain into flat and flat into plain, with buffers and plain names."""
    model, plain = (m.to(dtype) for m in pair(make))
    with torch.no_grad():
        for param in plain.parameters():
            param.mul_(2)
        plain.steps.fill_(5)
    assert model.load_state_dict(plain.state_dict()) == ([], [])
    assert_same(tensors_of(model.state_dict()), tensors_of(plain.state_dict()))
    assert_flat(model)
    other = make().to(dtype)
    assert other.load_state_dict(model.state_dict()) == ([], [])
    assert_same(tensors_of(other.state_dict()), tensors_of(plain.state_dict()))


@NETS
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_computes_the_same(
    make: Callable[[], nn.Module], copied: Callable[[nn.Module], nn.Module]
) -> None:
    """A deep copy and a pickled copy, after a step."""
    model, _ = pair(make)
    ids = torch.randint(0, 23, (2, 5))
    model(ids).sum().backward()
    twin = copied(model)
    assert torch.equal(twin(ids), model(ids))
    assert_flat(twin)


def test_some_parameters_of_a_model_are_flattened() -> None:
    """One part is flattened, the rest is unchanged, and both train as before."""
    plain = plain_net()
    model = copy.deepcopy(plain)
    inside = {id(param) for param in model.net.parameters()}
    flat = flat_param.flatten(model.net)
    ids = torch.randint(0, 23, (2, 5))
    for either in (model, plain):
        either(ids).sum().backward()
    assert_same_grads(model, plain)
    lying = {id(p) for p in model.parameters() if lies_in(p, flat.as_vector())}
    assert lying == inside


def test_two_parts_are_flattened_apart() -> None:
    """Groups of parameters with one vector each; the state dict is the plain one."""
    plain = plain_net()
    model = copy.deepcopy(plain)
    flats = [flat_param.flatten(part) for part in (model.net.encoder, model.net.decoder)]
    assert len({flat.as_vector().data_ptr() for flat in flats}) == 2
    assert_same(tensors_of(model.state_dict()), tensors_of(plain.state_dict()))
    ids = torch.randint(0, 23, (2, 5))
    for either in (model, plain):
        either(ids).sum().backward()
    assert_same_grads(model, plain)


def test_a_module_without_parameters_is_refused() -> None:
    """fairscale accepts it; `flatten` raises that there is nothing to flatten."""
    with pytest.raises(flat_param.ParameterError, match="has no parameters"):
        flat_param.flatten(nn.Sequential(nn.ReLU()))
