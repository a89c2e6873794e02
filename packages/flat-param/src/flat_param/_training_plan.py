"""What a plan of sharded training takes and says."""

from __future__ import annotations

from dataclasses import dataclass, field

from .comm._comm import CommCount
from .layout._spec import ParamSpec

Counts = dict[str, CommCount]
"""Calls and bytes sent, by kind of collective."""


@dataclass(frozen=True)
class UnitShape:
    """The parameters of one unit, without values.

    Args:
        name: of the module.
        specs: of the parameters that no inner unit has.
    """

    name: str
    specs: tuple[ParamSpec, ...]


@dataclass(frozen=True)
class RankBytes:
    """Bytes on one rank, by kind (Rules 1 and 2 of `_planner`).

    Args:
        params: its shards.
        grads: their gradients.
        optimizer: what the optimizer keeps for them.
        whole_params_peak: peak of full parameters that are gathered at one time.
        whole_grads_peak: peak of full gradients that exist at one time.
    """

    params: int
    grads: int
    optimizer: int
    whole_params_peak: int
    whole_grads_peak: int

    @property
    def total(self) -> int:
        """All kinds at their peak, without activations."""
        kept = self.params + self.grads + self.optimizer
        return kept + self.whole_params_peak + self.whole_grads_peak


@dataclass(frozen=True)
class StateElsewhere:
    """What `offload_optimizer` keeps in CPU memory or in files for one rank, and how much it moves.

    Attributes:
        kept_bytes: bytes there, from the first step on.
        moved_bytes: bytes that a step copies to the device, and the same number back; the first
            step has none to fetch.
    """

    kept_bytes: int
    moved_bytes: int


@dataclass(frozen=True)
class TrainingPlan:
    """What one rank needs for a training step.

    Args:
        reshard_after_forward: of all units.
        world_size: W.
        replicas: R.
        numel: parameters of the model.
        padding_numel: elements, over all ranks, that belong to no parameter.
        rank_bytes: memory of the rank the plan is for.
        collectives: calls and bytes sent of one step, by kind.
        between_copies: the part of them that is between copies.
        elsewhere: optimizer state that is not in `rank_bytes`; None if all of it is.
    """

    reshard_after_forward: bool
    world_size: int
    replicas: int
    numel: int
    padding_numel: int
    rank_bytes: RankBytes
    collectives: Counts
    between_copies: Counts = field(default_factory=dict)
    elsewhere: StateElsewhere | None = None

    @property
    def padding_frac(self) -> float:
        """Padding as a fraction of all elements."""
        return self.padding_numel / max(1, self.numel + self.padding_numel)

    def __str__(self) -> str:
        """A table of bytes by kind and of collectives."""
        sizes = self.rank_bytes
        rows = [(kind, getattr(sizes, kind)) for kind in sizes.__dataclass_fields__]
        head = (
            f"{self.world_size} ranks x {self.replicas} copies, "
            f"{self.numel:,} parameters, padding {self.padding_frac:.4%}"
        )
        lines = [f"  {kind:18s} {_gib(size)}" for kind, size in [*rows, ("total", sizes.total)]]
        if self.elsewhere is not None:
            lines += [
                f"  {'state elsewhere':18s} {_gib(self.elsewhere.kept_bytes)}",
                f"  {'moved, each way':18s} {_gib(self.elsewhere.moved_bytes)} a step",
            ]
        lines += [
            f"  {kind:18s} {count.calls:6d} calls {_gib(count.wire_bytes)} sent"
            for kind, count in self.collectives.items()
        ]
        return "\n".join([head, *lines])


def _gib(size: int) -> str:
    return f"{size / 2**30:12.4f} GiB"
