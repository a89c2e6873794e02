"""Trial steps leave no trace, whatever the step does and however it ends."""

from __future__ import annotations

import gc
import random
import warnings
from collections import defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sac_policies import BudgetError, fit_, report, save_ops

np = pytest.importorskip("numpy")

SEEN: list[Any] = []
CALLS = 0


class State:
    """An object of the program, with a tensor and a number."""

    def __init__(self) -> None:
        self.mean, self.count = torch.zeros(()), 0


class Busy(nn.Module):
    """A block that changes all kinds of state in its forward; x is (rows, 16)."""

    numbers = torch.Generator()

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 64), nn.Linear(64, 16), nn.BatchNorm1d(16)
        self.register_buffer("table", torch.zeros(3))
        self.register_buffer("other", torch.zeros(2))
        self.gain = nn.Parameter(torch.ones(16))
        self.calls, self.mode, self.held = 0, "first", None
        self.log, self.by_name, self.once = [], defaultdict(list), {0}
        self.last, self.state, self.array = deque([1], maxlen=2), State(), np.zeros(2)
        self.own, self.old, self.new = torch.Generator(), random.Random(1), np.random.default_rng(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Change everything, then compute."""
        global CALLS
        CALLS += 1
        self.calls, self.mode, self.held = self.calls + 1, "later", x.detach()
        self.log.append(x.shape)
        self.by_name["x"].append(self.calls)
        self.once.add(self.calls)
        self.last.append(self.calls)
        self.added = True
        with torch.no_grad():
            self.table.add_(1)
            self.other = self.other + 1
            self.gain.data.clamp_(max=0.9)
            self.gain.mul_(0.999)
            self.state.mean += x.mean()
        self.state.count += 1
        self.array[0] += 1
        random.random(), np.random.rand(), self.old.random(), self.new.random()
        noise = torch.rand(16, generator=self.own) + torch.rand(16, generator=self.numbers)
        y = self.down(torch.relu(self.up(self.norm(x)))) * self.gain
        return x + torch.dropout(y, 0.1, True) + noise


class Inputs:
    """A batch as graph libraries pass it."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.log = x, []


class Net(nn.Module):
    """Blocks that write into their batch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Busy() for _ in range(3))

    def forward(self, inputs: Inputs) -> torch.Tensor:
        """Run the blocks, and rewrite the batch."""
        inputs.x.mul_(0.5)
        inputs.log.append(1)
        x = inputs.x
        for block in self.blocks:
            x = block(x)
        inputs.x = x
        return x


class Program:
    """A model, a batch, a loss with weights outside of the model, hooks, and gradients."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        SEEN.clear()
        self.model, self.outer = Net(), nn.Parameter(torch.ones(16))
        self.batch = Inputs(torch.randn(64, 16))
        self.optimizers = {p: torch.optim.Adam([p]) for p in self.model.parameters()}
        self.counted, self.steps = 0, 0
        for each in (*self.model.parameters(), self.outer):
            each.grad = torch.full_like(each, 2.0)
        for each in self.model.parameters():
            each.register_post_accumulate_grad_hook(self._stepped)
        self.model.blocks[0].register_forward_hook(self._closing())
        self.model.blocks[1].register_forward_hook(lambda *_: SEEN.append(1))

    def _stepped(self, parameter: nn.Parameter) -> None:
        self.steps += 1
        self.optimizers[parameter].step()
        parameter.grad = None

    def _closing(self) -> Callable[..., None]:
        count = 0

        def hook(*_: Any) -> None:
            nonlocal count
            count += 1

        self.count_of = lambda: count
        return hook

    def loss(self, out: torch.Tensor) -> torch.Tensor:
        """Weights outside of the model get a gradient."""
        self.counted += 1
        return (out * self.outer).square().mean()

    def snapshot(self) -> Any:
        """Everything that a step could change, as plain values."""
        named = {**dict(self.model.named_parameters()), "outer": self.outer}
        return _plain(
            [
                {name: (p, p.grad, p._version, p.requires_grad) for name, p in named.items()},
                {name: (b, b._version) for name, b in self.model.named_buffers()},
                [vars(block) for block in self.model.blocks],
                [id(block.other) for block in self.model.blocks],
                [Busy.numbers.get_state(), torch.get_rng_state(), random.getstate()],
                [np.random.get_state(), SEEN, CALLS, self.counted, self.steps, self.count_of()],
                [id(self.batch.x), self.batch],
                [each.state_dict() for each in self.optimizers.values()],
                [id(p.grad) for p in named.values()],
                [list(p._post_accumulate_grad_hooks or ()) for p in named.values()],
            ]
        )


def _plain(value: Any) -> Any:
    """Write values out, with the bits of tensors and the states of generators."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().numpy().tobytes(), tuple(value.shape)
    if isinstance(value, torch.Generator):
        return _plain(value.get_state())
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, dict):
        return [(key, _plain(each)) for key, each in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return [_plain(each) for each in value]
    if isinstance(value, (State, Inputs)):
        return _plain(vars(value))
    return value.copy() if isinstance(value, set) else value if _is_scalar(value) else id(value)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, (int, float, str, bytes, type(None)))


def assert_same(now: Any, before: Any, where: str = "") -> None:
    """Compare snapshots; name the first difference."""
    if isinstance(before, list) and isinstance(now, list) and len(now) == len(before):
        for at, (one, other) in enumerate(zip(now, before, strict=True)):
            assert_same(one, other, f"{where}.{at}")
    elif isinstance(before, tuple) and isinstance(now, tuple) and len(now) == len(before):
        assert_same(list(now), list(before), where)
    else:
        assert now == before, where


@pytest.mark.parametrize("budget", ["90%", "100%", 1])
def test_program_is_as_before_fit(budget: Any) -> None:
    """Whether some levels are chosen, all is kept, or nothing fits."""
    program = Program()
    before = program.snapshot()
    found = fit_(program.model, (program.batch,), budget, loss=program.loss)
    assert bool(found) is (budget != 1)
    if found:
        found.undo()
    assert_same(program.snapshot(), before)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("at", [1, 2, 4])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_program_is_as_before_a_failed_fit(error: Any, at: int, where: str) -> None:
    """An interrupt or error in any step, in its forward or its backward."""
    program, calls = Program(), iter(range(1, 99))

    def fails(*_: Any) -> None:
        if next(calls) == at:
            raise error

    if where == "forward":
        program.model.blocks[2].register_forward_hook(fails)
    else:
        program.model.blocks[0].up.weight.register_hook(fails)
    before = program.snapshot()
    with pytest.raises(error):
        fit_(program.model, (program.batch,), 1, loss=program.loss)
    assert_same(program.snapshot(), before)


def test_program_is_as_before_a_report() -> None:
    """The forward runs once, and leaves nothing."""
    program = Program()
    before = program.snapshot()
    found = report(program.model, program.batch, policy=save_ops("aten.addmm"))
    assert found.rows
    assert_same(program.snapshot(), before)


def test_snapshot_sees_a_step() -> None:
    """A plain step changes what the tests above compare, except the hooks, which are last."""
    program = Program()
    before = program.snapshot()
    program.loss(program.model(program.batch)).backward()
    now = program.snapshot()
    changed = [one != other for one, other in zip(now, before, strict=True)]
    assert changed == [True] * (len(before) - 1) + [False]


def layers() -> nn.Sequential:
    """A stack of blocks."""
    torch.manual_seed(0)
    blocks = [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0) for _ in range(3)]
    return nn.Sequential(*blocks)


X = torch.linspace(-1, 1, 8 * 32 * 16).view(8, 32, 16)


def stepping(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Step an optimizer for each parameter when its gradient is accumulated."""
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        parameter.grad = None

    for each in model.parameters():
        each.register_post_accumulate_grad_hook(step)
    return list(optimizers.values())


def of_torch(model: nn.Module) -> None:
    """The same with torch's function."""
    with warnings.catch_warnings():  # of its import
        warnings.simplefilter("ignore")
        from torch.distributed.optim import _apply_optimizer_in_backward
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})


