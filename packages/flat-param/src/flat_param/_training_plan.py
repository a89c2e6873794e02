"""What a plan of sharded training takes and says."""

from __future__ import annotations

from dataclasses import dataclass

from .comm._comm import CommCount
from .layout._spec import ParamSpec
from .layout._strategy import Strategy


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
    """Bytes on one rank, by kind (Rules 1 and 2 of `_planner`)."""

    params: int
    grads: int
    optimizer: int
    whole_params_peak: int
    whole_grads_peak: int

    @property
    def total(self) -> int:
        """All kinds at their largest; activations are not in it."""
        kept = self.params + self.grads + self.optimizer
        return kept + self.whole_params_peak + self.whole_grads_peak


@dataclass(frozen=True)
class TrainingPlan:
    """What one rank needs for a training step.

    Args:
        strategy: of all units.
        world_size: W.
        replicas: R.
        numel: parameters of the model.
        padding_numel: elements, over all ranks, that belong to no parameter.
        rank_bytes: memory of the rank the plan is for.
        collectives: calls and bytes sent of one forward, backward and sum, by kind.
    """

    strategy: Strategy
    world_size: int
    replicas: int
    numel: int
    padding_numel: int
    rank_bytes: RankBytes
    collectives: dict[str, CommCount]

    @property
    def padding_frac(self) -> float:
        """Padding as a part of all elements."""
        return self.padding_numel / max(1, self.numel + self.padding_numel)

    def __str__(self) -> str:
        """A table of bytes by kind and of collectives."""
        sizes = self.rank_bytes
        rows = [(kind, getattr(sizes, kind)) for kind in sizes.__dataclass_fields__]
        head = (
            f"{self.strategy.value}, {self.world_size} ranks x {self.replicas} copies, "
            f"{self.numel:,} parameters, padding {self.padding_frac:.4%}"
        )
        lines = [f"  {kind:18s} {_gib(size)}" for kind, size in [*rows, ("total", sizes.total)]]
        lines += [
            f"  {kind:18s} {count.calls:6d} calls {_gib(count.wire_bytes)} sent"
            for kind, count in self.collectives.items()
        ]
        return "\n".join([head, *lines])


def _gib(size: int) -> str:
    return f"{size / 2**30:12.4f} GiB"
