"""The decision about one value, and torch's names for it."""

from __future__ import annotations

import enum

from torch.utils.checkpoint import CheckpointPolicy

from .._errors import EngineError, shown
from .._frames import user_line


class Decision(enum.Enum):
    """What happens to one operator's output between forward and backward.

    `Decision.SAVE` keeps it where it is, `Decision.OFFLOAD` in host memory, and
    `Decision.RECOMPUTE` keeps nothing: backward runs the operator again.

    Attributes:
        keeps: whether the value is kept until backward, on its device or elsewhere.
    """

    RECOMPUTE = "recompute"
    OFFLOAD = "offload"
    SAVE = "save"

    def __init__(self, word: str) -> None:
        self.keeps: bool = word != "recompute"


Answer = Decision | None
"""None if no rule applies."""

_WORDS = {each.value: each for each in Decision}


def decision_of(answer: object) -> Answer:
    """Read a decision, a bool or a CheckpointPolicy; None for other values.

    PREFER_ and MUST_ members mean the same: every engine follows the policy.

    Example:
        >>> decision_of(True), decision_of(CheckpointPolicy.PREFER_RECOMPUTE), decision_of(1)
        (<Decision.SAVE: 'save'>, <Decision.RECOMPUTE: 'recompute'>, None)
    """
    if isinstance(answer, CheckpointPolicy):
        return _WORDS.get(answer.name.rpartition("_")[2].lower())
    if isinstance(answer, bool):
        return Decision.SAVE if answer else Decision.RECOMPUTE
    return answer if isinstance(answer, Decision) else None


def to_torch(answer: Answer, op: object, policy: object) -> CheckpointPolicy:
    """Convert a policy's answer for an operator.

    Raises:
        EngineError: the answer offloads.

    Example:
        >>> to_torch(Decision.SAVE, "", None).name, to_torch(None, "", None).name
        ('MUST_SAVE', 'PREFER_RECOMPUTE')
    """
    if answer is Decision.OFFLOAD:
        raise EngineError(
            f"sac_policies.checkpoint: policy offloads operator {op} (at {user_line()}; policy "
            f"{shown(policy, 200)}), but compiled code and torch's selective checkpointing keep "
            "values on their device. Save it, or leave this region eager under checkpoint."
        )
    return _TO_TORCH[answer]


_TO_TORCH: dict[Answer, CheckpointPolicy] = {
    None: CheckpointPolicy.PREFER_RECOMPUTE,
    Decision.RECOMPUTE: CheckpointPolicy.MUST_RECOMPUTE,
    Decision.SAVE: CheckpointPolicy.MUST_SAVE,
}
