"""Every private torch name is there on this version, and every fallback works without it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad
from torch.torch_version import TorchVersion

import flat_param
from flat_param import _torch_compat as compat


def test_default_store_is_that_of_the_group(tmp_path: Path) -> None:
    """What one side writes the other reads."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        compat.default_store().set("note", "here")
        assert compat.default_store().get("note") == b"here"
    finally:
        dist.destroy_process_group()


def test_default_store_missing_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch's look-up there is no store."""
    monkeypatch.delattr(dist.distributed_c10d, "_get_default_store")
    assert compat.default_store() is None


def test_torch_without_a_needed_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names torch's version and the name."""
    monkeypatch.delattr(torch.autograd.Variable, "_execution_engine")
    with pytest.raises(flat_param.StateError, match=r"torch .* has no _execution_engine"):
        compat.at_end_of_backward(lambda: None)


def test_versions_count_writes_of_each_tensor() -> None:
    """Writing through one `data` alias is not counted by another."""
    base = torch.zeros(2)
    aliases = [base.data, base.data]
    before = compat.versions(aliases)
    aliases[0].add_(1)
    assert [now - old for now, old in zip(compat.versions(aliases), before, strict=True)] == [1, 0]


def test_view_is_told_from_its_base() -> None:
    """A slice is a view, a sum is not."""
    base = torch.ones(4)
    assert compat.is_view(base[:2])
    assert not compat.is_view(base + 1)


@contextmanager
def total_norm_restored() -> Iterator[None]:
    """Put back what torch's function calls."""
    cells = clip_grad._get_total_norm.__closure__
    before = [cell.cell_contents for cell in cells]
    yield
    for cell, content in zip(cells, before, strict=True):
        cell.cell_contents = content


def test_total_norm_is_wrapped_where_torch_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """All names of the function go through the wrapper; a torch without it is refused."""
    imported_before = nn.utils.get_total_norm
    param = nn.Parameter(torch.ones(1))
    param.grad = torch.ones(1)
    with total_norm_restored():
        compat.replace_total_norm(lambda original: lambda *_: torch.tensor(8.0))
        assert imported_before([torch.ones(1)]) == 8.0
        assert nn.utils.clip_grad_norm_([param], 4.0) == 8.0
    assert torch.allclose(param.grad, torch.tensor(0.5))
    assert imported_before([torch.ones(1)]) == 1.0
    monkeypatch.delattr(clip_grad, "_get_total_norm")
    with pytest.raises(flat_param.StateError, match="has no _get_total_norm"):
        compat.replace_total_norm(lambda original: original)


def test_search_for_overflow_is_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every scaler, and said where torch has none."""
    kind, seen = torch.amp.GradScaler, []
    monkeypatch.setattr(kind, "_unscale_grads_", lambda *_: {})
    compat.replace_unscale(lambda original: lambda *args: seen.append(args) or original())
    scaler, param = kind("cpu"), nn.Parameter(torch.ones(1))
    scaler.scale(param.sum()).backward()
    scaler.unscale_(torch.optim.SGD([param]))
    assert len(seen) == 1
    monkeypatch.delattr(kind, "_unscale_grads_")
    with pytest.raises(flat_param.StateError, match="has no _unscale_grads_"):
        compat.replace_unscale(lambda original: original)


def test_hooks_of_a_parameter_are_found() -> None:
    """In order, without those that were removed; none where torch keeps none."""
    param = nn.Parameter(torch.ones(1))
    for find, register in (
        (compat.grad_hooks, param.register_hook),
        (compat.post_accumulate_grad_hooks, param.register_post_accumulate_grad_hook),
    ):
        assert find(param) == []
        first, second = (lambda _: None), (lambda _: None)
        register(first)
        register(lambda _: None).remove()
        register(second)
        assert find(param) == [first, second]
        assert find(object()) == []  # type: ignore[arg-type]  # a tensor of a torch without them


@pytest.mark.parametrize("has_grad_dtype", [hasattr(torch.Tensor, "grad_dtype"), False])
def test_a_gradient_of_another_dtype_is_assigned(
    monkeypatch: pytest.MonkeyPatch, has_grad_dtype: bool
) -> None:
    """It is the given memory, keeps its marks, and an optimizer steps with it."""
    if not has_grad_dtype:
        monkeypatch.setattr(compat, "Tensor", object)
    param, grad = nn.Parameter(torch.ones(3, 2)), torch.full((3, 2), 2.0, dtype=torch.bfloat16)
    grad.mark = "ours"  # type: ignore[attr-defined]  # as `_guards` marks them
    compat.assign_grad(param, grad)
    assert param.grad is not None
    assert param.grad.dtype == torch.bfloat16
    assert param.grad.data_ptr() == grad.data_ptr()
    assert vars(param.grad) == {"mark": "ours"}
    torch.optim.SGD([param], lr=1.0, foreach=False).step()
    assert torch.equal(param, torch.full((3, 2), -1.0))


def test_only_the_storage_warning_is_kept_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside, torch 2.9's own deprecation is silent and any other warning is heard."""
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.9.1"))
    with compat.without_storage_warning():
        warnings.warn("TypedStorage is deprecated. It will go.", UserWarning, stacklevel=1)
    with pytest.warns(UserWarning, match="another"), compat.without_storage_warning():
        warnings.warn("another", UserWarning, stacklevel=1)


