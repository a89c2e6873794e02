"""Live storages: their kind, their module, and the line that allocated them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import mod_tracker
from mod_tracker import watch_memory
from mod_tracker.reports._allocations import line_here

from ._small import shows_saved

TORCH, OWN = (str(Path(package.__file__).parent) for package in (torch, mod_tracker))


class Refusing(torch.Tensor):
    """Raises on every torch function."""

    error = RuntimeError

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise cls.error("no")


@pytest.mark.parametrize("error", [RuntimeError, TypeError, ValueError])
def test_tensor_that_refuses_to_answer_is_on_the_page(error, monkeypatch):
    monkeypatch.setattr(Refusing, "error", error)
    refusing = torch.ones(12345, dtype=torch.uint8).as_subclass(Refusing)
    with watch_memory() as watch:
        page = watch.page()
    assert [(held.kind, held.shape) for held in page.held if held.size == 12345] == [
        ("unseen", (12345,))
    ]
    del refusing


def test_tensors_that_stand_for_others_hold_no_memory():
    symbols = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)
    trace = FakeTensorMode(shape_env=ShapeEnv())
    traced = trace.from_tensor(torch.ones(41, 43), symbolic_context=symbols)
    meta = torch.empty(41, 43, device="meta")
    with watch_memory() as watch:
        page = watch.page()
    assert str(page)
    assert all(type(held.size) is int for held in page.held)
    assert (41, 43) not in [held.shape for held in page.held]
    del traced, meta


@shows_saved
def test_page_names_the_line_that_made_a_tensor(model_and_optimizer):
    model, _ = model_and_optimizer()
    with watch_memory(model) as watch:
        output = model(torch.randn(1000, 8))
        page = watch.page()
    largest = next(held for held in page.held if held.kind != "unseen")  # torch's own tables
    assert (largest.size, largest.kind, largest.module) == (1000 * 32 * 4, "saved", "Sequential.0")
    assert (largest.phase, largest.shape) == ("forward", (1000, 32))
    assert largest.line.startswith("conftest.py:")  # where the model is defined
    assert output.requires_grad


def test_earlier_storages_are_found_in_python_objects():
    kept = torch.zeros(12_345)
    with watch_memory() as watch:
        page = watch.page()
    assert [held.kind for held in page.held if held.size == kept.nbytes] == ["unseen"]
    assert "not seen made" in str(page)


@pytest.fixture
def held():
    """`held(*roots, optimizer=None)`: live storages of a mode that saw no allocation."""

    def look(*roots, optimizer=None):
        with watch_memory(*roots, optimizer=optimizer) as watch:
            return watch.page().held

    return look


def test_storage_has_the_first_kind_that_applies(held):
    """A gradient bucket that a later module registers as a parameter counts as that parameter."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Module())
    bucket = torch.zeros(4321)
    model[0].weight.grad = bucket[:16].view(4, 4)
    model[1].register_buffer("bucket", bucket)
    found = [(each.kind, each.module) for each in held(model) if each.size == bucket.nbytes]
    assert found == [("parameters", "Sequential.1")]


def test_shared_and_viewed_storages_are_there_once(held):
    model = nn.Sequential(nn.Linear(33, 33, bias=False), nn.Linear(33, 33, bias=False))
    model[1].weight = model[0].weight
    model[1].register_buffer("part", model[0].weight.detach()[:2])
    model[1].register_buffer("none", None)
    model[1].register_parameter("nothing", None)
    found = [each for each in held(model) if each.size == 33 * 33 * 4]
    assert [(each.kind, each.module, each.stack) for each in found] == [
        ("parameters", "Sequential.0", ("Sequential", "Sequential.0"))
    ]
    assert (found[0].phase, found[0].line) == ("", "")


@pytest.mark.parametrize(
    ("file", "named"),
    [
        (f"{TORCH}/nn/modules/x.py", False),
        (f"{OWN}/reports/x.py", False),
        ("<string>", False),
        (f"{TORCH}vision/models.py", True),
        (f"{TORCH}_model.py", True),
        (f"{OWN}_example.py", True),
    ],
    ids=["torch's", "own", "no file", "torchvision's", "beside torch", "beside the tracker"],
)
def test_line_skips_frames_of_torch_and_this_package(file, named):
    """The line is the caller's; a package with a similar name is not skipped."""
    space = {"line_here": line_here}
    exec(compile("def made():\n    return line_here()", file, "exec"), space)
    expected = f"{file.rsplit('/', 1)[-1]}:2" if named else "test_holders.py:"
    assert space["made"]().startswith(expected)


class Region:
    """Sets saved-tensor hooks, and keeps a tensor and the results of the hooks."""

    def __init__(self, module, beside):
        self.module, self.beside = module, beside

    def pack(self, tensor):
        return ("packed", tensor.shape)

    def unpack(self, packed):
        return self.beside


@shows_saved
@pytest.mark.parametrize("held_by", ["object", "closure", "module"])
def test_tensors_of_other_hooks_count_as_checkpoint(held_by):
    with watch_memory() as watch:
        kept = torch.zeros(4321, requires_grad=True) * 1
        module = nn.Linear(1, 1)
        module.cache = [kept]
        region = Region(module, kept if held_by == "object" else None)
        closed = kept if held_by == "closure" else None
        unpack = (lambda packed: closed) if held_by == "closure" else region.unpack
        with torch.autograd.graph.saved_tensors_hooks(region.pack, unpack):
            output = torch.ones(3, requires_grad=True).exp()
        page = watch.page()
        kinds = {held.kind for held in page.held if held.shape == (4321,) and held.phase}
    assert "temporaries" in kinds if held_by == "module" else kinds == {"checkpoint", "temporaries"}
    assert output.requires_grad


@shows_saved
def test_what_autograd_keeps_too_is_saved():
    with watch_memory() as watch:
        given = torch.zeros(1717, requires_grad=True) * 1
        first = torch.utils.checkpoint.checkpoint(torch.sin, given, use_reentrant=True)
        kinds = [{held.kind for held in watch.page().held if held.shape == (1717,)}]
        second = given.exp() * given
        kinds.append({held.kind for held in watch.page().held if held.shape == (1717,)})
    assert "checkpoint" in kinds[0]
    assert "checkpoint" not in kinds[1]
    assert first.requires_grad
    assert second.requires_grad
