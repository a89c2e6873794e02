"""One process, one vector: what `flatten` promises."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from torchparts_conformance import requirement
from torchparts_conformance.cases.flat_param._builds import blocks, holder


def _homes(tensors):
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def _aliased(model, flat):
    vectors = [flat.as_vector(name) for name in flat.layouts]
    return _homes(model.parameters()) == _homes(vectors)


@requirement(
    "FP-050",
    level="MUST",
    text="Parameters MUST keep identity and values and be views of one vector.",
    rationale="one process, one vector: pytorch#2794, pytorch#49723, pytorch#38655",
    since="0.1.0",
    profile="flatten",
)
def test_parameters_are_views_of_one_vector(part, device):
    """Same objects, same values, one storage; writing to the vector writes to them."""
    model, _ = blocks(device, torch.float32)
    before = [(param, param.detach().clone()) for param in model.parameters()]
    flat = part.flatten(model)
    assert _aliased(model, flat)
    for (param, value), now in zip(before, model.parameters(), strict=True):
        assert param is now
        assert torch.equal(param, value)
    flat.as_vector().zero_()
    assert not any(param.any() for param in model.parameters())


@requirement(
    "FP-051",
    level="MUST",
    text="Gradients MUST be views of one vector, however they were cleared.",
    rationale="one process, one vector: pytorch#2794, pytorch#49723, pytorch#38655",
    since="0.1.0",
    profile="flatten",
)
@pytest.mark.parametrize("clear", ["none", "zero", "flat"])
def test_gradients_are_views_of_one_vector(part, device, clear):
    """However gradients were cleared, they end in the flat gradient, bitwise right."""
    plain, x = blocks(device, torch.float32)
    plain(x).sum().backward()
    model, _ = blocks(device, torch.float32)
    flat = part.flatten(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        if clear == "flat":
            flat.zero_grad()
        else:
            optimizer.zero_grad(set_to_none=clear == "none")
        model(x).sum().backward()
    assert _homes(param.grad for param in model.parameters()) == _homes([flat.grad_vector()])
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


@requirement(
    "FP-052",
    level="MUST",
    text="An optimizer built before flattening MUST train.",
    rationale="silently never trains with FSDP1 on 2.13",
    since="0.1.0",
    profile="flatten",
)
def test_an_optimizer_built_before_trains(part, device):
    """Parameters keep their identity, so it steps the flattened module."""
    model, x = blocks(device, torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    flat = part.flatten(model)
    before = flat.as_vector().clone()
    model(x).sum().backward()
    optimizer.step()
    assert not torch.equal(flat.as_vector(), before)


@requirement(
    "FP-053",
    level="MUST",
    text="A parameter that no backward reached MUST keep None as its gradient.",
    rationale="FSDP1 gives zeros on 2.13, and weight decay moves it",
    since="0.1.0",
    profile="flatten",
)
def test_an_unused_parameter_keeps_no_gradient(part, device):
    """Weight decay does not move what no backward reached."""
    model, x = blocks(device, torch.float32)
    flat = part.flatten(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    before = model.blocks[0][1].weight.detach().clone()
    model.embed(x).sum().backward()
    optimizer.step()
    assert model.blocks[0][1].weight.grad is None
    assert torch.equal(model.blocks[0][1].weight, before)
    assert _aliased(model, flat)


@requirement(
    "FP-054",
    level="MUST",
    text="Chunks MUST train the module as its parameters do.",
    rationale="one large tensor streams memory fourteen times per unfused AdamW step",
    since="0.1.0",
    profile="flatten",
)
@pytest.mark.parametrize("numel", [17, 1 << 18])
def test_chunks_train_the_module(part, device, numel):
    """A fused optimizer over chunks does what it does over parameters."""
    models = [blocks(device, torch.float32) for _ in range(2)]
    flat = part.flatten(models[1][0])
    for (model, x), params in zip(
        models, (list(models[0][0].parameters()), flat.chunks(numel)), strict=True
    ):
        optimizer = torch.optim.AdamW(params, lr=0.1, fused=True)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).pow(2).mean().backward()
            optimizer.step()
    for ours, theirs in zip(models[1][0].parameters(), models[0][0].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@requirement(
    "FP-055",
    level="MUST",
    text="Clipping MUST be torch's, padding left out.",
    rationale="padding of 42 pollutes every reduction on 2.13",
    since="0.1.0",
    profile="flatten",
)
@pytest.mark.parametrize("max_norm", [0.1, 1e9])
def test_clipping_is_torchs(part, device, max_norm):
    """Same norm and same gradients as `clip_grad_norm_`, of sizes that leave padding."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(device)
    plain, x = copy.deepcopy(model), torch.rand(5, 5).to(device)
    flat = part.flatten(model)
    for either in (model, plain):
        either(x).pow(2).sum().backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
    torch.testing.assert_close(flat.clip_(max_norm), expected)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@requirement(
    "FP-056",
    level="MUST",
    text="A batch of vectors MUST run under vmap.",
    rationale="evolution strategies and federated averaging",
    since="0.1.0",
    profile="flatten",
)
def test_a_batch_of_vectors_runs_under_vmap(part, device):
    """What it gives is what the module gives with each vector loaded."""
    model, x = blocks(device, torch.float32)
    flat = part.flatten(model)
    vectors = torch.randn(3, flat.numel, device=device) * 0.1
    batch = torch.vmap(flat.functional_call, in_dims=(0, None))(vectors, x)
    for vector, out in zip(vectors, batch, strict=True):
        flat.load_vector(vector)
        torch.testing.assert_close(model(x), out, rtol=1e-4, atol=1e-5)


