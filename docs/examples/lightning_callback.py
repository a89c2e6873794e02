"""A Lightning callback that checkpoints layers during fitting, compared with torch's wrapper.

    python docs/examples/lightning_callback.py

Claim: Lightning's checkpoint is bit-identical to the plain run's, and no parameter is renamed, as
torch's `apply_activation_checkpointing` does.
"""

import copy
import tempfile

import lightning.pytorch as pl
import torch
from kept import side_by_side
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torchs

from ckpt_wrap import checkpoint_layers_


class Checkpointing(pl.Callback):
    """Checkpoint the layers of encoders; `ckpt_wrap.unwrap` would undo it."""

    def setup(self, trainer: object, pl_module: nn.Module, stage: str) -> None:
        checkpoint_layers_(pl_module)


class Task(pl.LightningModule):
    """An encoder with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32), 3)
        self.configure_optimizers = lambda: torch.optim.AdamW(self.parameters())

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.encoder(batch).square().mean()


task, saved = Task(), {}
models = {name: copy.deepcopy(task) for name in ("plain", "callback", "torch")}
layers = [*models["torch"].encoder.layers]
torchs.apply_activation_checkpointing(models["torch"], check_fn=lambda module: module in layers)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
for name, task in models.items():
    pl.seed_everything(3, verbose=False)
    quiet["callbacks"] = [Checkpointing()] if name == "callback" else []
    trainer = pl.Trainer(max_steps=3, accelerator="cpu", **quiet)
    trainer.fit(task, torch.utils.data.DataLoader(torch.randn(8, 5, 16), batch_size=2))
    with tempfile.NamedTemporaryFile() as file:
        trainer.save_checkpoint(file.name)
        saved[name] = torch.load(file.name, weights_only=False)["state_dict"]
_, ours, theirs = side_by_side(models, lambda m: m.training_step(torch.ones(2, 5, 16), 0)).values()
assert ours.kept_bytes <= theirs.kept_bytes and not ours.differing
names = {way: [name for name, _ in task.named_parameters()] for way, task in models.items()}
assert names["callback"] == names["plain"] != names["torch"]
plain, found, _ = saved.values()
assert list(found) == list(plain) and all(map(torch.equal, found.values(), plain.values()))
print(f"claim holds: {len(found)} tensors of both checkpoints are equal, every bit")
