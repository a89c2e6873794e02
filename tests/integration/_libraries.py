"""Sharded models in other libraries, on every rank of a launch; one function per claim."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _flat import llama
from _models import IDS
from _trainers import rows
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh

import flat_param
from flat_param import StateError, fully_shard


def sharded_llama(seed: int = 0, *, tied: bool = False) -> Any:
    """A transformer whose layers are units; the same weights each time."""
    torch.manual_seed(seed)
    model: Any = llama(tied=tied)
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def whole(model: nn.Module) -> dict[str, Tensor]:
    state: dict[str, Tensor] = flat_param.full_state_dict(model)["model"]
    return state


def assert_equal(found: dict[str, Tensor], right: dict[str, Tensor], **close: float) -> None:
    """Bit-identical, or close."""
    assert found.keys() == right.keys()
    for key, value in right.items():
        torch.testing.assert_close(found[key], value, **(close or {"rtol": 0, "atol": 0}))


@contextmanager
def one_folder() -> Iterator[Path]:
    """The same temporary folder on all ranks."""
    with tempfile.TemporaryDirectory() as mine:
        told = [mine]
        dist.broadcast_object_list(told)
        yield Path(told[0])
        dist.barrier()


# Pipelines: two stages or more over half of the ranks, each sharded over the others.


def stages_of(mesh: Any, *, looped: bool) -> tuple[nn.Module, dict[int, nn.Module]]:
    """A plain model of four blocks, and this rank's sharded stages of it by number."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(4)]
        pairs = [nn.Sequential(*blocks[:2]), nn.Sequential(*blocks[2:])]
        made.append(nn.Sequential(*(blocks if looped else pairs)))
    me = mesh["pp"].get_local_rank()
    mine = {at: made[1][at] for at in ((me, me + 2) if looped else (me,))}
    for stage in mine.values():
        for layer in [each for each in stage.modules() if isinstance(each, nn.Linear)]:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(stage, mesh=mesh["dp"])
    return made[0], mine


def loss_of(found: Tensor, target: Tensor) -> Tensor:
    return (found - target).square().mean()


def pipeline(name: str) -> None:
    """Trains as the plain model, and reduces gradients once a step."""
    copies = dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", (2, copies), mesh_dim_names=("pp", "dp"))
    me, copy_of_mine = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    kind: Any = getattr(pipelining, name)
    looped = name not in ("ScheduleGPipe", "Schedule1F1B")
    plain, mine = stages_of(mesh, looped=looped)
    group, device, count = mesh["pp"].get_group(), torch.device("cpu"), len(list(plain))
    stages = [pipelining.PipelineStage(m, at, count, device, group=group) for at, m in mine.items()]
    schedule = kind(stages if looped else stages[0], 4, loss_fn=loss_of)
    params = [param for stage in mine.values() for param in stage.parameters()]
    optimizers = [torch.optim.SGD(each, 0.5) for each in (params, plain.parameters())]
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        xs, targets = torch.randn(2, copies, 8, 8, generator=generator)
        for optimizer in optimizers:
            optimizer.zero_grad()
        for x, target in zip(xs, targets, strict=True):
            (loss_of(plain(x), target) / copies).backward()
        for stage in mine.values():
            stage.comm_counts()  # type: ignore[operator]
        given = (xs[copy_of_mine],) if me == 0 else ()
        wanted = {"target": targets[copy_of_mine], "losses": []} if me == 1 else {}
        if "ZeroBubble" in name or "ZBV" in name:
            with pytest.raises(StateError, match="Use GPipe, 1F1B or Interleaved1F1B"):
                schedule.step(*given, **wanted)
            return
        schedule.step(*given, **wanted)
        for stage in mine.values():
            units = [each for each in stage.modules() if isinstance(each, flat_param.ShardedModule)]
            counts = stage.comm_counts()  # type: ignore[operator]
            own = len(units) - 1  # the outermost unit has no parameters
            # A pipeline's first step also runs a backward to learn shapes.
            assert copies == 1 or not step or counts["reduce_scatter"].calls == own
        for optimizer in optimizers:
            optimizer.step()
    for at, stage in mine.items():
        right = {name: param.detach() for name, param in plain[at].named_parameters()}
        assert_equal(whole(stage), right, rtol=1e-5, atol=1e-6)


