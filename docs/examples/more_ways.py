"""More ways to train the GPT of `train_gpt.py`, for `compare_gpt.py`.

Each is a function like those in `train_gpt.py` and can be copied into it.
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
from sac_policies import ATTENTION, MATMULS, checkpoint, save_ops


@torch.library.custom_op("more_ways::gelu", mutates_args=(), schema="(Tensor x) -> Tensor")
def gelu(x: Tensor) -> Tensor:
    """GELU as a registered custom operator, which a region can recompute."""
    return F.gelu(x)


@gelu.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _keep_input(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _derivative(ctx: Any, grad: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    return torch.ops.aten.gelu_backward(grad, x)


gelu.register_autograd(_derivative, setup_context=_keep_input)


def own_operator(model: GPT, config: Config) -> Optimizer:
    """Like save_matmuls, with a custom activation operator."""
    del config
    for block in model.blocks:
        block.act = gelu
        policy = save_ops(MATMULS, ATTENTION)
        checkpoint_(block, checkpoint_fn=checkpoint, policy=policy)
    return adamw(model.parameters())


def flat_state_in_files(model: GPT, config: Config) -> Optimizer:
    """Like flat; between steps the optimizer's state is in unnamed files."""
    return offload_optimizer(flat(model, config), folder=tempfile.gettempdir())


def sharded_whole_matrices(model: GPT, config: Config) -> Optimizer:
    """Like sharded, without cutting matrices: matrix optimizers such as Muon need them whole."""
    for module in [*model.blocks, model]:
        fully_shard(module, boundary=by_name({"*weight": "tensor"}))
    return adamw(model.parameters())


MORE = [own_operator, flat_state_in_files, sharded_whole_matrices]
MORE_CONFIGURATIONS = {way.__name__: way for way in MORE}
