"""PEFT LoRA on a Llama with frozen layers in host memory, streamed one layer ahead.

    python docs/examples/streamed_lora.py

Claim: adapters train bit-identically to the plain run, and frozen weights have no gradients. An
accelerator holds at most two layers of frozen weights; on a CPU nothing is copied.
"""

from __future__ import annotations

import copy

import peft
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

from flat_param import full_state_dict, fully_shard

torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    use_cache=False,
)
lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
plain = peft.get_peft_model(transformers.LlamaForCausalLM(config), lora).train()
streamed = copy.deepcopy(plain)
has_accelerator = torch.accelerator.is_available()
device = torch.accelerator.current_accelerator() if has_accelerator else torch.device("cpu")
ids = torch.randint(64, (2, 64), device=device)

# One process; several processes shard a larger model with the same calls.
backend = "gloo" if device.type == "cpu" else dist.get_default_backend_for_device(device.type)
dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh(device.type, (1,))
for module in (*streamed.base_model.model.model.layers, streamed):
    fully_shard(module, mesh=mesh, offload_policy=CPUOffloadPolicy())


def train(model: torch.nn.Module) -> int:
    """Train adapters for three steps; return the peak of device memory."""
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        if has_accelerator:
            torch.accelerator.reset_peak_memory_stats()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    assert not any(p.grad is not None for p in model.parameters() if not p.requires_grad)
    return torch.accelerator.max_memory_allocated() if has_accelerator else 0


peak = train(streamed)
plain_peak = train(plain.to(device))
found = full_state_dict(streamed)["model"]
wanted = plain.state_dict()
adapters = [name for name in wanted if "lora_" in name]
assert adapters and all(torch.equal(found[name].cpu(), wanted[name].cpu()) for name in wanted)
if has_accelerator:
    assert peak < plain_peak
    print(
        f"peak {peak / 2**20:.1f} MiB with streamed weights, {plain_peak / 2**20:.1f} MiB without"
    )
dist.destroy_process_group()
print(f"claim holds: {len(adapters)} adapter weights are equal, every bit")
