"""`fit_` with the step of five training loops, and the peak of a real step beside the prediction.

    python docs/examples/fit_loops.py

Claim: for transformers' `Trainer`, accelerate, Lightning, a loop with accumulation and chunks of
the loss, and a GAN with two models, a real step takes the predicted peak within 2 %.
"""

from __future__ import annotations

import tempfile
import warnings
from typing import Any

import accelerate
import lightning.pytorch as pl
import torch
import transformers
from torch import nn
from torch.nn import functional as F

from mod_tracker import (
    MemoryReport,
    ReportSchedule,
    lightning_callback,
    profile_memory,
    transformers_callback,
)
from sac_policies import fit_

warnings.simplefilter("ignore")
size = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4}
config = transformers.LlamaConfig(**size, num_attention_heads=4, use_cache=False)
ids = torch.randint(256, (16, 96))
rows = [{"input_ids": row, "labels": row} for row in ids]
batch = {"input_ids": ids[:4], "labels": ids[:4]}
ratios: dict[str, float] = {}


def model_of_a_loop() -> Any:
    """Return a Llama with new weights."""
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def compare(name: str, found: Any, reports: list[MemoryReport]) -> None:
    """Print the predicted peak beside the one of a real step."""
    assert found, found
    measured = sum(reports[-1].causes.values())
    ratios[name] = found.peak_bytes / measured
    sizes = f"predicted {found.peak_bytes / 2**20:6.2f} MiB, measured {measured / 2**20:6.2f} MiB"
    print(f"{name:12} {sizes}, {100 * found.peak_bytes / found.plain_bytes:.0f} % of plain")


def each_step(reports: list[MemoryReport]) -> ReportSchedule:
    """Measure every step but the first, which has no optimizer state."""
    options = {"on_report": lambda report, number: reports.append(report)}
    return ReportSchedule(profile_memory, every_n_steps=1, skip_first=1, **options)


def with_trainer() -> None:
    """`Trainer` with label smoothing; `train` sets the number that `training_step` divides by."""
    model, reports = model_of_a_loop(), list[MemoryReport]()
    with tempfile.TemporaryDirectory() as folder:
        settings = {"output_dir": folder, "use_cpu": True, "max_steps": 3, "disable_tqdm": True}
        settings |= {"per_device_train_batch_size": 4, "save_strategy": "no", "report_to": []}
        args = transformers.TrainingArguments(**settings, label_smoothing_factor=0.1)
        calls = [transformers_callback(each_step(reports))]
        trainer = transformers.Trainer(model, args, train_dataset=rows, callbacks=calls)
        trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps
        one, state = next(iter(trainer.get_train_dataloader())), trainer.create_optimizer()
        found = fit_(model, one, "70%", step=trainer.training_step, optimizer=state)
        trainer.train()
    compare("Trainer", found, reports)


def with_accelerate() -> None:
    """Two batches are accumulated; the optimizer steps inside of the measured step."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    plain = model_of_a_loop()
    model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters()))

    def step(model: nn.Module, batches: list[Any]) -> None:
        for each in batches:
            with accelerator.accumulate(model):
                accelerator.backward(model(**each).loss)
                optimizer.step()
                optimizer.zero_grad()

    found = fit_(model, [batch, batch], "70%", step=step)
    step(model, [batch, batch])
    with profile_memory(model, optimizer=optimizer.optimizer) as report:
        step(model, [batch, batch])
    compare("accelerate", found, [report])


class Task(pl.LightningModule):
    """A Llama as a task of Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.model = model_of_a_loop()
        self.configure_optimizers = lambda: torch.optim.AdamW(self.parameters())

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.model(**batch).loss


def with_lightning() -> None:
    """Lightning calls `training_step`, and then backward."""
    task, reports = Task(), list[MemoryReport]()
    options = {"step": lambda task, batch: task.training_step(batch, 0).backward()}
    found = fit_(task, batch, "70%", optimizer=task.configure_optimizers(), **options)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "callbacks": [lightning_callback(each_step(reports))]}
    trainer = pl.Trainer(max_steps=3, accelerator="cpu", **quiet)
    trainer.fit(task, torch.utils.data.DataLoader(rows, batch_size=4))
    compare("Lightning", found, reports)


class Recipe:
    """A loop as torchtune has: loss in chunks of tokens, scaled by tokens, clipped."""

    def __init__(self, model: Any) -> None:
        self.model, self.steps = model, 0
        self.optimizer = torch.optim.AdamW(model.parameters())

    def loss_step(self, model: Any, batch: Any) -> torch.Tensor:
        """Return the sum over the batch."""
        hidden = model.model(batch["input_ids"]).last_hidden_state[:, :-1]
        parts = zip(hidden.chunk(4, 1), batch["labels"][:, 1:].chunk(4, 1), strict=True)
        losses = [
            F.cross_entropy(model.lm_head(h).flatten(0, 1).float(), t.flatten(), reduction="sum")
            for h, t in parts
        ]
        return torch.stack(losses).sum()

    def train_step(self, model: Any, batches: list[Any]) -> None:
        """Accumulate, scale by the number of tokens, clip, and step."""
        tokens = sum(each["labels"][:, 1:].numel() for each in batches)
        for each in batches:
            self.loss_step(model, each).backward()
        for parameter in model.parameters():
            parameter.grad.div_(tokens)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1


def with_recipe() -> None:
    """A method of the recipe is the step; its counter is as before."""
    recipe = Recipe(model_of_a_loop())
    found = fit_(recipe.model, [batch, batch], "70%", step=recipe.train_step)
    assert recipe.steps == 0
    recipe.train_step(recipe.model, [batch, batch])
    with profile_memory(recipe.model, optimizer=recipe.optimizer) as report:
        recipe.train_step(recipe.model, [batch, batch])
    compare("recipe", found, [report])


def residual() -> nn.Module:
    """Return a stack of blocks."""
    return nn.Sequential(*(nn.TransformerEncoderLayer(32, 2, 128) for _ in range(3)))


def with_two_models() -> None:
    """A critic is trained on real and made data, then the generator through the critic."""
    torch.manual_seed(0)
    models = nn.ModuleDict({"made": residual(), "judged": residual()})
    ways = {name: torch.optim.AdamW(part.parameters()) for name, part in models.items()}

    def step(models: Any, real: torch.Tensor) -> None:
        made = models["made"](torch.randn_like(real))
        (models["judged"](made.detach()).mean() - models["judged"](real).mean()).backward()
        ways["judged"].step()
        models.zero_grad()
        (-models["judged"](made).mean()).backward()
        ways["made"].step()
        models.zero_grad()

    real = torch.randn(64, 16, 32)
    found = fit_(models, real, "70%", step=step)
    step(models, real)
    both = torch.optim.AdamW(models.parameters())
    both.state.update({p: state for way in ways.values() for p, state in way.state.items()})
    with profile_memory(models, optimizer=both) as report:
        step(models, real)
    compare("GAN", found, [report])


for run in (with_trainer, with_accelerate, with_lightning, with_recipe, with_two_models):
    run()
assert all(0.98 <= each <= 1.02 for each in ratios.values()), ratios
print(f"claim holds: {len(ratios)} predictions are within 2 % of the measured peaks")
