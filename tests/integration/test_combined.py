"""The four parts together on one model: bit-identical results, plain names, exact FLOPs."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

import ckpt_wrap
import flat_param
import mod_tracker
import sac_policies

BATCH, WIDTH, HIDDEN, BLOCKS, STEPS = 8, 8, 32, 2, 3


BLOCK_FLOPS = 2 * (2 * BATCH * WIDTH * HIDDEN)


PRODUCTS = [torch.ops.aten.addmm.default]


NAMES = [
    "",
    "0",
    "0.up",
    "0.act",
    "0.drop",
    "0.down",
    "1",
    "1.up",
    "1.act",
    "1.drop",
    "1.down",
    "2",
]


class Block(nn.Module):
    """Two products with an activation and dropout between."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.act = nn.GELU()
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.drop(self.act(self.up(x))))


def make_model(dropout: float = 0.0) -> nn.Sequential:
    """Make the same model at every call: blocks 0 and 1, and a head 2."""
    torch.manual_seed(1)
    blocks = [Block(dropout) for _ in range(BLOCKS)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 2)).to()


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(BATCH, WIDTH, generator=generator).to()


@dataclass
class Record:
    """Losses by step, and gradients and parameters after the last step, by name."""

    losses: list[float] = field(default_factory=list)
    grads: dict[str, torch.Tensor] = field(default_factory=dict)
    params: dict[str, torch.Tensor] = field(default_factory=dict)


def train(model: nn.Module, *, call=None, around=contextlib.nullcontext):
    """Train for STEPS steps of SGD. `call` replaces the model's call; `around` wraps each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    record = Record()
    for step in range(STEPS):
        torch.manual_seed(step)
        optimizer.zero_grad()
        with around():
            loss = (call or model)(batch(step)).square().mean()
            loss.backward()
        record.losses.append(loss.item())
        record.grads = {n: p.grad.detach().clone() for n, p in model.named_parameters()}
        optimizer.step()
    record.params = {n: p.detach().clone() for n, p in model.named_parameters()}
    return record


def assert_same(record: Record, plain: Record, clean=lambda name: name) -> None:
    """Assert that two trainings are bit-identical."""
    assert record.losses == plain.losses
    for kind in ("grads", "params"):
        got = {clean(name): value for name, value in getattr(record, kind).items()}
        wanted = getattr(plain, kind)
        assert got.keys() == wanted.keys()
        differ = [name for name, value in wanted.items() if not torch.equal(got[name], value)]
        assert differ == [], f"{kind} differ"


def checkpoint_blocks(model: nn.Sequential, policy=None) -> nn.Sequential:
    """Checkpoint each block in place with a selective policy."""
    for block in model[:BLOCKS]:
        ckpt_wrap.checkpoint_(block, checkpoint_fn=sac_policies.checkpoint, policy=policy)
    return model


def offload_blocks(model: nn.Sequential) -> nn.Sequential:
    """Offload each block in place, also small values."""
    for block in model[:BLOCKS]:
        ckpt_wrap.offload_(block, min_bytes=1)
    return model


class Seen:
    """Names of called modules by phase, without the root's name."""

    def __init__(self, model: nn.Module) -> None:
        self.tracker = mod_tracker.ModTracker(model)
        self.names: dict[str, list[str]] = {}

    @contextlib.contextmanager
    def watching(self):
        """Record every module call of a step."""
        self.names.clear()
        self.tracker.register_user_hooks(pre_fw_hook=self._note)
        with self.tracker:
            yield
        self.tracker.clear_user_hooks()

    def _note(self, module, args) -> None:
        name = self.tracker.get_known_fqn(module).partition(".")[2]
        self.names.setdefault(str(self.tracker.phase), []).append(name)


def flops_of_step(model: nn.Module):
    """Return the FLOPs of each block in forward and in recompute."""
    with mod_tracker.profile_flops(model) as report:
        model(batch(0)).square().mean().backward()
    root = type(model).__name__
    rows = [report[f"{root}.{index}"] for index in range(BLOCKS)]
    return [(row.forward, row.recompute) for row in rows]


IN_BLOCKS = [name for name in NAMES if name.startswith(("0.", "1."))]


INFIX = "_checkpoint_wrapped_module."


def _wrapped(dropout=0.0, policy=PRODUCTS):
    model = make_model(dropout)
    wrap = functools.partial(
        ckpt_wrap.checkpoint_wrapper, context_fn=sac_policies.context_fn(policy)
    )
    return nn.Sequential(*(wrap(block) for block in model[:BLOCKS]), model[BLOCKS])


def _clean(name):
    return name.replace(INFIX, "")


def _gradients(model, call):
    call(batch(0)).square().mean().backward()
    return {name: p.grad.detach().clone() for name, p in model.named_parameters()}


def _assert_plain(found):
    plain = make_model()
    for name, value in _gradients(plain, plain).items():
        torch.testing.assert_close(found[name], value)


@pytest.mark.parametrize("policy", [None, PRODUCTS], ids=["all", "products"])
def test_in_place_checkpointing_trains_as_plain(policy):
    """With any policy, three steps with dropout equal the plain model's."""
    model = checkpoint_blocks(make_model(0.5), policy)
    assert_same(train(model), train(make_model(0.5)))


