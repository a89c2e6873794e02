"""Training loops of other libraries: a few steps in one process."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from _models import VOCABULARY, need
from torch import Tensor, nn


def rows() -> list[dict[str, Tensor]]:
    """Return eight fixed sequences of tokens."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, VOCABULARY, (8, 6), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def by_transformers(
    model: nn.Module, folder: Path, *, callbacks: Sequence[Any] = (), **settings: Any
) -> None:
    """Run `Trainer.train` for two steps."""
    t = need("transformers")
    need("accelerate")
    arguments = t.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=2,
        report_to=[],
        disable_tqdm=True,
        learning_rate=0.01,
        seed=3,
        **{"max_steps": 2, "save_strategy": "no", **settings},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        t.Trainer(
            model=model, args=arguments, train_dataset=rows(), callbacks=list(callbacks)
        ).train()


def by_accelerate(model: nn.Module, folder: Path) -> None:
    """Run a loop with `accumulate`, clipping and `save_state`."""
    accelerate = need("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(rows(), batch_size=2)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(prepared):
            loss = prepared(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(prepared.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.save_state(folder)
    assert accelerator.unwrap_model(prepared) is model


def by_lightning(
    model: nn.Module,
    folder: Path,
    change: Callable[[nn.Module], object] | None = None,
    **settings: Any,
) -> None:
    """Run `Trainer.fit` for two steps; `change` is applied to the model in `setup`."""
    lightning = need("lightning.pytorch")

    class Task(lightning.LightningModule):  # type: ignore[name-defined, misc]
        """A language model and its optimizer."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def setup(self, stage: str) -> None:
            """Call `change` once before training."""
            if change is not None:
                change(self.model)

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            return self.model(**batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            trained = [param for param in self.parameters() if param.requires_grad]
            return torch.optim.AdamW(trained, lr=0.01)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lightning.seed_everything(3, verbose=False)
        trainer = lightning.Trainer(
            max_steps=2,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            gradient_clip_val=0.5,
            default_root_dir=folder,
            **settings,
        )
        task = Task()
        task.train()
        trainer.fit(task, torch.utils.data.DataLoader(rows(), batch_size=2))
        trainer.save_checkpoint(folder / "last.ckpt")


def ranks_of_lightning(
    model: nn.Module, folder: Path, change: Callable[[nn.Module], object]
) -> None:
    """Train in every process that torchrun started."""
    world = int(os.environ["WORLD_SIZE"])
    by_lightning(model, folder, change, strategy="ddp", devices=world)


TRAINERS: dict[str, Callable[[nn.Module, Path], None]] = {
    "transformers": by_transformers,
    "accelerate": by_accelerate,
    "lightning": by_lightning,
}