@pytest.mark.parametrize("way", [stepping, of_torch])
def test_optimizers_in_backward_are_off_and_gradients_are_not_counted(way: Any) -> None:
    """The budget counts a loop that frees each gradient; afterwards the hooks step again."""
    model, plain = layers(), layers()
    way(model)
    kept = fit_(plain, X[:1, :1], 1.0).plain_bytes
    found = fit_(model, X[:1, :1], 1.0)
    gradients = sum(p.nbytes for p in plain.parameters())
    assert found.plain_bytes < kept - gradients // 2
    for one, other in zip(model.parameters(), layers().parameters(), strict=True):
        assert torch.equal(one, other)
    model(X).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    assert not torch.equal(model[0].linear1.weight, layers()[0].linear1.weight)


def test_hooks_that_keep_gradients_are_counted_with_them() -> None:
    """Such a hook only reads."""
    model, norms = layers(), []
    plain = fit_(layers(), X[:1, :1], 1.0).plain_bytes
    for each in model.parameters():
        each.register_post_accumulate_grad_hook(lambda p: norms.append(p.grad.norm()))
    assert fit_(model, X[:1, :1], 1.0).plain_bytes == pytest.approx(plain, rel=0.01)
    assert norms == []


def test_gradients_in_shared_memory_survive() -> None:
    """Gradients may be views that a hook on the parameters fills, as in a flattened model."""
    model = layers()
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))

    def fill(view: torch.Tensor, parameter: nn.Parameter) -> None:
        if parameter.grad is not view:
            view.copy_(parameter.grad)
            parameter.grad = view

    views = flat.split([p.numel() for p in model.parameters()])
    for view, each in zip(views, model.parameters(), strict=True):
        view = view.view_as(each)
        each.register_post_accumulate_grad_hook(lambda p, view=view: fill(view, p))
    model(X).sum().backward()
    before, owned = flat.clone(), [p.grad for p in model.parameters()]
    fit_(model, 3 * X, 1)
    assert torch.equal(flat, before)
    assert all(p.grad is each for p, each in zip(model.parameters(), owned, strict=True))


