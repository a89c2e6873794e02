"""Ways of saving memory, and situations of a device; `_product.py` combines them."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

import flat_param
import sac_policies
from ckpt_wrap import checkpoint_, offload_

WIDTH, ROWS, BLOCKS = 32, 64, 3
SCALES = (0.5, -1.0, 0.25)  # scales of the inputs of a captured step
Model = Callable[[torch.Tensor], torch.Tensor]
SIM: Any = torch.get_device_module("simdev")
ZERO, ONE = torch.device("simdev", 0), torch.device("simdev", 1)


class Block(nn.Module):
    """Two products with an operator between."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


class Region(nn.Module):
    """A block in a checkpoint of sac-policies."""

    def __init__(self, block: nn.Module, **options: Any) -> None:
        super().__init__()
        self.block, self.options = block, options

    def forward(self, x):
        return sac_policies.checkpoint(self.block, x, **self.options)


def _replay(block):
    return Region(block, policy=sac_policies.recompute_all())


def _offload(block):
    return Region(block, policy=sac_policies.offload("aten.addmm", "aten.gelu"))


def _flat(block):
    flat_param.flatten(block)
    return block


def _sharded(**options):
    return lambda block: flat_param.fully_shard(block, **options)


def _offloaded(block):
    mesh = init_device_mesh("simdev", (dist.get_world_size(),))
    return flat_param.fully_shard(block.cpu(), mesh=mesh, offload_policy=CPUOffloadPolicy())


# Each is applied to every block of the model.
WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "offload": offload_,
    "checkpoint + offload": lambda block: offload_(checkpoint_(block)),
    "offload by policy": _offload,
    "replay": _replay,
    "flat views": _flat,
    "report by device clock": lambda block: block,
}
# The same on each of two ranks with the same batch, so means are the plain gradients.
SHARDED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "sharded, prefetch": _sharded(),
    "sharded, kept after forward": _sharded(reshard_after_forward=False),
    "sharded, CPU memory": _offloaded,
    "sharded + offload": lambda block: flat_param.fully_shard(offload_(block)),
}
COPIES_OUT = {
    "offload",
    "checkpoint + offload",
    "offload by policy",
    "sharded + offload",
}


class Fault(RuntimeError):
    """Raised with the problem that a situation with a fault has found."""


def given() -> torch.Tensor:
    """Return an input that requires a gradient."""
    return torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH).to(ZERO).requires_grad_()


def _one(a, b, x, seed):
    b(a(x)).square().sum().backward()


def _two_devices(a, b, x, seed):
    b(a(x).to(ONE)).square().sum().backward()


def _two_streams(a, b, x, seed):
    main, side = torch.accelerator.current_stream(ZERO), torch.Stream(ZERO)
    h = a(x)
    side.wait_stream(main)
    h.record_stream(side)
    with side:
        z = b(h)
    main.wait_stream(side)
    z.record_stream(main)
    z.square().sum().backward()
    main.wait_stream(side)


def _side_stream(a, b, x, seed):
    main, side = torch.accelerator.current_stream(ZERO), torch.Stream(ZERO)
    side.wait_stream(main)
    with side:
        _one(a, b, x, seed)
    main.wait_stream(side)


def _two_threads(a, b, x, seed):
    (a(x).square().sum() + b(x.to(ONE)).square().sum().to(ZERO)).backward()


def _pipeline(a, b, x, seed):
    losses = [b(a(x * scale).to(ONE)).square().sum() for scale in (1.0, 0.5, 0.25)]
    while losses:
        losses.pop(0).backward()


def _micro_batches(a, b, x, seed):
    losses = [b(a(x * scale)).square().sum() for scale in (1.0, 0.5)]
    while losses:
        losses.pop(0).backward()