# accelerate and transformers' Trainer.


@contextmanager
def fsdp_plugin(accelerator: Any, kind: str) -> Iterator[None]:
    """Give an accelerator its plugin for FSDP2, which accelerate does not take on CPUs."""
    import accelerate
    from accelerate.utils import DistributedType

    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type=kind, cpu_ram_efficient_loading=False
    )
    values = {"distributed_type": DistributedType.FSDP, "fsdp_plugin": plugin}
    states = accelerator.state.__dict__, accelerate.PartialState._shared_state
    before = [dict(state) for state in states]
    for state in states:
        state.update(values)
    try:
        yield
    finally:
        for state, values in zip(states, before, strict=True):
            state.clear()
            state.update(values)


def accelerate_plugin(kind: str) -> None:
    """`prepare`, `accumulate`, `save_state`, `load_state`: the steps after it are the same."""
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    with fsdp_plugin(accelerator, kind), one_folder() as folder:
        model = sharded_llama()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer = accelerator.prepare(model, optimizer)
        assert list(model.parameters()) == optimizer.param_groups[0]["params"]

        def train(first: int) -> None:
            for step in range(first, first + 4):
                ids = IDS.roll(step + dist.get_rank(), 1)
                with accelerator.accumulate(model):
                    accelerator.backward(model(input_ids=ids, labels=ids).loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()

        train(0)
        accelerator.save_state(folder)
        train(4)
        first = whole(model)
        accelerator.load_state(folder)
        train(4)
        assert_equal(whole(model), first)
        full = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            assert_equal(full, first)


def accelerate_alone() -> None:
    """Without the plugin, `save_state` is refused on all ranks, and `save_sharded` resumes."""
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    model = sharded_llama()
    optimizer: Any = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=0.01))
    with one_folder() as folder:
        accelerator.backward(model(input_ids=IDS, labels=IDS).loss)
        optimizer.step()
        with pytest.raises(StateError, match="save_sharded"):
            accelerator.save_state(folder / "refused")
        before = whole(model)
        flat_param.save_sharded(model, folder / "saved", optimizer=optimizer.optimizer)
        optimizer.step()
        flat_param.load_sharded(model, folder / "saved", optimizer=optimizer.optimizer)
        assert_equal(whole(model), before)


def trainer(plugin: str) -> None:
    """`Trainer` with FSDP2 trains, generates, saves, resumes; without it, it is refused."""
    import transformers

    def run(folder: Path, resume: str | None = None) -> Any:
        model = sharded_llama()
        arguments = transformers.TrainingArguments(
            output_dir=str(folder),
            use_cpu=True,
            per_device_train_batch_size=1,
            report_to=[],
            disable_tqdm=True,
            learning_rate=0.01,
            seed=3,
            max_steps=3,
            save_steps=2,
            lr_scheduler_type="constant",
        )
        trained = transformers.Trainer(model=model, args=arguments, train_dataset=rows())
        if plugin == "alone":
            with pytest.raises(StateError, match="fsdp_version=2"):
                trained.train()
            return None
        with fsdp_plugin(trained.accelerator, "SHARDED_STATE_DICT"):
            trained.is_fsdp_enabled = True
            trained.train(resume_from_checkpoint=resume)
        assert model.generate(IDS[:1, :3], max_new_tokens=2, pad_token_id=0).shape == (1, 5)
        return whole(model)

    with one_folder() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = run(folder)
        if first is not None:
            assert_equal(run(folder, str(folder / "checkpoint-2")), first)


