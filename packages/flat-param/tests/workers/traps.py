"""Uses of a sharded model that once went wrong without a word; one check per claim."""

from __future__ import annotations

import copy
import inspect
import io
import warnings

import torch
from _harness import raises, same_bits, stepping, whole_state
from _whole import whole_bytes
from torch import Tensor, nn

import flat_param


class Adapter(nn.Module):
    """A large layer and two small ones."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.up(self.down(x))
        return y


def sharded() -> nn.Module:
    """Two layers, a unit each, and one around them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    for module in (model[0], model[1], model):
        flat_param.fully_shard(module)
    return model


def check_parameter_added_after_sharding_is_refused(rank: int, world: int) -> None:
    """In the first forward, and in a save; a frozen one and an ignored one may stay."""
    text = "parameter '0.down.weight' was added after fully_shard and belongs to no unit"
    model = sharded()
    model[0] = Adapter(model[0])
    raises(flat_param.StateError, text, lambda: model(torch.ones(2, 6)))
    raises(flat_param.StateError, text, lambda: flat_param.save_sharded(model, "nowhere"))
    model[0].down.requires_grad_(False)
    model[0].up.requires_grad_(False)
    frozen = sharded()
    frozen[0] = Adapter(frozen[0]).requires_grad_(False)
    frozen(torch.ones(2, 6))


def check_parameter_added_after_a_step_is_refused(rank: int, world: int) -> None:
    """In the next forward, and in each one after that."""
    model = sharded()
    model(torch.ones(2, 6)).sum().backward()
    model[0].late = nn.Parameter(torch.ones(6))
    text = "parameter '0.late' was added after fully_shard and belongs to no unit"
    for _ in range(2):
        raises(flat_param.StateError, text, lambda: model(torch.ones(2, 6)))
    del model[0].late
    model(torch.ones(2, 6)).sum().backward()


class Scale(nn.Module):
    """Computes with the weight of a child that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(8, bias=False), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.norm.weight
        y: Tensor = self.out(x)[:, : weight.numel()] * weight
        return y


def check_gradients_are_copied(rank: int, world: int) -> None:
    """Those that this rank has all of, and those that are pieces; both can be saved."""
    for boundary in ("element", "tensor"):
        layer = flat_param.fully_shard(nn.Linear(6, 6), boundary=boundary)
        layer(torch.ones(2, 6)).sum().backward()
        for param in (each for each in layer.parameters() if each.grad is not None):
            local = param.grad.to_local()
            copied = copy.deepcopy(param.grad)
            assert torch.equal(copied.to_local(), local)
            assert copied.data_ptr() != local.data_ptr() or not local.numel()
            assert type(copy.deepcopy(param)) is type(param)
            file = io.BytesIO()
            torch.save(param.grad.detach(), file)
            file.seek(0)
            assert torch.equal(torch.load(file).to_local().view(local.shape), local)


def check_rows_are_reduced_along_rows(rank: int, world: int) -> None:
    """Where rows are whole, so are their norms; not those of columns."""
    layer = flat_param.fully_shard(nn.Linear(6, 6, bias=False), boundary="row")
    assert layer.weight.norm(dim=1).shape == (3,)
    assert layer.weight.sum(-1).shape == (3,)
    for call in (lambda: layer.weight.norm(dim=0), lambda: layer.weight.sum((0, 1))):
        raises(flat_param.ParameterError, "but this rank has 18 of 36 elements", call)
    blocks = flat_param.fully_shard(nn.Linear(6, 6, bias=False), boundary=flat_param.Blocks(3))
    assert blocks.weight.view(-1, 3).abs().amax(1).shape == (6,)
    for dim in (0, 1, -1):
        text = "but this rank has 18 of 36 elements"
        raises(flat_param.ParameterError, text, lambda dim=dim: blocks.weight.norm(dim=dim))


def check_groups_by_number_of_dimensions(rank: int, world: int) -> None:
    """Those of the whole parameters."""
    for boundary in ("element", "row", "tensor", flat_param.Blocks(4)):
        layers = nn.Sequential(nn.Linear(6, 6), nn.Conv1d(2, 3, 2))
        model = flat_param.fully_shard(layers, boundary=boundary)
        assert [each.ndim for each in model.parameters()] == [2, 1, 3, 1], boundary
        assert [each.dim() for each in model.parameters()] == [2, 1, 3, 1], boundary
        assert [len(each.shape) for each in model.parameters()] == [2, 1, 3, 1], boundary


def check_optimizers_of_whole_tensors_are_found_by_what_they_do(rank: int, world: int) -> None:
    """Classes of any name; on whole tensors they step."""

    def mix(param: Tensor, *_: object) -> None:
        if param.ndim == 2:
            update = param.grad.lerp(torch.zeros_like(param), 0.1)
            param.data.mul_(update.flatten() @ update.flatten())

    make = stepping(mix)
    for boundary in ("element", "row", "tensor"):
        layer = flat_param.fully_shard(nn.Linear(6, 6), boundary=boundary)
        layer(torch.ones(2, 6)).square().sum().backward()
        step = make(layer.parameters()).step
        if boundary == "tensor":
            step()
        else:
            raises(flat_param.ParameterError, "shard with boundary='tensor'", step)
    rules = flat_param.by_name({"0.*": "tensor"})
    for width in (6, 40):  # rank 1 has all of the second layer, or a part
        mixed = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, width))
        flat_param.fully_shard(mixed, boundary=rules)
        mixed(torch.ones(2, 6)).square().sum().backward()
        before = [param.detach().clone() for param in mixed.parameters()]
        text = "was called with parameter '1.weight' of the outermost unit"
        raises(flat_param.ParameterError, text, make(mixed.parameters()).step)
        now = [param.to_local() for param in mixed.parameters()]
        assert all(map(torch.equal, [each.to_local() for each in before], now)), width


def check_optimizer_that_sends_parameters_is_refused(rank: int, world: int) -> None:
    """ZeRO-1 would broadcast the pieces of one rank. Of a plain model it steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, which torch imports
        from torch.distributed.optim import ZeroRedundancyOptimizer

    for model, is_sharded in ((sharded(), True), (nn.Linear(6, 6), False)):
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
        model(torch.ones(2, 6)).square().sum().backward()
        before = [param.detach().clone() for param in model.parameters()]
        if is_sharded:
            text = "ZeroRedundancyOptimizer sends parameters from rank to rank"
            raises(flat_param.ParameterError, text, optimizer.step)
        else:
            optimizer.step()
        assert all(map(torch.equal, before, model.parameters())) == is_sharded


