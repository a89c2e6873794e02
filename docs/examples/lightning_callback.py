"""A Lightning callback that checkpoints the modules a policy picks when fitting starts.

    python docs/examples/lightning_callback.py

Claim: the checkpoint that Lightning writes has the plain run's names and weights, every bit.
"""

import tempfile

import lightning.pytorch as pl
import torch
from torch import nn

from ckpt_wrap import Policy, by_class, make_plan, unwrap


class Checkpointing(pl.Callback):
    """Checkpoint the modules that a policy picks; take it off when fitting ends."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        make_plan(pl_module, self.policy).apply(pl_module)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        unwrap(pl_module)


class Task(pl.LightningModule):
    """An encoder, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.encoder(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def fit(*callbacks: pl.Callback) -> dict[str, torch.Tensor]:
    """What Lightning's checkpoint holds after three steps."""
    pl.seed_everything(3, verbose=False)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(max_steps=3, accelerator="cpu", callbacks=[*callbacks], **quiet)
    with tempfile.TemporaryDirectory() as folder:
        trainer.fit(Task(), torch.utils.data.DataLoader(torch.randn(8, 5, 16), batch_size=2))
        trainer.save_checkpoint(f"{folder}/last.ckpt")
        return torch.load(f"{folder}/last.ckpt", weights_only=False)["state_dict"]


expected, found = fit(), fit(Checkpointing(by_class(nn.TransformerEncoderLayer)))
assert list(found) == list(expected)
assert all(torch.equal(found[name], expected[name]) for name in expected)
print(f"claim holds: {len(found)} tensors of both checkpoints are equal, every bit")
