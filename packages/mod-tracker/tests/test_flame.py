"""Where the frames of a flame chart lie."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from mod_tracker.reports.charts._flame import frames_of

NAMES = st.sampled_from(["a", "b", "c"])
STACKS = st.dictionaries(
    st.lists(NAMES, max_size=4).map(tuple),
    st.dictionaries(st.sampled_from(["forward", "backward"]), st.integers(0, 50)),
)


@given(STACKS)
def test_frames_lie_inside_the_frame_around_them(stacks):
    """None overlaps its neighbour, and what is not covered below is the module's own."""
    frames = frames_of(stacks)
    whole = sum(sum(amounts.values()) for amounts in stacks.values())
    assert sum(frame.total for frame in frames if frame.depth == 0) == whole
    assert sum(frame.own for frame in frames) == whole
    for frame in frames:
        end = frame.start + frame.total
        below = [
            f
            for f in frames
            if f.depth == frame.depth + 1 and frame.start <= f.start and f.start < end
        ]
        assert frame.own == frame.total - sum(f.total for f in below)
        assert all(f.start + f.total <= end for f in below)
    for depth in {frame.depth for frame in frames}:
        row = sorted((f.start, f.start + f.total) for f in frames if f.depth == depth)
        assert all(before[1] <= after[0] for before, after in pairwise(row))


def test_outer_frames_come_first_and_nothing_is_no_frame():
    """Inner ones are drawn over them; a module without an amount has no width."""
    frames = frames_of({("N", "N.a"): {"forward": 2}, ("M",): {"forward": 0}, ("N",): {}})
    assert [(frame.name, frame.depth) for frame in frames] == [("N", 0), ("N.a", 1)]
    assert frames_of({}) == []


def test_labels_leave_out_what_the_frame_around_says():
    """Also where a container between them, such as a ModuleList, is never called itself."""
    stacks = {("Net", "Net.layers.0", "Other"): {"forward": 1}, (): {"outside": 1}}
    labels = [frame.label for frame in frames_of(stacks)]
    assert labels == ["Net", "(outside)", "layers.0", "Other"]


def test_module_that_calls_itself_has_a_frame_each_time():
    """The same name at two depths."""
    frames = frames_of({("N", "N"): {"forward": 2}, ("N",): {"forward": 1}})
    assert [(frame.depth, frame.total, frame.own) for frame in frames] == [(0, 3, 1), (1, 2, 2)]


def test_phases_have_one_order_in_every_frame():
    """Colours can be compared, whatever ran first; those without an amount are left out."""
    (frame,) = frames_of({("N",): {"backward": 1, "": 5, "recompute": 0, "forward": 2}})
    assert list(frame.amounts.items()) == [("forward", 2), ("backward", 1), ("", 5)]


def test_deep_nesting_is_laid_out():
    """Deeper than Python's own stack."""
    stack = tuple(str(depth) for depth in range(5000))
    assert len(frames_of({stack: {"forward": 1}})) == 5000
