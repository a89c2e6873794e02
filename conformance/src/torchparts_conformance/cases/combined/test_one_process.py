"""The better interfaces together on one model in one process."""

from __future__ import annotations

import pytest
import torch

from torchparts_conformance import requirement
from torchparts_conformance.cases.combined._training import (
    BLOCK_FLOPS,
    BLOCKS,
    NAMES,
    PRODUCTS,
    Seen,
    assert_same,
    batch,
    checkpoint_blocks,
    flops_of_step,
    make_model,
    offload_blocks,
    train,
)

IN_BLOCKS = [name for name in NAMES if name.startswith(("0.", "1."))]


@requirement(
    "CB-010",
    level="MUST",
    text=(
        "A model checkpointed in place through a selective policy MUST train bit for bit as the"
        " plain model, dropout included."
    ),
    rationale="the seam checkpoint_fn joins two packages that do not know each other",
    since="0.1.0",
    profile="in-place",
)
@pytest.mark.parametrize("policy", [None, PRODUCTS], ids=["all", "products"])
def test_in_place_checkpointing_trains_as_plain(parts, device, policy):
    """Whatever the policy keeps, three steps with dropout are those of the plain model."""
    model = checkpoint_blocks(parts, make_model(device, 0.5), policy)
    assert_same(train(model, device), train(make_model(device, 0.5), device))


@requirement(
    "CB-011",
    level="MUST",
    text=(
        "The tracker MUST name the modules of a model checkpointed in place as those of the "
        "plain model, in forward and in recompute."
    ),
    rationale="leaked prefixes break every tool that reads names (pytorch#117399)",
    since="0.1.0",
    profile="in-place",
)
def test_names_are_plain_in_forward_and_recompute(parts, device):
    """Every module is seen under its plain name, those in blocks a second time."""
    model = checkpoint_blocks(parts, make_model(device))
    seen = Seen(parts, model)
    with seen.watching():
        model(batch(0, device)).square().mean().backward()
    assert seen.names["forward"] == NAMES
    again = [name for name in seen.names["recompute"] if name in IN_BLOCKS]
    assert set(seen.names["recompute"]) <= set(NAMES)
    assert {"0.up", "0.act", "1.up", "1.act"} <= set(again)
    assert len(again) == len(set(again))


@requirement(
    "CB-012",
    level="MUST",
    text=(
        "FLOPs MUST be exact by phase: all of a block again when it is recomputed, none of the "
        "products a policy saved."
    ),
    rationale="counted work proves what is recomputed",
    since="0.1.0",
    profile="in-place",
)
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "checkpointed"])
def test_flops_are_exact_by_phase(parts, device, wrapped):
    """Full recompute costs the up product again; the last product of a block is never needed."""
    model = make_model(device)
    if wrapped:
        checkpoint_blocks(parts, model)
    found = flops_of_step(parts, model, device)
    assert [forward for forward, _ in found] == [BLOCK_FLOPS] * BLOCKS
    # Recomputation may stop once the last value that backward needs is there.
    allowed = {BLOCK_FLOPS // 2, BLOCK_FLOPS} if wrapped else {0}
    assert {recompute for _, recompute in found} <= allowed


@requirement("CB-012")
def test_saved_products_are_not_recomputed(parts, device):
    """A policy that saves the products leaves no FLOP to recompute."""
    model = checkpoint_blocks(parts, make_model(device), PRODUCTS)
    assert flops_of_step(parts, model, device) == [(BLOCK_FLOPS, 0)] * BLOCKS


@requirement(
    "CB-013",
    level="MUST",
    text=(
        "A model that is flat, offloaded and checkpointed in place MUST keep the state-dict "
        "keys, and load the state, of the plain model."
    ),
    rationale="checkpoints outlive the way a model was trained",
    since="0.1.0",
    profile="in-place",
)
def test_state_dict_is_plain(parts, device):
    """Keys are those of the plain model, and states load both ways."""
    plain, model = make_model(device), make_model(device)
    parts.flat_param.flatten(model)
    offload_blocks(parts, checkpoint_blocks(parts, model, PRODUCTS))
    assert list(model.state_dict()) == list(plain.state_dict())
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(1)
    model.load_state_dict(plain.state_dict())
    again = make_model(device)
    again.load_state_dict(model.state_dict())
    for name, value in plain.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)