def lightning_resume(kind: str) -> None:
    """`ModelParallelStrategy` saves shards or one file, and trains on from them."""
    import lightning.pytorch as lightning
    from lightning.pytorch.strategies import ModelParallelStrategy

    class Task(lightning.LightningModule):  # type: ignore[misc]
        """A language model, sharded where Lightning says."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.model: Any = llama()

        def configure_model(self) -> None:
            if not isinstance(self.model, flat_param.ShardedModule):
                for layer in self.model.model.layers:
                    fully_shard(layer)
                fully_shard(self.model)

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            loss: Tensor = self.model(input_ids=batch, labels=batch).loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    world = dist.get_world_size()

    def fit(folder: Path, steps: int, path: Path | None = None) -> tuple[Any, nn.Module]:
        strategy = ModelParallelStrategy(
            data_parallel_size=world,
            tensor_parallel_size=1,
            save_distributed_checkpoint=kind == "shards",
        )
        fitted = lightning.Trainer(
            max_steps=steps,
            accelerator="cpu",
            devices=world,
            strategy=strategy,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            use_distributed_sampler=False,
            default_root_dir=folder,
        )
        task = Task()
        rows = torch.utils.data.DataLoader(IDS[:1].expand(12, -1), batch_size=2)
        fitted.fit(task, rows, ckpt_path=path)
        return fitted, task.model

    with one_folder() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted, _ = fit(folder, 2)
        fitted.save_checkpoint(folder / "saved.ckpt")
        _, resumed = fit(folder, 4, folder / "saved.ckpt")
        _, model = fit(folder, 4)
        assert_equal(whole(resumed), whole(model))


# PEFT.


def peft_adapters(kind: str) -> None:
    """LoRA and DoRA: trained as unsharded, saved, merged and unmerged."""
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=2,
        target_modules=["q_proj", "v_proj"],
        use_dora=kind == "dora",
        init_lora_weights=False,
    )
    base: Any = llama()
    bare = copy.deepcopy(base)
    model = peft.get_peft_model(base, config)
    plain = copy.deepcopy(model)
    for layer in base.model.layers:
        fully_shard(layer)
    fully_shard(model)
    for each in (model, plain):
        trained = [param for param in each.parameters() if param.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            each(input_ids=IDS, labels=IDS).loss.backward()
            optimizer.step()
    close = {"rtol": 1e-4, "atol": 1e-5}
    assert_equal(whole(model), plain.state_dict(), **close)
    with one_folder() as folder:
        with pytest.raises(StateError, match="state_dict=full"):
            model.save_pretrained(folder)
        full = flat_param.full_state_dict(model, rank0_only=True)["model"]
        if dist.get_rank() == 0:
            model.save_pretrained(folder, state_dict=full)
            again = peft.PeftModel.from_pretrained(bare, folder)
            found, right = (each(input_ids=IDS).logits for each in (again, plain))
            torch.testing.assert_close(found, right, **close)
        dist.barrier()
    for change in ("merge_adapter", "unmerge_adapter"):
        with model.whole_params(write_back=True):
            getattr(model, change)()
        getattr(plain, change)()
        assert_equal(whole(model), plain.state_dict(), **close)


def generate() -> None:
    """transformers keeps ranks in step whose sequences end at other lengths."""
    model = sharded_llama().eval()
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    rank = dist.get_rank()
    count = 4 if rank else 8
    out = model.generate(IDS[:1, :3] + rank % 2, do_sample=False, max_new_tokens=count)
    assert out.shape[1] == 3 + count


def save_pretrained() -> None:
    """transformers writes a model that loads as the plain class, and into a sharded one."""
    import transformers

    model = sharded_llama(tied=True)
    with one_folder() as folder:
        with pytest.raises(StateError, match="state_dict=full"):
            model.save_pretrained(folder)
        full = flat_param.full_state_dict(model, rank0_only=True)["model"]
        if dist.get_rank() == 0:
            model.save_pretrained(folder, state_dict=dict(full))
            found = transformers.AutoModelForCausalLM.from_pretrained(folder)
            assert type(found).__name__ == "LlamaForCausalLM"
            assert_equal(found.state_dict(), full)
        dist.barrier()
        other = sharded_llama(1, tied=True)
        flat_param.load_sharded(other, folder)
        assert_equal(whole(other), whole(model))


JOBS: dict[str, Callable[..., None]] = {
    job.__name__: job
    for job in (
        *(pipeline, accelerate_plugin, accelerate_alone, trainer, lightning_resume),
        *(peft_adapters, generate, save_pretrained),
    )
}