def _out_of_memory(a, b, x, seed):
    held = _after_one(a, b, x, seed)
    SIM.empty_cache()
    more = seed % 7 * 40_000
    SIM.limit(SIM.memory(0)["reserved"] + 8192 + more, 0)
    told = _told(lambda: _one(a, b, x, seed))
    SIM.limit(None, 0)
    if not (told or more):
        raise Fault("nobody was told that memory is out")
    _after_a_fault(a, b, x, seed, held)
    _one(a, b, x, seed)


def _failing_copy(name, a, b, x, seed):
    held = _after_one(a, b, x, seed)
    SIM.fail_later(name, 1 + seed % 4)
    told = _told(lambda: _one(a, b, x, seed))
    SIM.fail_later("", 0)
    if not told:
        raise Fault("nobody was told of the fault")
    _after_a_fault(a, b, x, seed, held)
    _one(a, b, x, seed)


def _told(step: Callable[[], None]) -> bool:
    """Whether the step, or a wait after it, raises the device's error."""
    told = False
    for call in (step, SIM.synchronize_all, SIM.synchronize_all):
        try:
            call()
        except RuntimeError as error:
            if "simdev:" not in str(error):
                raise
            told = True
    return told


def _at_rest() -> int:
    gc.collect()
    SIM.synchronize_all()
    return SIM.memory(0)["allocated"]


def _after_one(a, b, x, seed) -> int:
    """Return the memory held after a step without a fault, with everything initialized."""
    _one(a, b, x, seed)
    _let_go()
    return _without_gradients(a, b, x)


def _let_go() -> None:
    """Let a device's thread drop its last backward, which it holds until the next one."""
    none = torch.empty(0, device=ZERO, requires_grad=True)
    (none * 1).backward(torch.empty(0, device=ZERO))


def _without_gradients(a, b, x) -> int:
    for tensor in (x, *a.parameters(), *b.parameters()):
        tensor.grad = None
    return _at_rest()


def _after_a_fault(a, b, x, seed, held) -> None:
    """Run another step, and return memory held beyond that before the fault."""
    _without_gradients(a, b, x)
    _one(a, b, x, seed)
    _let_go()
    if (left := _without_gradients(a, b, x) - held) > 0:
        raise Fault(f"the step that failed left {left} bytes behind")


def _graph_pool(a, b, x, seed):
    main, side = torch.accelerator.current_stream(ZERO), torch.Stream(ZERO)
    side.wait_stream(main)
    with side:
        _one(a, b, x, seed)
        _one(a, b, x, seed)
    main.wait_stream(side)
    _begin(a, b, x, seed)
    graph = SIM.Graph()
    with SIM.graph(graph):
        _one(a, b, x, seed)
    for scale in SCALES:
        _give(x, scale)
        graph.replay()


def _without_graph(a, b, x, seed):
    _one(a, b, x, seed)
    _begin(a, b, x, seed)
    for scale in SCALES:
        _give(x, scale)
        if seed % 2:
            _without_gradients(a, b, x)
        _one(a, b, x, seed)


def _begin(a, b, x, seed) -> None:
    """Gradients are the graph's and new in each replay, or existed before and accumulate."""
    if seed % 2:
        _without_gradients(a, b, x)
        return
    for tensor in (x, *a.parameters(), *b.parameters()):
        tensor.grad.zero_()


def _give(x, scale) -> None:
    with torch.no_grad():
        x.copy_(given() * scale)


def _refused_capture(a, b, x, seed):
    """Steps after a capture that ended early: in forward, between the passes, or in backward."""
    _one(a, b, x, seed)
    _without_gradients(a, b, x)
    with contextlib.suppress(RuntimeError), SIM.graph(SIM.Graph()):
        h = a(x)
        if seed % 3 == 0:
            h.sum().item()  # the host must not wait, so this is refused
        if seed % 3 == 1:
            h.register_hook(lambda grad: grad.sum().item())
        loss = b(h).square().sum()
        if seed % 3 == 2:
            raise RuntimeError("its capture is given up")
        loss.backward()
    _without_gradients(a, b, x)
    with warnings.catch_warnings():  # torch warns: h keeps a graph
        warnings.filterwarnings("ignore", "The AccumulateGrad node's stream")
        _one(a, b, x, seed)