@pytest.mark.parametrize("where", ["hook", "loss"])
def test_optimizer_that_steps_elsewhere_changes_nothing(where: str) -> None:
    """It steps without parameters; its state counts as if it were given."""
    model = layers()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step(value: torch.Tensor) -> torch.Tensor:
        optimizer.step()
        return value.sum()

    if where == "hook":
        model[0].linear1.weight.register_hook(lambda grad: step(grad) * grad)
    loss = step if where == "loss" else torch.sum
    found = fit_(model, X, 1.0, loss=loss)
    assert not optimizer.state
    assert found.plain_bytes == fit_(layers(), X, 1.0, optimizer=optimizer).plain_bytes
    for one, other in zip(model.parameters(), layers().parameters(), strict=True):
        assert torch.equal(one, other)


class Stateful(nn.Module):
    """Adds to a state outside of modules, which a program resets before each step."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the last result."""
        out = MEMORY.last = torch.tanh(self.inner(x) + MEMORY.last)
        return out


MEMORY = SimpleNamespace(last=0.0)


def test_reset_is_called_before_each_step() -> None:
    """Without it, backward reaches the graph of the step before."""
    model = nn.Sequential(*[nn.Sequential(Stateful(), nn.ReLU()) for _ in range(3)])
    called = iter(range(99))

    def reset(given: nn.Module) -> None:
        assert given is model
        next(called)
        MEMORY.last = 0.0

    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        fit_(model, X, 1)
    MEMORY.last = 0.0
    assert not fit_(model, X, 1, reset=reset)
    assert next(called) > 3


class Locked:
    """A batch that refuses to be copied."""

    def __init__(self) -> None:
        self.x = X

    def __deepcopy__(self, memo: Any) -> Locked:
        raise TypeError("cannot be copied")


class Unlocks(nn.Sequential):
    """Reads the batch."""

    def forward(self, batch: Any) -> torch.Tensor:
        """Run on its tensor."""
        return super().forward(batch.x)


def test_make_batch_is_called_for_each_step() -> None:
    """In place of a batch that cannot be copied; random numbers are restored."""
    model, calls = Unlocks(*layers()), iter(range(99))

    def make() -> Locked:
        next(calls)
        torch.rand(2)
        return Locked()

    with pytest.raises(BudgetError, match=r"cannot be copied .*Pass make_batch="):
        fit_(model, (Locked(),), "90%")
    state = torch.get_rng_state()
    found = fit_(model, budget="90%", make_batch=make)
    assert found
    assert torch.equal(torch.get_rng_state(), state)
    assert next(calls) > 3


