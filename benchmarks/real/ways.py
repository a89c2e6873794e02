"""The ways to train that are compared: ours, torch's, transformers', TRL's and others'.

To add a way, write a function with the decorator `way` that changes a `Case`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .measuring import Case, Unavailable
from .models import HeadLoss, Llama, liger_loss, sliced_loss, trl_loss

GROUPS = {
    "eager": "layers run eagerly",
    "compiled": "layers compiled one by one",
    "training": "with AdamW",
    "reports": "one report for each step",
}
# Ratios are relative to the first way of each group.
REBUILT = ("training",)
SHARES = ("75%", "50%", "35%")


@dataclass(frozen=True)
class Registered:
    """One way to train."""

    name: str
    group: str
    prepare: Callable[[Case], None]
    exact: bool


WAYS: list[Registered] = []
Prepare = Callable[[Case], None]


def way(
    name: str, group: str = "eager", *, exact: bool | None = None
) -> Callable[[Prepare], Prepare]:
    """Register a function that changes a case.

    Args:
        name: without commas.
        group: one of `GROUPS`.
        exact: whether gradients should have plain's bits; by default, unless compiled.
    """

    def register(prepare: Prepare) -> Prepare:
        is_exact = group != "compiled" if exact is None else exact
        WAYS.append(Registered(name, group, prepare, is_exact))
        return prepare

    return register


def torch_sac_contexts() -> Any:
    """Make contexts of torch's selective checkpointing that keep matmuls and attention."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    aten = torch.ops.aten
    kept = {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
    return create_selective_checkpoint_contexts(policy)


def wrap_with_torch_sac(case: Case) -> None:
    """Wrap layers as torchtitan does."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for index, layer in enumerate(case.layers):
        case.layers[index] = checkpoint_wrapper(layer, context_fn=torch_sac_contexts)


def checkpoint_layers(case: Case, policy: Any = None, **options: Any) -> None:
    """Checkpoint each layer in place; with a policy, by sac_policies."""
    import ckpt_wrap
    import sac_policies

    if policy is not None:
        options |= {"checkpoint_fn": sac_policies.checkpoint, "policy": policy}
    for layer in case.layers:
        ckpt_wrap.checkpoint_(layer, **options)


def offload_layers(case: Case) -> None:
    """Offload each layer in place."""
    import ckpt_wrap

    for layer in case.layers:
        ckpt_wrap.offload_(layer)


def matmuls_and_attention() -> Any:
    """Return the policy that keeps matmuls and attention."""
    from sac_policies import ATTENTION, MATMULS, save_ops

    return save_ops(MATMULS, ATTENTION)


def transformers_switch(case: Case, **options: Any) -> None:
    """Call transformers' method for checkpointing."""
    if isinstance(case.model, Llama):
        raise Unavailable("only transformers' own models have this switch")
    enable = getattr(case.model, "activation_checkpointing_enable", None)
    if enable is None:
        case.model.gradient_checkpointing_enable({"use_reentrant": False}, **options)
    else:
        enable({"use_reentrant": False}, **options)


def new_transformers_switch(case: Case, **options: Any) -> None:
    """Call the method with options that older versions lack."""
    if not (
        isinstance(case.model, Llama) or hasattr(case.model, "activation_checkpointing_enable")
    ):
        raise Unavailable(
            f"transformers {version('transformers')} has no option {next(iter(options))}="
        )
    transformers_switch(case, **options)


@way("plain")
def _(case: Case) -> None:
    pass


@way("checkpoint_")
def _(case: Case) -> None:
    checkpoint_layers(case)


@way("checkpoint_layers_ every=2")
def _(case: Case) -> None:
    import ckpt_wrap

    ckpt_wrap.checkpoint_layers_(case.model, every=2)


@way("checkpoint_ and offload_")
def _(case: Case) -> None:
    checkpoint_layers(case)
    offload_layers(case)


# Sums over slices are added in another order.
@way("checkpoint_ and in_slices", exact=False)
def _(case: Case) -> None:
    checkpoint_layers(case)
    case.model = HeadLoss(case.model, sliced_loss)


@way("checkpoint_ and TRL loss", exact=False)
def _(case: Case) -> None:
    checkpoint_layers(case)
    case.model = HeadLoss(case.model, trl_loss())


@way("checkpoint_ and Liger loss", exact=False)
def _(case: Case) -> None:
    checkpoint_layers(case)
    case.model = HeadLoss(case.model, liger_loss())


@way("offload_")
def _(case: Case) -> None:
    require_host_memory(case)
    offload_layers(case)


@way("transformers")
def _(case: Case) -> None:
    transformers_switch(case)


@way("transformers every_n_layers=2")
def _(case: Case) -> None:
    new_transformers_switch(case, every_n_layers=2)


@way("transformers offload=True")
def _(case: Case) -> None:
    new_transformers_switch(case, offload=True)


@way("torch SAC")
def _(case: Case) -> None:
    wrap_with_torch_sac(case)


@way("torch_remat")
def _(case: Case) -> None:
    if importlib.util.find_spec("torch_remat") is None:
        raise Unavailable("torch_remat is not installed")
    import torch_remat

    for number, layer in enumerate(case.layers):
        layer.forward = torch_remat.checkpoint(region_name=f"layer{number}")(layer.forward)


@way("TRL offload")
def _(case: Case) -> None:
    if importlib.util.find_spec("trl") is None:
        raise Unavailable("trl is not installed")
    if case.device.type == "cpu":
        raise Unavailable("needs an accelerator")
    from trl.models.activation_offloading import get_act_offloading_ctx_manager

    require_host_memory(case)
    offloading = get_act_offloading_ctx_manager(case.model, warn_if_no_head=False)
    case.around_forward = lambda: offloading


@way("sac_policies matmuls")
def _(case: Case) -> None:
    checkpoint_layers(case, matmuls_and_attention())


@way("sac_policies matmuls unchecked")
def _(case: Case) -> None:
    checkpoint_layers(case, matmuls_and_attention(), determinism_check="none")


@way("sac_policies matmuls offloaded")
def _(case: Case) -> None:
    from sac_policies import offload

    require_host_memory(case)
    checkpoint_layers(case, offload(matmuls_and_attention()))


@way("sac_policies nothing kept")
def _(case: Case) -> None:
    from sac_policies import recompute_all

    checkpoint_layers(case, recompute_all())


def fit(case: Case, share: str) -> None:
    """Let fit_ choose what to keep for a share of the plain peak."""
    from sac_policies import fit_

    began = time.monotonic()
    budget: int | str = share
    if share == "smallest":
        # If no plan fits the budget, fit_'s error has the smallest measured peak.
        budget = fit_(case.model, case.batch, 1, optimizer=case.optimizer).smallest_bytes
    found = fit_(case.model, case.batch, budget, optimizer=case.optimizer)
    if not found:
        raise Unavailable(str(found).partition(" (")[0])
    case.note = f"fitted in {time.monotonic() - began:.1f} s"


for _share in (*SHARES, "smallest"):

    @way(f"fit_ {_share}")
    def _(case: Case, share: str = _share) -> None:
        fit(case, share)


@way("fit_ 75% and in_slices", exact=False)
def _(case: Case) -> None:
    case.model = HeadLoss(case.model, sliced_loss)
    fit(case, "75%")


@way("torch save_on_cpu")
def _(case: Case) -> None:
    require_host_memory(case)
    pinned = case.device.type != "cpu"
    case.around_forward = functools.partial(
        torch.autograd.graph.save_on_cpu, pin_memory=pinned, device_type=case.device.type
    )


def compile_layers(case: Case, budget: float | None = None) -> None:
    """Compile each layer, with separate code for each way.

    Dynamo finds compiled code by the function and the backend. A new backend prevents ways with
    other settings from using this way's code.
    """
    from torch._dynamo.backends.registry import lookup_backend
    from torch._functorch import config

    torch._dynamo.config.recompile_limit = 64  # all ways compile one function
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # instead of running it uncompiled
    compiler = lookup_backend(case.shape.compiler)

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Any:
        if budget is None:
            return compiler(graph, inputs)
        with config.patch(activation_memory_budget=budget):
            return compiler(graph, inputs)

    for layer in case.layers:
        layer.compile(backend=backend, dynamic=False)


@way("compiled plain", "compiled")
def _(case: Case) -> None:
    compile_layers(case)


@way("compiled checkpoint_", "compiled")
def _(case: Case) -> None:
    checkpoint_layers(case)
    compile_layers(case)


@way("compiled torch SAC", "compiled")
def _(case: Case) -> None:
    wrap_with_torch_sac(case)
    compile_layers(case)


@way("compiled sac_policies matmuls", "compiled")
def _(case: Case) -> None:
    checkpoint_layers(case, matmuls_and_attention())
    compile_layers(case)


for _budget in (0.5, 0.25):

    @way(f"compiled torch budget {_budget}", "compiled")
    def _(case: Case, budget: float = _budget) -> None:
        compile_layers(case, budget=budget)


@way("compiled fit_ 50%", "compiled")
def _(case: Case) -> None:
    compile_layers(case)
    fit(case, "50%")


def adamw(tensors: Any) -> torch.optim.Optimizer:
    """Make the optimizer that all ways share."""
    return torch.optim.AdamW(tensors, lr=1e-4, fused=True)


@functools.cache
def one_rank(device_type: str) -> DeviceMesh:
    """Start a process group of this process alone."""
    backend = "gloo" if device_type == "cpu" else dist.get_default_backend_for_device(device_type)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh(device_type, (1,))


@way("AdamW over parameters", "training")
def _(case: Case) -> None:
    case.optimizer = adamw(case.model.parameters())


@way("AdamW over flatten chunks", "training")
def _(case: Case) -> None:
    import flat_param

    case.optimizer = adamw(flat_param.flatten(case.model).chunks())


@way("FSDP2 one rank", "training")
def _(case: Case) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = one_rank(case.device.type)
    for module in (*case.layers, case.model):
        fully_shard(module, mesh=mesh)
    case.optimizer = adamw(case.model.parameters())


@way("fully_shard one rank", "training")
def _(case: Case) -> None:
    from flat_param import fully_shard

    mesh = one_rank(case.device.type)
    for module in (*case.layers, case.model):
        fully_shard(module, mesh=mesh)
    case.optimizer = adamw(case.model.parameters())


@way("no report", "reports")
def _(case: Case) -> None:
    pass


@way("ModTracker", "reports")
def _(case: Case) -> None:
    from mod_tracker import ModTracker

    case.around = ModTracker


@way("torch ModTracker", "reports")
def _(case: Case) -> None:
    from torch.distributed._tools.mod_tracker import ModTracker

    case.around = ModTracker


@way("profile_time", "reports")
def _(case: Case) -> None:
    from mod_tracker import profile_time

    case.around = profile_time


@way("profile_time clock=device", "reports")
def _(case: Case) -> None:
    from mod_tracker import profile_time

    if case.device.type == "cpu":
        raise Unavailable("needs an accelerator")
    case.around = functools.partial(profile_time, clock="device")


@way("profile_flops", "reports")
def _(case: Case) -> None:
    from mod_tracker import profile_flops

    case.around = profile_flops


# It decomposes operators, which rounds differently.
@way("torch FlopCounterMode", "reports", exact=False)
def _(case: Case) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    case.around = functools.partial(FlopCounterMode, display=False)


@way("profile_memory", "reports")
def _(case: Case) -> None:
    from mod_tracker import profile_memory

    case.around = profile_memory


@way("torch MemTracker", "reports")
def _(case: Case) -> None:
    from torch.distributed._tools.mem_tracker import MemTracker

    def tracker() -> MemTracker:
        made = MemTracker()
        made.track_external(case.model)
        return made

    case.around = tracker


@way("trace", "reports")
def _(case: Case) -> None:
    from mod_tracker import trace

    case.around = trace


def require_host_memory(case: Case) -> None:
    """Refuse a way that would keep more activations in host memory than is free.

    Raises:
        Unavailable: host memory is too small. The system would kill the process, without results.
    """
    if case.device.type == "cpu":
        return
    tokens, shape = case.batch["input_ids"].numel(), case.shape
    # In bfloat16, of each token and layer: about 14 vectors of `hidden` and 4 of `intermediate`.
    needed = 2 * tokens * shape.layers * (14 * shape.hidden + 4 * shape.intermediate)
    # In float32: logits and their softmax. Pinned blocks may be rounded up to powers of two.
    reason = too_little_host_memory(1.5 * (needed + 8 * tokens * shape.vocabulary))
    if reason:
        raise Unavailable(reason)


@functools.cache
def too_little_host_memory(needed: float) -> str:
    """Return why host memory is too small, or None; the first way's memory is the measure."""
    free = free_host_bytes()
    if needed <= free:
        return ""
    return f"may keep {needed / 2**30:.0f} GiB in host memory, but {free / 2**30:.0f} are free"


def free_host_bytes() -> int:
    """Return the host memory this process may still use."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):  # no control group, or no limit
        free = min(free, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return free