def _saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@requirement(
    "FP-057",
    level="MUST",
    text="A copied or loaded module MUST be flat in a storage of its own.",
    rationale="neither works on 2.13",
    since="0.1.0",
    profile="flatten",
)
@pytest.mark.parametrize("copied", [copy.deepcopy, _saved])
def test_a_copy_is_flat_and_apart(part, device, copied):
    """A copied or loaded module has one storage, its own."""
    model, x = blocks(device, torch.float32)
    part.flatten(model)
    twin = copied(model)
    assert len(_homes(twin.parameters())) == 1
    assert _homes(twin.parameters()) != _homes(model.parameters())
    assert torch.equal(twin(x), model(x))


@requirement(
    "FP-058",
    level="MUST",
    text="Aliasing MUST survive casts, loads and assignments, before the next forward.",
    rationale="pytorch#151223",
    since="0.1.0",
    profile="flatten",
)
@pytest.mark.parametrize("change", ["to", "load", "assign", "parameter"])
def test_aliasing_survives_what_modules_go_through(part, device, change):
    """Cast, loaded, loaded by assignment, or given a new parameter: still one storage."""
    model, _ = blocks(device, torch.float32)
    flat = part.flatten(model)
    if change == "to":
        model.double()
    elif change == "parameter":
        model.embed.weight = nn.Parameter(torch.ones(8, 6, device=device))
    else:
        state = {name: value.clone() + 1 for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=change == "assign")
    pointer = model.embed.weight.data_ptr()
    assert pointer == flat.as_vector().data_ptr()
    assert _aliased(model, flat)


@requirement(
    "FP-059",
    level="MUST",
    text="A parameter of another shape MUST be refused by name.",
    rationale="a hang of the other ranks on 2.13",
    since="0.1.0",
    profile="flatten",
)
def test_another_shape_is_refused_by_name(part, device):
    """The assignment fails and the module keeps what it had."""
    model, _ = blocks(device, torch.float32)
    part.flatten(model)
    kept = model.embed.weight
    with pytest.raises(ValueError, match=r"embed\.weight"):
        model.embed.weight = nn.Parameter(torch.ones(2, device=device))
    assert model.embed.weight is kept