class Stopped(Exception):
    """Stops a backward in the middle."""


def _stopped(a, b, x, seed, two=False):
    """A backward that is stopped in the middle, then another one; threads keep references."""
    kind, at = (Stopped, KeyboardInterrupt)[seed % 2], seed % 3
    cleared = [x, *a.parameters(), *b.parameters()]  # like an optimizer

    def stop(grad):
        for handle in handles:
            handle.remove()
        raise kind

    def watch(block, args, output):
        handles.append(output.register_hook(stop))

    handles = [(a[1], a[-1], b[1])[at].register_forward_hook(watch)]
    h = a(x)
    z = (b(x.to(ONE)) if two else b(h)).square().sum()
    loss = h.square().sum() + z.to(ZERO) if two else z.cpu() if seed % 4 > 1 else z
    if at == 2:  # while a gradient is passed on
        handles.pop().remove()
        last = next(b[1].parameters())
        handles.append(last.register_post_accumulate_grad_hook(stop))
    try:
        loss.backward(retain_graph=True)
        raise Fault("nothing ended the backward")
    except kind:
        for tensor in cleared:
            tensor.grad = None
    loss.backward()


def _stopped_inside(*given):
    """Both in a hook of another backward, alternating between host and device threads."""
    around = torch.ones(1, device=(ZERO, "cpu")[given[-1] % 2], requires_grad=True) * 1
    around.register_hook(lambda grad: torch.enable_grad()(_stopped)(*given))
    around.sum().backward()


STILL = {"virtual": True, "host_us": 0, "queue_limit": 0}
# What runs, the device of its second part, and fixed parts of the schedule.
Situation = tuple[Callable[..., None], torch.device, dict[str, Any]]
SITUATIONS: dict[str, Situation] = {
    "one device": (_one, ZERO, {}),
    "two devices": (_two_devices, ONE, {}),
    "two streams": (_two_streams, ZERO, {}),
    "two backward threads": (_two_threads, ONE, {}),
    "side stream": (_side_stream, ZERO, {}),
    "micro-batches": (_micro_batches, ZERO, {}),
    "pipeline of micro-batches": (_pipeline, ONE, {}),
    "host far ahead": (_one, ZERO, STILL | {"kernel_us": 100}),
    "slow copies": (_two_streams, ZERO, {"virtual": True, "kernel_us": 10, "copy_us": 5000}),
    "jitter": (_two_streams, ZERO, {"virtual": False, "jitter": True}),
    "out of memory": (_out_of_memory, ZERO, {}),
    "failing copy out": (lambda *a: _failing_copy("copy to host", *a), ZERO, {}),
    "failing copy in": (lambda *a: _failing_copy("copy to device", *a), ZERO, {}),
    "graph pool": (_graph_pool, ZERO, {}),
    "refused capture": (_refused_capture, ZERO, {}),
    "stopped backward": (_stopped, ZERO, {}),
    "stopped backward, two threads": (lambda *a: _stopped(*a, two=True), ONE, {}),
    "stopped backward, inside another": (_stopped_inside, ZERO, {}),
}

FAULTS = {"out of memory", "failing copy out", "failing copy in"}
# Results of plain training if they differ, computed once.
PLAIN = dict.fromkeys((*FAULTS, "refused capture"), _one) | {"graph pool": _without_graph}


REFUSE_CAPTURE = {
    *("offload", "checkpoint + offload"),
    "sharded, CPU memory",
}


def no_sense(way: str, situation: str) -> str:
    """Return why a cell does not run, in a few words; "" if it runs."""
    if situation.startswith("failing copy") and way not in COPIES_OUT:
        return "no copies"
    if situation == "graph pool" and way in REFUSE_CAPTURE:
        return "an error at capture"
    if way in SHARDED and SITUATIONS[situation][1] == ONE:
        return "one device a rank"
    return ""