def fails(*_: Any) -> Any:
    """A function of the user with a fault."""
    raise ZeroDivisionError("by nought")


def growing() -> Callable[[], torch.Tensor]:
    """Make batches of another length each time."""
    lengths = iter(range(1, 99))
    return lambda: X[: next(lengths)]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"make_batch": growing()},
            r"make_batch returned tensors \[\(\(1, 32, 16\), 'float32'\)\]",
        ),
        ({"make_batch": fails}, r"make_batch raised ZeroDivisionError: by nought"),
        ({"make_batch": X}, r"make_batch <Tensor .* is called in each measured step"),
        ({"batch": X, "reset": fails}, r"reset raised ZeroDivisionError: by nought"),
        ({"batch": X, "make_batch": lambda: X}, "batch and make_batch is passed"),
        ({}, "no batch is passed"),
        ({"batch": X, "budget": None}, "budget is None"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(given: dict[str, Any], said: str) -> None:
    """One sentence with the next step."""
    model = layers()
    model.register_forward_pre_hook(lambda *_: pytest.fail("a step runs"))
    with pytest.raises(BudgetError, match=said):
        fit_(model, **{"budget": "50%", **given})


def test_model_that_is_being_fitted_is_refused() -> None:
    """Here from its own loss."""
    model = layers()
    with pytest.raises(BudgetError, match="the model is being fitted"):
        fit_(model, X, "50%", loss=lambda out: fit_(model, X, "50%") or out.sum())
    assert fit_(model, X, "90%")


def test_uninitialized_parameters_are_refused() -> None:
    """A first forward changes their class."""
    with pytest.raises(BudgetError, match=r"parameter '0\.weight' is not initialized"):
        fit_(nn.Sequential(nn.LazyLinear(4), nn.ReLU()), X, "50%")


def test_batch_of_a_graph_is_detached() -> None:
    """Each step runs backward, and the user's graph stays usable."""
    source = torch.ones_like(X).requires_grad_()
    batch = source * X
    assert fit_(layers(), batch, 1.0)
    assert source.grad is None
    batch.sum().backward()
    assert torch.equal(source.grad, X)


def test_batch_whose_forward_asks_for_gradients_is_as_before() -> None:
    """As models of forces do."""

    class Forces(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.requires_grad_())

    batch = X.clone()
    assert fit_(Forces(*layers()), batch, 1.0)
    assert not batch.requires_grad
    assert batch.grad is None


def test_step_around_a_pending_graph_can_run_its_backward() -> None:
    """Restored parameters and buffers have the versions that the graph noted."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)) for _ in range(3)])
    model[0][0].register_forward_pre_hook(lambda own, _: own.weight.data.clamp_(-0.1, 0.1))
    pending = model.eval()(X.view(-1, 16)).sum()
    assert fit_(model.train(), X.view(-1, 16), 1.0)
    pending.backward()


def test_module_with_an_iterator_is_refused() -> None:
    """Its position cannot be restored."""
    model = layers()
    model[0].rates = iter([1.0, 2.0])
    model.register_forward_pre_hook(lambda *_: pytest.fail("a step runs"))
    with pytest.raises(BudgetError, match=r"attribute 'rates' of a Transformer.* list_iterator"):
        fit_(model, X, "50%")


def test_no_copy_of_memory_stays_alive_after_fit():
    """Also without a garbage collection, which may come much later."""
    gc.collect()
    gc.disable()
    try:
        layer = nn.TransformerEncoderLayer
        model = nn.Sequential(*[layer(32, 4, batch_first=True) for _ in range(4)])
        batch = torch.randn(4, 16, 32)
        known = {id(each) for each in gc.get_objects() if isinstance(each, torch.Tensor)}
        assert fit_(model, batch, "80%")
        kept = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
        assert [each.shape for each in kept if id(each) not in known and each.numel() > 8] == []
    finally:
        gc.enable()
