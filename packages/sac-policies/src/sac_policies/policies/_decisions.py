"""The decision about one value, and torch's names for it."""

from __future__ import annotations

import enum

from torch.utils.checkpoint import CheckpointPolicy

from .._errors import DecisionError, shown


class Decision(enum.Enum):
    """What happens to one operator's output between forward and backward.

    `Decision.SAVE` keeps it where it is, `Decision.OFFLOAD` in host memory, and
    `Decision.RECOMPUTE` keeps nothing: backward runs the operator again.
    """

    RECOMPUTE = "recompute"
    OFFLOAD = "offload"
    SAVE = "save"

    @property
    def keeps(self) -> bool:
        """Whether the value is kept until backward, on its device or elsewhere."""
        return self is not Decision.RECOMPUTE


_FROM_TORCH = {
    CheckpointPolicy.MUST_SAVE: Decision.SAVE,
    CheckpointPolicy.PREFER_SAVE: Decision.SAVE,
    CheckpointPolicy.MUST_RECOMPUTE: Decision.RECOMPUTE,
    CheckpointPolicy.PREFER_RECOMPUTE: Decision.RECOMPUTE,
    True: Decision.SAVE,
    False: Decision.RECOMPUTE,
}
# CheckpointPolicy gained its offload members later.
_OFFLOADS = ("MUST_CPU_OFFLOAD", "PREFER_CPU_OFFLOAD")
for _name in _OFFLOADS:
    if hasattr(CheckpointPolicy, _name):
        _FROM_TORCH[CheckpointPolicy[_name]] = Decision.OFFLOAD


def from_torch(answer: object) -> Decision:
    """Convert a `CheckpointPolicy` or bool to a decision.

    PREFER_ and MUST_ members mean the same: every engine follows the policy.

    Raises:
        DecisionError: `answer` is neither.

    Example:
        >>> from_torch(True)
        <Decision.SAVE: 'save'>
    """
    if isinstance(answer, Decision):
        return answer
    if isinstance(answer, (bool, CheckpointPolicy)):
        return _FROM_TORCH[answer]
    raise DecisionError(
        f"sac_policies.from_torch: answer {shown(answer)} is a {type(answer).__name__}, but a "
        "policy "
        "function answers with a CheckpointPolicy or a bool. Return one of them on every path."
    )


def to_torch(decision: Decision | None) -> CheckpointPolicy:
    """Convert a decision to torch's; None (no rule decided) is PREFER_RECOMPUTE.

    Raises:
        DecisionError: not a decision, or one that this torch has no member for.

    Example:
        >>> to_torch(Decision.SAVE).name
        'MUST_SAVE'
    """
    if decision is None:
        return CheckpointPolicy.PREFER_RECOMPUTE
    if decision is Decision.SAVE:
        return CheckpointPolicy.MUST_SAVE
    if decision is Decision.RECOMPUTE:
        return CheckpointPolicy.MUST_RECOMPUTE
    if decision is not Decision.OFFLOAD:
        raise DecisionError(
            f"sac_policies.to_torch: decision {shown(decision)} is a {type(decision).__name__}, "
            "but a Decision or None is needed. Use Decision.SAVE, or from_torch(...) first."
        )
    if not hasattr(CheckpointPolicy, _OFFLOADS[0]):
        raise DecisionError(
            "sac_policies.to_torch: decision 'offload' has no CheckpointPolicy member in this "
            "torch, but the caller asked for torch's spelling. Use torch 2.12 or newer."
        )
    return CheckpointPolicy[_OFFLOADS[0]]
