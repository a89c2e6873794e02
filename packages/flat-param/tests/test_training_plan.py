"""What a plan of sharded training adds up and prints, from numbers given by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flat_param.plan import RankBytes, TrainingPlan

GIB = 2**30
SIZES = RankBytes(
    params=GIB, grads=2 * GIB, optimizer=4 * GIB, whole_params_peak=8 * GIB, whole_grads_peak=GIB
)
PLAN = TrainingPlan(
    world_size=4,
    numel=1_234_567,
    padding_numel=13,
    rank_bytes=SIZES,
)


@pytest.mark.parametrize("kind", list(RankBytes.__dataclass_fields__))
def test_every_kind_of_bytes_is_in_the_total(kind: str) -> None:
    """A byte more of any kind is a byte more in all."""
    assert SIZES.total == 16 * GIB
    assert replace(SIZES, **{kind: getattr(SIZES, kind) + 1}).total == 16 * GIB + 1


@pytest.mark.parametrize(
    ("numel", "padding", "frac"), [(3, 1, 0.25), (5, 0, 0.0), (0, 0, 0.0), (0, 8, 1.0)]
)
def test_padding_is_a_part_of_all_elements(numel: int, padding: int, frac: float) -> None:
    """Of those of parameters and of padding; of no elements, nothing."""
    assert replace(PLAN, numel=numel, padding_numel=padding).padding_frac == frac


def test_text_is_a_table_of_kinds() -> None:
    """A head, a line per kind of memory, and one of their total."""
    assert str(PLAN).splitlines() == [
        "4 ranks, 1,234,567 parameters, padding 0.0011%",
        "  params                   1.0000 GiB",
        "  grads                    2.0000 GiB",
        "  optimizer                4.0000 GiB",
        "  whole_params_peak        8.0000 GiB",
        "  whole_grads_peak         1.0000 GiB",
        "  total                   16.0000 GiB",
    ]