def _replicated(module: nn.Module) -> None:
    """torch's DDP without a wrapper begins in the first forward."""
    from torch.distributed._composable.replicate import replicate

    replicate(module)(torch.ones(2, 6))


def check_ddp_around_units_is_refused(rank: int, world: int) -> None:
    """DDP would broadcast rank 0's pieces. Units whose parameters it ignores may be inside."""
    ddp = nn.parallel.DistributedDataParallel
    for boundary in (None, "tensor"):
        model = sharded() if boundary is None else Scale()
        if boundary is not None:
            flat_param.fully_shard(model, boundary=boundary)
        before = whole_state(model)
        task = nn.Sequential(nn.Sequential(model), nn.Linear(2, 2))
        text = "whose parameter '0.0."
        raises(flat_param.StateError, "would overwrite each rank's piece", lambda m=model: ddp(m))
        raises(flat_param.StateError, text, lambda t=task: ddp(t))
        raises(flat_param.StateError, "whose parameter '", lambda t=task: _replicated(t))
        same_bits(whole_state(model), before)
        assert not hasattr(model, "_ddp_params_and_buffers_to_ignore")
        names = [name for name, _ in model.named_parameters()]
        model._ddp_params_and_buffers_to_ignore = names
        raises(RuntimeError, "is not needed", lambda m=model: ddp(m))
        task._ddp_params_and_buffers_to_ignore = [f"0.0.{name}" for name in names]
        assert ddp(task).module is task
        same_bits(whole_state(model), before)


def check_members_of_a_sharded_module_can_be_read(rank: int, world: int) -> None:
    """`inspect.getmembers` reads each attribute."""
    known = dict(inspect.getmembers(sharded()))
    assert known["unshard"]


def check_product_with_a_piece_is_refused(rank: int, world: int) -> None:
    """Each rank has four of eight elements, and torch has no objection."""
    model = Scale()
    for module in (model.norm, model):
        flat_param.fully_shard(module)
    text = "parameter 'weight' is a piece of shape (4,) where mul computes with it"
    for _ in range(2):
        raises(flat_param.StateError, text, lambda: model(torch.ones(3, 8)).sum().backward())
        assert all(param.grad is None for param in model.parameters())
    model.norm.unshard()
    model(torch.ones(3, 8)).sum().backward()
    model.norm.reshard()
    assert model.norm.weight.grad is not None


def check_errors_of_writes_to_pieces_are_torchs(rank: int, world: int) -> None:
    """They are about the values, not about where the piece is."""
    param = next(each for each in sharded().parameters() if each.numel())
    wrong = torch.ones(5, 4, 3, 2)
    raises(RuntimeError, "assign a gradient", lambda: setattr(param, "grad", wrong))
    raises(RuntimeError, "size of tensor", lambda: param.data.add_(wrong))
    raises(RuntimeError, "in-place", lambda: param.add_(1))
    text = "where add_ computes with it, but only a call of unit '0' makes it whole"
    raises(flat_param.StateError, text, lambda: wrong.add_(param))


def penalized(model: nn.Module, x: Tensor) -> Tensor:
    """A loss with the norm of a gradient."""
    x = x.clone().requires_grad_()
    out = model(x)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    loss: Tensor = (grad.norm(dim=1) - 1).square().mean() + out.square().mean()
    return loss


def check_gradient_penalty(rank: int, world: int) -> None:
    """Bit-identical to the plain model: the second backward finds weights that the first read."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    expected = copy.deepcopy(model)
    for module in (model[0], model[2], model):
        flat_param.fully_shard(module)
    for net in (expected, model):
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for step in range(3):
            optimizer.zero_grad()
            penalized(net, torch.full((4, 6), 0.3 + step)).backward()
            optimizer.step()
    same_bits(whole_state(model), dict(expected.state_dict()))
    assert whole_bytes(model) == 0