@requirement(
    "CB-014",
    level="MUST",
    text=(
        "A model made flat MUST train bit for bit as the plain model when its blocks are "
        "checkpointed, whichever came first."
    ),
    rationale="views of one buffer are read again in recompute",
    since="0.1.0",
    profile="in-place",
)
@pytest.mark.parametrize("flat_first", [True, False], ids=["flat-first", "flat-last"])
def test_flat_and_checkpointed_trains_as_plain(parts, device, flat_first):
    """Flattening before or after checkpointing changes no bit."""
    model = make_model(device, 0.5)
    if flat_first:
        parts.flat_param.flatten(model)
    checkpoint_blocks(parts, model)
    if not flat_first:
        parts.flat_param.flatten(model)
    assert_same(train(model, device), train(make_model(device, 0.5), device))


@requirement(
    "CB-015",
    level="MUST",
    text="A flat model MUST be named and trained as the plain model while it is tracked.",
    rationale="flattening changes storage, not modules",
    since="0.1.0",
    profile="in-place",
)
def test_flat_and_tracked_is_named_and_trained_as_plain(parts, device):
    """The tracker names a flat model's modules, and changes nothing."""
    model = make_model(device, 0.5)
    parts.flat_param.flatten(model)
    seen = Seen(parts, model)
    tracked = train(model, device, around=seen.watching)
    assert seen.names == {"forward": NAMES}
    assert_same(tracked, train(make_model(device, 0.5), device))


@requirement(
    "CB-020",
    level="MUST",
    text=(
        "Offload and checkpointing with a policy on the same block MUST train bit for bit as "
        "the plain model, in either order."
    ),
    rationale="saved values pass through the hooks of both",
    since="0.1.0",
    profile="offload",
)
@pytest.mark.parametrize("offload_first", [True, False], ids=["offload-first", "offload-last"])
@pytest.mark.parametrize("policy", [None, PRODUCTS], ids=["all", "products"])
def test_offload_and_checkpointing_train_as_plain(parts, device, offload_first, policy):
    """Both on the same block, in either order, change no bit."""
    model = make_model(device, 0.5)
    if offload_first:
        checkpoint_blocks(parts, offload_blocks(parts, model), policy)
    else:
        offload_blocks(parts, checkpoint_blocks(parts, model, policy))
    assert_same(train(model, device), train(make_model(device, 0.5), device))


@requirement(
    "CB-021",
    level="MUST",
    text=(
        "An offloaded flat model MUST train bit for bit as the plain model, and MUST NOT copy "
        "its parameters."
    ),
    rationale="parameters are views of a buffer and are not activations",
    since="0.1.0",
    profile="offload",
)
def test_offloaded_flat_model_copies_no_parameter(parts, device, tmp_path):
    """Less is written than one step's parameters would need, and training is plain."""
    model = make_model(device, 0.5)
    parts.flat_param.flatten(model)
    for block in model[:BLOCKS]:
        parts.ckpt_wrap.offload_(block, min_bytes=1, to=tmp_path)
    assert_same(train(model, device), train(make_model(device, 0.5), device))
    # A block saves its input, two (BATCH, HIDDEN) values for the activation and the dropout,
    # the dropout's mask, and the input of the second product.
    largest = BLOCKS * (4 * batch(0).numel() + 4 * 4 * 8 * 32)
    per_step = parts.ckpt_wrap.offload_stats(model).bytes_out / 3
    assert 0 < per_step <= largest


@requirement(
    "CB-022",
    level="MUST",
    text="An offloaded model MUST be named and trained as the plain model while it is tracked.",
    rationale="an observer changes nothing",
    since="0.1.0",
    profile="offload",
)
def test_offloaded_and_tracked_is_named_and_trained_as_plain(parts, device):
    """The tracker names an offloaded model's modules, and changes nothing."""
    model = offload_blocks(parts, make_model(device, 0.5))
    seen = Seen(parts, model)
    tracked = train(model, device, around=seen.watching)
    assert seen.names == {"forward": NAMES}
    assert_same(tracked, train(make_model(device, 0.5), device))


@requirement(
    "CB-023",
    level="MUST",
    text=(
        "All four parts on one model in one process MUST train bit for bit as the plain model, "
        "with plain names and exact FLOPs."
    ),
    rationale="the reason for one suite",
    since="0.1.0",
    profile="offload",
)
def test_all_four_train_as_plain(parts, device):
    """Flat, offloaded, selective and tracked: same bits, same names, no product twice."""
    model = make_model(device, 0.5)
    parts.flat_param.flatten(model)
    offload_blocks(parts, checkpoint_blocks(parts, model, PRODUCTS))
    seen = Seen(parts, model)
    assert_same(train(model, device, around=seen.watching), train(make_model(device, 0.5), device))
    assert seen.names["forward"] == NAMES
    assert set(seen.names.get("recompute", [])) <= set(NAMES)
    assert flops_of_step(parts, model, device) == [(BLOCK_FLOPS, 0)] * BLOCKS
