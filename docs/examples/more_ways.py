"""Further ways to train the GPT of `train_gpt.py`; `compare_gpt.py` compares them beside its own.

Each is a function like those there, and can be copied into that script.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer
from train_gpt import GPT, Config, adamw, flat

from ckpt_wrap import checkpoint_
from flat_param import by_name, fully_shard, offload_optimizer
from sac_policies import ATTENTION, MATMULS, checkpoint, replay_rule, save_ops


class Gelu(torch.autograd.Function):
    """An operator of one's own: it computes as torch's, but no engine knows what it saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Keep the input for backward."""
        ctx.save_for_backward(x)
        return F.gelu(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Torch's own derivative."""
        (x,) = ctx.saved_tensors
        return torch.ops.aten.gelu_backward(grad, x)


def own_operator(model: GPT, config: Config) -> Optimizer:
    """As save_matmuls, with an activation of our own, and a rule that says how to repeat it."""
    replay_rule(
        Gelu,
        F.gelu,
        op=torch.ops.aten.gelu.default,
        probe=lambda make: Gelu.apply(make(5, 67)),
        device=config.device,
    )
    for block in model.blocks:
        block.act = Gelu.apply
        policy = save_ops(MATMULS, ATTENTION)
        checkpoint_(block, checkpoint_fn=checkpoint, policy=policy, engine="recipe")
    return adamw(model.parameters())


def flat_state_in_files(model: GPT, config: Config) -> Optimizer:
    """As flat, but between steps the optimizer's state is in files without a name."""
    return offload_optimizer(flat(model, config), folder=tempfile.gettempdir())


def sharded_whole_matrices(model: GPT, config: Config) -> Optimizer:
    """As sharded, but no matrix is cut: matrix optimizers such as Muon need it whole."""
    for module in [*model.blocks, model]:
        fully_shard(module, boundary=by_name({"*weight": "tensor"}))
    return adamw(model.parameters())


MORE = [own_operator, flat_state_in_files, sharded_whole_matrices]
MORE_CONFIGURATIONS = {way.__name__: way for way in MORE}
