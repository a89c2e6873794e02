import torch

from flat_param.plan import ParamSpec, plan_layout, plan_segments


def _spec(name, *shape, dtype=torch.float32, requires_grad=True):
    return ParamSpec(name, shape, dtype, requires_grad=requires_grad)


def test_plan_layout_aligns_every_start():
    """21 + (3) + 35 + (1) + 25 elements, at 16 bytes of float32, end rounded to 88."""
    layout = plan_layout([_spec("a", 7, 3), _spec("b", 5, 7), _spec("c", 5, 5)])
    assert layout.offsets == (0, 24, 60)
    assert layout.gaps == ((21, 24), (59, 60), (85, 88))
    assert layout.numel == 88


def test_plan_layout_at_one_byte_leaves_no_gap():
    """With `align_bytes=1` the buffer is the parameters and nothing else."""
    layout = plan_layout([_spec("a", 7, 3), _spec("b", 5)], align_bytes=1)
    assert (layout.numel, layout.padding_numel, layout.gaps) == (26, 0, ())


def test_pieces_cover_the_buffer_in_order():
    """Parameters and gaps alternate and add up to the buffer."""
    layout = plan_layout([_spec("a", 3), _spec("z", 0), _spec("b", 4)])
    assert layout.pieces == ((3, 0), (1, -1), (0, 1), (4, 2))


def test_plan_segments_groups_by_dtype_and_trainability():
    """Every (dtype, trainable) pair is one segment, in order of first appearance."""
    half = torch.bfloat16
    specs = [
        _spec("a", 2),
        _spec("b", 2, dtype=half),
        _spec("c", 2, requires_grad=False),
        _spec("d", 2, dtype=half),
    ]
    segments = plan_segments(specs)
    assert [segment.name for segment in segments] == ["float32", "bfloat16", "float32.frozen"]
    assert [s.name for s in segments[1].layout.specs] == ["b", "d"]
    assert [segment.trainable for segment in segments] == [True, True, False]


def test_padding_of_a_transformer_is_below_one_percent():
    """Alignment costs nothing where sizes are multiples of four."""
    block = [_spec("qkv", 96, 32), _spec("o", 32, 32), _spec("n", 32), _spec("f", 128, 32)]
    layout = plan_layout(block)
    assert layout.padding_numel == 0
    assert layout.nbytes == layout.used_numel * 4