@requirement(
    "FP-060",
    level="MUST",
    text="Each dtype and trainability MUST have a vector of its own.",
    rationale="pytorch#104690; the most frequent complaint of FSDP1's users",
    since="0.1.0",
    profile="flatten",
)
def test_dtypes_and_frozen_parts_have_segments_of_their_own(part, device):
    """One vector per (dtype, trainable); values survive in each."""
    frozen = nn.Parameter(torch.full((5,), 3.0), requires_grad=False)
    tensors = [torch.ones(3), torch.full((4,), 2.0, dtype=torch.bfloat16), frozen]
    model = holder(*tensors).to(device)
    flat = part.flatten(model)
    assert list(flat.layouts) == ["float32", "bfloat16", "float32.frozen"]
    assert [param.tolist() for param in model.parameters()] == [[1.0] * 3, [2.0] * 4, [3.0] * 5]


@requirement(
    "FP-061",
    level="MUST",
    text="Any stride and dtype MUST survive.",
    rationale="silent corruption on 2.13",
    since="0.1.0",
    profile="flatten",
)
def test_any_stride_and_dtype_survives(part, device):
    """Slices, transposes, scalars, empty and complex tensors keep values and dense strides."""
    tensors = [
        torch.arange(24.0).view(4, 6)[:, :3],
        torch.arange(6.0).view(2, 3).t(),
        torch.tensor(5.0),
        torch.ones(0, 2),
        torch.tensor([1 + 2j]),
        torch.ones(1).expand(3),
    ]
    model = holder(*(tensor.to(device) for tensor in tensors))
    part.flatten(model)
    for param, tensor in zip(model.parameters(), tensors, strict=True):
        assert param.tolist() == tensor.tolist()
        assert param.stride() == tensor.clone().stride()


@requirement(
    "FP-062",
    level="MUST",
    text="Padding MUST stay zero under training.",
    rationale="padding is no parameter",
    since="0.1.0",
    profile="flatten",
)
def test_padding_stays_zero_under_training(part, device):
    """Neither weight decay nor momentum nor loading a vector moves it."""
    model = nn.Linear(5, 7).to(device)
    flat = part.flatten(model)
    flat.load_vector(torch.ones(flat.numel, device=device))
    optimizer = torch.optim.AdamW(flat.chunks(16), lr=0.1, weight_decay=0.1)
    for _ in range(2):
        model(torch.ones(2, 5, device=device)).sum().backward()
        optimizer.step()
    (layout,) = flat.layouts.values()
    assert flat.numel > layout.used_numel
    assert all(not flat.as_vector()[start:stop].any() for start, stop in layout.gaps)


@requirement(
    "FP-063",
    level="MUST",
    text="Shards MUST be equal and start at 16 bytes.",
    rationale="byte 40 for Linear(5, 3) on two ranks on 2.13",
    since="0.1.0",
    profile="flatten",
)
def test_shards_start_aligned(part, device):
    """Every rank's range starts at 16 bytes and all are equal."""
    specs, _ = part.collect_params(nn.Linear(5, 3))
    for world_size in (1, 2, 3, 7):
        plan = part.plan_shard(part.plan_layout(specs), world_size=world_size)
        assert plan.even
        assert all(start * 4 % 16 == 0 for start, _ in plan.ranges)


