import pytest
import torch

from flat_param.buffers import _views
from flat_param.buffers._views import memory_order, param_views, unflatten
from flat_param.layout._spec import spec_of
from flat_param.plan import ParamSpec, plan_layout


def test_param_views_have_the_planned_stride_and_memory():
    """A channels-last view is channels-last, inside the buffer."""
    layout = plan_layout([ParamSpec("k", (2, 3, 2, 2), torch.float32, (12, 1, 6, 3))])
    buffer = torch.arange(float(layout.numel))
    (view,) = param_views(buffer, layout)
    assert view.stride() == (12, 1, 6, 3)
    assert view.data_ptr() == buffer.data_ptr()


def test_param_views_of_a_slice_start_at_the_slice():
    """A buffer that is itself a slice keeps its offset."""
    layout = plan_layout([ParamSpec("w", (2,), torch.float32)])
    (view,) = param_views(torch.arange(8.0)[4:], layout)
    assert view.tolist() == [4.0, 5.0]


def test_unflatten_agrees_with_param_views():
    """Both ways to see a parameter in a vector show the same values, whatever the stride."""
    tensors = [torch.randn(4, 3).t(), torch.randn(2, 3, 2, 2), torch.tensor(1.0), torch.ones(0, 2)]
    tensors[1] = tensors[1].to(memory_format=torch.channels_last)
    layout = plan_layout([spec_of(str(i), t) for i, t in enumerate(tensors)])
    buffer = torch.randn(layout.numel + 2)
    for ours, view in zip(
        unflatten(buffer, layout).values(), param_views(buffer, layout), strict=True
    ):
        assert torch.equal(ours, view)
        assert ours.stride() == view.stride()


def test_unflatten_makes_one_backward_node_for_all():
    """One split, so the backward pass writes the vector's gradient once."""
    layout = plan_layout([ParamSpec(str(i), (3,), torch.float32) for i in range(4)])
    vector = torch.randn(layout.numel, requires_grad=True)
    made = [view.grad_fn for view in unflatten(vector, layout).values()]
    splits = {permute.next_functions[0][0].next_functions[0][0] for permute in made}
    assert [type(node).__name__ for node in splits] == ["SplitWithSizesBackward0"]


def test_memory_order_undoes_a_view():
    """The elements of a view, in memory order, are the buffer."""
    spec = ParamSpec("w", (2, 3), torch.float32, (1, 2))
    layout = plan_layout([spec], align_bytes=1)
    buffer = torch.arange(6.0)
    assert torch.equal(memory_order(param_views(buffer, layout)[0], spec), buffer)


@pytest.mark.parametrize(("kind", "shares"), [("cpu", True), ("meta", False)])
def test_a_kind_of_device_is_tried_where_it_is_not_known(kind, shares, monkeypatch):
    """Once, with a stretch of a few bytes that is written to."""
    monkeypatch.setattr(_views, "_ADDRESSED", {})
    assert _views._is_addressed(torch.device(kind)) is shares
    monkeypatch.setattr(_views, "_shares_stretches", lambda device: pytest.fail("is tried again"))
    assert _views._is_addressed(torch.device(kind)) is shares


def test_a_kind_whose_storages_have_no_stretches_is_no_error(monkeypatch):
    """The view itself is given back, as where there is no memory."""

    def refuse(*_):
        raise NotImplementedError

    monkeypatch.setattr(_views, "_ADDRESSED", {})
    monkeypatch.setattr(torch.Tensor, "set_", refuse)
    whole = torch.arange(8.0)
    assert _views.over(whole.untyped_storage(), whole[2:4]).untyped_storage().nbytes() == 32
