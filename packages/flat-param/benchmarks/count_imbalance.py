"""How uneven shards are at each boundary, and what a step copies for it; arithmetic on shapes.

Each block is a unit, embedding, norm and head are the outermost one. Printed for each model and
number of ranks: elements of the longest shards over the mean, and bytes of float32 that a rank
copies in one step of ZeRO-3, as a multiple of the parameters' (a gather before forward and one
before backward, a sum of gradients). Shards of one length are gathered in place and copy nothing;
FSDP2 copies each gathered parameter out and each gradient in: 3.

    python packages/flat-param/benchmarks/count_imbalance.py
"""

from __future__ import annotations

import torch

from flat_param.plan import ParamSpec, Segment, plan_segments, plan_shard

SHAPES = {  # width, of keys and values, of the MLP, blocks, vocabulary, tied
    "Llama 8B": (4096, 1024, 14336, 32, 128256, False),
    "Llama 1B": (2048, 512, 8192, 16, 128256, True),
    "small vocabulary": (768, 768, 3072, 12, 1000, True),
    "odd sizes": (700, 140, 1867, 12, 50257, True),
}
BOUNDARIES = ("element", "row", "tensor")
RANKS = (2, 4, 8, 64)


def segment_of(*shapes: tuple[int, ...]) -> Segment:
    """The buffer of one unit."""
    named = enumerate(shapes)
    (segment,) = plan_segments([ParamSpec(str(at), each, torch.float32) for at, each in named])
    return segment


def units_of(model: str) -> list[tuple[Segment, int]]:
    """Buffers and how many units have the same."""
    width, other, wide, blocks, words, tied = SHAPES[model]
    attention = ((width, width), (other, width), (other, width), (width, width))
    mlp = ((wide, width), (wide, width), (width, wide))
    block = segment_of(*attention, *mlp, (width,), (width,))
    head = () if tied else ((words, width),)
    return [(block, blocks), (segment_of((words, width), (width,), *head), 1)]


def main() -> None:
    """Print a table."""
    print(f"{'':18s}{'ranks':>6s}" + "".join(f"{each:>22s}" for each in BOUNDARIES))
    for model in SHAPES:
        units = units_of(model)
        total = sum(segment.layout.used_numel * count for segment, count in units)
        for ranks in RANKS:
            cells = []
            for boundary in BOUNDARIES:
                longest = copied = 0
                for segment, count in units:
                    plan = plan_shard(segment.layout, world_size=ranks, boundary=boundary)
                    longest += plan.shard_numel * count
                    copied += 0 if plan.even else 3 * segment.layout.used_numel * count
                cells.append(f"{longest * ranks / total:11.4f} x,{copied / total:5.2f} x")
            print(f"{model:18s}{ranks:6d}" + "".join(f"{cell:>22s}" for cell in cells))


if __name__ == "__main__":
    main()