@requirement(
    "FP-064",
    level="MUST",
    text="A compiled forward MUST keep gradients in the flat vector, without a graph break.",
    rationale="hooks that Dynamo cannot trace break the graph",
    since="0.1.0",
    profile="flatten",
)
def test_a_compiled_forward_keeps_gradients_flat(part, device):
    """No graph break, and gradients arrive in the flat gradient."""
    model, x = blocks(device, torch.float32)
    flat = part.flatten(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        model.zero_grad()
        compiled(x).sum().backward()
    assert _homes(param.grad for param in model.parameters()) == _homes([flat.grad_vector()])


def _storages(state):
    return {
        name: (tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
        for name, tensor in state.items()
    }


@requirement(
    "FP-150",
    level="MUST",
    text=(
        "Each tensor of a state dict MUST have a storage of its own over its parameter's "
        "memory, and tied names MUST share one."
    ),
    rationale=(
        "whoever saves takes names of one storage for ties: a saver that keeps one of them "
        "keeps one weight of a model"
    ),
    since="0.1.0",
    profile="flatten",
)
@pytest.mark.parametrize("which", ["whole", "part", "copy"])
def test_a_state_dict_looks_apart(part, device, which):
    """A storage for each parameter, as large as it is and at its address; writing reaches it."""
    model, _ = blocks(device, torch.float32, tied=True)
    part.flatten(model)
    model = {"whole": model, "part": model.blocks, "copy": copy.deepcopy(model)}[which]
    state, params = model.state_dict(), list(model.named_parameters(remove_duplicate=False))
    expected = {name: (param.data_ptr(), param.nbytes) for name, param in params}
    assert _storages(state) == expected
    assert len(set(expected.values())) == len(list(model.parameters())) < len(params)
    for name, param in params:
        assert torch.equal(state[name], param)
        state[name].fill_(3.0)
        assert bool((param == 3.0).all())


@requirement(
    "FP-151",
    level="MUST",
    text="What a state dict gave MUST stay readable when the model moves to shared memory.",
    rationale="sharing moves a storage in place and frees the memory it had",
    since="0.1.0",
    profile="flatten",
)
def test_a_state_dict_outlives_a_move_to_shared_memory(part, device):
    """Its values are there after the model, and memory of the same size, came elsewhere."""
    model = nn.Linear(64, 64, device=device)
    flat = part.flatten(model)
    state, before = model.state_dict(), model.weight.detach().clone()
    model.share_memory()
    taken = [torch.full_like(flat.as_vector(), 7.0) for _ in range(16)]
    assert torch.equal(state["weight"], before)
    assert len(taken) == 16


class _Slicing(nn.Module):
    """Builds a list of modules in its forward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for layer in self.layers[:2]:
            x = layer(x)
        return x


@requirement(
    "FP-152",
    level="MUST",
    text="Flattening one module MUST leave the compilation of others as it was.",
    rationale=(
        "torch's registration hooks are the whole process's, and a compiled forward that builds"
        " a module stops at them"
    ),
    since="0.1.0",
    profile="flatten",
)
@pytest.mark.parametrize("flat", [True, False])
def test_flattening_leaves_the_compilation_of_others(part, device, flat):
    """A forward that builds a module compiles into one graph, flattened or not."""
    torch._dynamo.reset()
    model, other = _Slicing().to(device), nn.Linear(2, 2, device=device)
    part.flatten(model if flat else other)
    x = torch.ones(1, 4, device=device)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), model(x))


def _carried(module):
    return [
        (sorted(vars(owner)), len(owner._forward_pre_hooks), len(owner._state_dict_hooks))
        for owner in module.modules()
    ]


@requirement(
    "FP-153",
    level="MUST",
    text=(
        "Unflattening MUST give back the module that was: the same parameters and gradients "
        "with their values, each in a storage of its own, and nothing placed on the module."
    ),
    rationale="a module that cannot be made plain again cannot be changed by code that expects one",
    since="0.1.0",
    profile="flatten",
)
def test_unflatten_gives_back_the_module_that_was(part, device):
    """The objects, values, gradients and attributes of before; it can be flattened again."""
    model, x = blocks(device, torch.float32, tied=True)
    plain, before, params = copy.deepcopy(model), _carried(model), list(model.parameters())
    part.flatten(model)
    for either in (model, plain):
        either(x).pow(2).sum().backward()
    grads = [param.grad for param in params]
    part.unflatten(model)
    assert _carried(model) == before
    assert len(_homes(params)) == len(_homes(grads)) == len(params)
    for kept, grad, ours, theirs in zip(
        params, grads, model.parameters(), plain.parameters(), strict=True
    ):
        assert ours is kept
        assert ours.grad is grad
        assert torch.equal(ours, theirs)
        assert torch.equal(grad, theirs.grad)
    model.embed.bias = nn.Parameter(torch.ones(1, device=device))
    assert _aliased(model, part.flatten(model))


@requirement(
    "FP-154",
    level="MUST",
    text=(
        "A parameter whose data was replaced by data of another shape MUST train with the "
        "gradients of a plain module's, in the vector."
    ),
    rationale="libraries resize embeddings in place; transformers does so for every model",
    since="0.1.0",
    profile="flatten",
)
def test_data_of_another_shape_trains(part, device):
    """The input of the first layer gets wider between two steps."""
    model, x = blocks(device, torch.float32)
    plain, wide = copy.deepcopy(model), torch.cat([x, x], dim=1)
    flat = part.flatten(model)
    for either in (model, plain):
        either(x).sum().backward()
        either.zero_grad()
        either.embed.weight.data = torch.arange(96.0, device=device).view(8, 12) / 96
        either(wide).pow(2).sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert torch.equal(ours.grad, theirs.grad)
    assert _aliased(model, flat)
    assert _homes(param.grad for param in model.parameters()) == _homes([flat.grad_vector()])


@requirement(
    "FP-155",
    level="MUST",
    text=(
        "A parameter registered after flattening, under any name, MUST be in the vector at the "
        "next use, and one swapped in for a functional call MUST NOT."
    ),
    rationale="an optimizer over the vector would not train it, without a word",
    since="0.1.0",
    profile="flatten",
)
@pytest.mark.parametrize("where", ["known", "bare", "inside"])
def test_a_parameter_registered_later_is_in_the_vector(part, device, where):
    """In a module that has parameters, in one that has none, and in a module put in later."""
    model, x = blocks(device, torch.float32)
    flat = part.flatten(model)
    late = nn.Parameter(torch.ones(8, device=device))
    if where == "inside":
        model.blocks[0][2] = nn.Tanh()
        model(x)
    owner = model.embed if where == "known" else model.blocks[0][2]
    owner.late = late
    model(x)
    assert _aliased(model, flat)
    flat.as_vector().zero_()
    assert not late.any()


@requirement("FP-155")
def test_parameters_of_a_functional_call_stay_out(part, device):
    """They give the output of that call, and the module's own are what they were."""
    model, x = blocks(device, torch.float32)
    flat = part.flatten(model)
    before, expected = flat.as_vector().clone(), model(x)
    others = {name: nn.Parameter(torch.zeros_like(p)) for name, p in model.named_parameters()}
    assert not torch.func.functional_call(model, others, (x,)).any()
    assert torch.equal(flat.as_vector(), before)
    assert torch.equal(model(x), expected)
    assert not _homes(others.values()) & _homes([flat.as_vector()])


@requirement(
    "FP-196",
    level="MUST",
    text=(
        "A parameter that two flattened modules beside each other have in common MUST be "
        "trained by a step of either's vector, or one of them be refused by an error that names"
        " it."
    ),
    rationale=(
        "reproduced: the step of the module that was flattened first wrote to memory that the "
        "parameter had left, and trained nothing"
    ),
    since="0.1.0",
    profile="flatten",
)
@pytest.mark.parametrize("first", [0, 1])
def test_a_weight_of_two_flattened_modules(part, device, first):
    """Either is stepped; the loss goes through both."""
    pair = [nn.Linear(4, 4, bias=False, device=device) for _ in range(2)]
    pair[1].weight = pair[0].weight
    flats = []
    for module in pair:
        try:
            flats.append(part.flatten(module))
        except Exception as error:
            assert "weight" in str(error)  # noqa: PT017
            return
    optimizer = torch.optim.SGD(flats[first].chunks(1 << 10), lr=1.0)
    before = pair[0].weight.detach().clone()
    pair[1](pair[0](torch.ones(1, 4, device=device))).sum().backward()
    optimizer.step()
    for module in pair:
        assert not torch.equal(module.weight, before)
