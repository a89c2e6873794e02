"""The loss of a transformers Llama in slices of its tokens, without logits for all of them.

    python docs/examples/loss_in_slices.py

Claim: the peak of a step is less than a third; the loss equals that of
`model(input_ids=..., labels=...)`, and gradients do up to the rounding of sums.
"""

from __future__ import annotations

import torch
import transformers
from torch.nn import functional as F

from mod_tracker import profile_memory
from sac_policies import in_slices

torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=16_000,
    hidden_size=64,
    intermediate_size=172,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    use_cache=False,
)
model = transformers.LlamaForCausalLM(config).train()
ids = torch.randint(config.vocab_size, (2, 256))
labels = ids.clone()
labels[:, :32] = -100  # the prompt


def loss_of(hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed losses of some tokens, and the number of tokens."""
    logits = model.lm_head(hidden).float()
    loss = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
    return loss, (targets != -100).sum()


def whole() -> torch.Tensor:
    """The loss as transformers computes it."""
    return model(input_ids=ids, labels=labels).loss


def sliced() -> torch.Tensor:
    """The same loss in 16 slices of the tokens; each token predicts the next one."""
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
    loss, count = in_slices(loss_of, 16)(hidden.reshape(-1, 64), labels[:, 1:].reshape(-1))
    return loss / count


losses, grads, peaks = {}, {}, {}
for name, step in {"whole": whole, "in slices": sliced}.items():
    model.zero_grad()
    with profile_memory(model) as report:
        loss = step()
        loss.backward()
    losses[name], peaks[name] = loss.detach(), report.peak
    grads[name] = [p.grad.clone() for p in model.parameters()]
    print(f"{name:<10} loss {loss:.6f}, allocated at the peak {report.peak / 2**20:6.1f} MiB")

torch.testing.assert_close(losses["in slices"], losses["whole"])
for one, other in zip(grads["in slices"], grads["whole"], strict=True):
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)
assert peaks["in slices"] < peaks["whole"] / 3
times = peaks["whole"] / peaks["in slices"]
print(f"claim holds: {times:.1f} times less at the peak, the same gradients")