def test_filters_of_the_process_stay_where_torch_does_not_warn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread may be about to change them."""
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.10.0"))
    before = warnings.filters
    with compat.without_storage_warning():
        assert warnings.filters is before
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.9.1"))
    with compat.without_storage_warning():
        assert warnings.filters is not before


def test_default_group_arguments_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other defaults stay, and nothing is done where torch has not imported the module."""
    name = "torch.distributed.nn.functional"
    monkeypatch.delitem(sys.modules, name, raising=False)
    compat.drop_default_group_arguments()
    assert name not in sys.modules
    group = dist.ProcessGroup(dist.HashStore(), 0, 1)
    module = ModuleType(name)
    code = compile("def reduce(tensor, op='sum', group=group): ...", "<test>", "exec")
    exec(code, vars(module) | {"group": group}, vars(module))
    monkeypatch.setitem(sys.modules, name, module)
    compat.drop_default_group_arguments()
    assert vars(module)["reduce"].__defaults__ == ("sum", None)


def test_frames_are_passed_over_and_what_they_call_is_compiled() -> None:
    """A function that is not named is compiled with what it calls."""
    graphs = list[torch.fx.GraphModule]()

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def inner(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x.cos())

    def passed_over(x: torch.Tensor) -> torch.Tensor:
        return inner(x.cos())

    def calls(function: Callable[[torch.Tensor], torch.Tensor]) -> int:
        graphs.clear()
        torch.compile(function, backend=backend)(torch.ones(2))
        return sum(node.op.startswith("call") for graph in graphs for node in graph.graph.nodes)

    compat.pass_over_frames(passed_over)
    assert calls(outer) == 2
    assert calls(passed_over) == 1


def test_without_the_compilers_own_name_frames_are_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is raised."""
    monkeypatch.setitem(sys.modules, "torch._dynamo.eval_frame", ModuleType("eval_frame"))
    compat.pass_over_frames(test_view_is_told_from_its_base)


def test_wrapper_has_shape_and_no_memory() -> None:
    """Of a subclass, with the dtype of what it stands around."""

    class Around(torch.Tensor):
        __torch_function__ = compat.no_torch_function

        @classmethod
        def __torch_dispatch__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            raise AssertionError(func)

    made = compat.make_wrapper(Around, torch.Size((2, 3)), (3, 1), torch.ones(4).half())
    assert (made.shape, made.stride(), made.dtype) == ((2, 3), (3, 1), torch.float16)
    assert type(made) is Around
    assert made.data_ptr() == 0


def test_context_passes_over_a_subclass() -> None:
    """Its `__torch_function__` is not called inside."""

    class Counts(torch.Tensor):
        calls = 0

        @classmethod
        def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
            cls.calls += 1
            return super().__torch_function__(*args, **kwargs)

    tensor = torch.ones(2).as_subclass(Counts)
    tensor.size()
    before = Counts.calls
    with compat.without_torch_function():
        tensor.size()
    assert before > 0
    assert Counts.calls == before


@pytest.mark.usefixtures("group_of_one")
def test_spec_of_a_dtensor_is_what_it_is_given() -> None:
    """Mesh, placements, shape, stride and dtype."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate

    mesh = init_device_mesh("cpu", (1,))
    spec = compat.dtensor_spec(mesh, (Replicate(),), torch.Size((2, 3)), (1, 2), torch.float64)
    assert spec.mesh is mesh
    assert spec.placements == (Replicate(),)
    assert tuple(spec.tensor_meta) == (torch.Size((2, 3)), (1, 2), torch.float64)


def test_backward_has_a_number() -> None:
    """Inside of it; -1 outside."""
    seen: list[int] = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda _: seen.append(compat.current_backward()))
    (2 * x).backward()
    (2 * x).backward()
    assert compat.current_backward() == -1
    assert -1 not in seen
    assert seen[0] != seen[1]
