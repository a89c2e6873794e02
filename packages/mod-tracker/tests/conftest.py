"""Models and an operation log shared by the tests of mod_tracker."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

with suppress(ImportError):
    import simdev  # noqa: F401 - before the first backward, which counts the devices

ARITHMETIC = {"mm", "addmm", "relu", "threshold_backward", "tanh", "tanh_backward", "mul", "neg"}


class OpLog(TorchDispatchMode):
    """A mode that records (phase, operation, stack) of arithmetic operations."""

    def __init__(self, tracker):
        super().__init__()
        self.tracker = tracker
        self.entries = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ARITHMETIC:
            self.entries.append((self.tracker.phase, name, self.tracker.stack))
        return func(*args, **(kwargs or {}))


class Clock:
    """A clock that a test advances, since the machine may be busy."""

    def __init__(self):
        self.ns = 0

    def passes(self, ns):
        self.ns += ns


@pytest.fixture
def clock(monkeypatch):
    """The clock that time reports read in this test."""
    made = Clock()
    monkeypatch.setattr(time, "perf_counter_ns", lambda: made.ns)
    return made


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4, bias=False)
        self.b = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.b(self.a(x).relu())


class Checkpointed(nn.Module):
    def __init__(self, *, use_reentrant):
        super().__init__()
        self.m = MLP()
        self.out = nn.Linear(4, 4, bias=False)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return self.out(checkpoint(self.m, x, use_reentrant=self.use_reentrant))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32, bias=False), nn.Linear(32, 8, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def mlp():
    """Two linear layers with a relu between them."""
    return MLP()


@pytest.fixture
def checkpointed():
    """Class of a model that checkpoints an MLP."""
    return Checkpointed


@pytest.fixture
def x():
    """A leaf input that requires a gradient."""
    return torch.randn(2, 4, requires_grad=True)


@pytest.fixture
def log_ops():
    """`log_ops(tracker, function)` returns (phase, operation, stack) for what `function` does."""

    def run(tracker, function):
        log = OpLog(tracker)
        with tracker, log:
            function()
        return log.entries

    return run


@pytest.fixture
def log_events():
    """`log_events(tracker)` returns a list that the four user hooks fill with "+fw name" etc."""

    def register(tracker):
        events = []

        def write(sign):
            def hook(module, *_):
                name = None if module is None else tracker.get_known_fqn(module)
                assert name is None or name in tracker.parents
                events.append(f"{sign} {name}")

            return hook

        tracker.register_user_hooks(write("+fw"), write("-fw"), write("+bw"), write("-bw"))
        return events

    return register


@pytest.fixture
def accelerator():
    """The first accelerator of this machine; it may be the simulated one."""
    if not torch.accelerator.is_available():
        pytest.skip("needs an accelerator")
    return torch.device(torch.accelerator.current_accelerator().type, 0)


@pytest.fixture
def fresh_compiler():
    """Reset torch.compile before and after the test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def model_and_optimizer():
    """`model_and_optimizer()` returns two blocks without gradients, and Adam."""

    def make():
        model = nn.Sequential(Block(), Block())
        return model, torch.optim.Adam(model.parameters())

    return make


@pytest.fixture
def train():
    """`train(model, optimizer, x)` runs one training step."""

    def step(model, optimizer, x):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    return step


class Meanwhile:
    """Runs an action in another thread in the middle of this thread's work, once.

    If a lock blocks the action, this waits for `BLOCKED_S`; the action runs when the lock is free.
    """

    BLOCKED_S = 0.2

    def __init__(self):
        self.errors, self._thread = [], None

    def at(self, function, action):
        """Return the function with the action run before it in another thread."""

        def meanwhile(*args, **kwargs):
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, args=(action,), daemon=True)
                self._thread.start()
                self._thread.join(self.BLOCKED_S)
            return function(*args, **kwargs)

        return meanwhile

    def _run(self, action):
        try:
            action()
        except BaseException as error:
            self.errors.append(error)

    def ends(self):
        """Wait for the other thread; the action must have run without an error."""
        self._thread.join(60)
        assert not self._thread.is_alive()
        assert self.errors == []


@pytest.fixture
def meanwhile():
    """An action in another thread, run in the middle of this thread's work."""
    return Meanwhile()