def test_names_are_plain_in_forward_and_recompute():
    """Every module has its plain name, those in blocks a second time."""
    model = checkpoint_blocks(make_model())
    seen = Seen(model)
    with seen.watching():
        model(batch(0)).square().mean().backward()
    assert seen.names["forward"] == NAMES
    again = [name for name in seen.names["recompute"] if name in IN_BLOCKS]
    assert set(seen.names["recompute"]) <= set(NAMES)
    assert {"0.up", "0.act", "1.up", "1.act"} <= set(again)
    assert len(again) == len(set(again))


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "checkpointed"])
def test_flops_are_exact_by_phase(wrapped):
    """Full recompute runs the up product again; backward does not need a block's last product."""
    model = make_model()
    if wrapped:
        checkpoint_blocks(model)
    found = flops_of_step(model)
    assert [forward for forward, _ in found] == [BLOCK_FLOPS] * BLOCKS
    # Recomputation may stop after the last value that backward needs.
    allowed = {BLOCK_FLOPS // 2, BLOCK_FLOPS} if wrapped else {0}
    assert {recompute for _, recompute in found} <= allowed


def test_saved_products_are_not_recomputed():
    """A policy that saves the products leaves no FLOPs to recompute."""
    model = checkpoint_blocks(make_model(), PRODUCTS)
    assert flops_of_step(model) == [(BLOCK_FLOPS, 0)] * BLOCKS


@pytest.mark.parametrize("flat_first", [True, False], ids=["flat-first", "flat-last"])
def test_flat_and_checkpointed_trains_as_plain(flat_first):
    """Flattening before or after checkpointing: bit-identical training."""
    model = make_model(0.5)
    if flat_first:
        flat_param.flatten(model)
    checkpoint_blocks(model)
    if not flat_first:
        flat_param.flatten(model)
    assert_same(train(model), train(make_model(0.5)))


def test_flat_and_tracked_is_named_and_trained_as_plain():
    """The tracker has plain names for a flat model and changes nothing."""
    model = make_model(0.5)
    flat_param.flatten(model)
    seen = Seen(model)
    tracked = train(model, around=seen.watching)
    assert seen.names == {"forward": NAMES}
    assert_same(tracked, train(make_model(0.5)))


@pytest.mark.parametrize("offload_first", [True, False], ids=["offload-first", "offload-last"])
@pytest.mark.parametrize("policy", [None, PRODUCTS], ids=["all", "products"])
def test_offload_and_checkpointing_train_as_plain(offload_first, policy):
    """Both on the same block, in either order: bit-identical training."""
    model = make_model(0.5)
    if offload_first:
        checkpoint_blocks(offload_blocks(model), policy)
    else:
        offload_blocks(checkpoint_blocks(model, policy))
    assert_same(train(model), train(make_model(0.5)))


def test_offloaded_flat_model_copies_no_parameter(tmp_path):
    """Less is written than one step's parameters would need, and training is plain."""
    model = make_model(0.5)
    flat_param.flatten(model)
    for block in model[:BLOCKS]:
        ckpt_wrap.offload_(block, min_bytes=1, to=tmp_path)
    assert_same(train(model), train(make_model(0.5)))
    # A block saves its input, two (BATCH, HIDDEN) values for the activation and the dropout,
    # the dropout's mask, and the input of the second product.
    largest = BLOCKS * (4 * batch(0).numel() + 4 * 4 * 8 * 32)
    per_step = ckpt_wrap.offload_stats(model).bytes_out / 3
    assert 0 < per_step <= largest


def test_offloaded_and_tracked_is_named_and_trained_as_plain():
    """The tracker has plain names for an offloaded model and changes nothing."""
    model = offload_blocks(make_model(0.5))
    seen = Seen(model)
    tracked = train(model, around=seen.watching)
    assert seen.names == {"forward": NAMES}
    assert_same(tracked, train(make_model(0.5)))


def test_all_four_train_as_plain():
    """Flat, offloaded, selective and tracked: bit-identical, plain names, no product twice."""
    model = make_model(0.5)
    flat_param.flatten(model)
    offload_blocks(checkpoint_blocks(model, PRODUCTS))
    seen = Seen(model)
    assert_same(train(model, around=seen.watching), train(make_model(0.5)))
    assert seen.names["forward"] == NAMES
    assert set(seen.names.get("recompute", [])) <= set(NAMES)
    assert flops_of_step(model) == [(BLOCK_FLOPS, 0)] * BLOCKS


def test_tracker_tells_recompute_from_forward():
    """A block's activation runs once in forward and once in recompute."""
    model = _wrapped()
    tracker = mod_tracker.ModTracker()
    seen = []
    for module in model.modules():
        if isinstance(module, nn.GELU):
            module.register_forward_pre_hook(lambda *_: seen.append(tracker.is_bw))
    with tracker:
        loss = model(batch(0)).square().mean()
        assert seen == [False] * BLOCKS
        loss.backward()
    assert seen[BLOCKS:] == [True] * BLOCKS


def test_compiled_flat_gives_plain_gradients():
    """A flat, checkpointed model compiles to one graph with the plain gradients."""
    model = make_model()
    flat_param.flatten(model)
    checkpoint_blocks(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    _assert_plain(_gradients(model, compiled))


def test_all_four_compiled_give_plain_gradients():
    """Flat, selective, compiled, then tracked in eager: gradients and names are right."""
    model = make_model()
    flat = flat_param.flatten(model)
    checkpoint_blocks(model, PRODUCTS)
    compiled = torch.compile(model, backend="aot_eager")
    seen = Seen(model)
    _assert_plain(_gradients(model, compiled))
    flat.zero_grad()
    with seen.watching():
        found = _gradients(model, model)
    _assert_plain(found)
    assert seen.names["forward"] == NAMES


def test_state_dict_is_plain():
    """Keys are those of the plain model, and state dicts load both ways."""
    plain, model = make_model(), make_model()
    flat_param.flatten(model)
    offload_blocks(checkpoint_blocks(model, PRODUCTS))
    assert list(model.state_dict()) == list(plain.state_dict())
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(1)
    model.load_state_dict(plain.state_dict())
    again = make_model()
    again.load_state_dict(model.state_dict())
    for name, value in plain.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)
