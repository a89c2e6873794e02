"""Intervals, paths, and the place of a recompute."""

from __future__ import annotations

from mod_tracker._record import Path, Record, outside, recompute_base, root_of


def call_in(around, name):
    """A call of a path below `around`; the path is made on the first call."""
    parent = around[0]
    path = parent.children.setdefault(hash(name), Path(lambda: None, parent=parent, name=name))
    return (path, 0, around)


def test_empty_intervals_are_not_kept():
    """A counter that stands still leaves nothing behind."""
    record, base = Record(), outside()
    for _ in range(1_000):
        record.close(5, 5, base)
    assert len(record) == 0
    assert record.find(5)[0].name == ""


def test_full_record_forgets_the_older_half():
    """The newest are found; nodes that are too old belong to nobody."""
    record, base = Record(limit=4), outside()
    calls = [call_in(base, str(number)) for number in range(7)]
    for number, call in enumerate(calls):
        record.close(number, number + 1, call)
    assert len(record) <= 4
    assert record.find(6) is calls[6]
    assert record.find(0)[2] is None


def test_who_has_numbers_to_look_up_is_asked_before_they_are_forgotten():
    """Once for each time; all of them are there still."""
    record, base, found = Record(limit=4), outside(), []
    record.before_drop = lambda: found.append(record.find(0)[0].name)
    for number in range(5):
        record.close(number, number + 1, call_in(base, str(number)))
    assert found == ["0"]
    assert record.find(0)[2] is None


def test_names_and_depth_of_a_path():
    """From the root inwards, without the outside."""
    inner = call_in(call_in(outside(), "Net"), "Net.a")
    assert (inner[0].names(), inner[0].depth) == (("Net", "Net.a"), 2)
    assert [path.name for path in inner[0].chain()] == ["Net.a", "Net"]


def test_root_of_a_call():
    """The outermost module call; the outside has none but itself."""
    base = outside()
    root = call_in(base, "Net")
    assert root_of(call_in(call_in(root, "Net.a"), "Net.a.b")) is root
    assert root_of(root) is root
    assert root_of(base) is base


def test_recompute_is_placed_where_the_forward_was():
    """Below the innermost call that has called the module before, or else below the node's own."""
    root = call_in(outside(), "Net")
    part = call_in(root, "Net.m")
    inner = call_in(part, "Net.m.b")
    assert recompute_base(inner, hash("Net.m")) is root
    assert recompute_base(part, hash("Net.m.b")) is part
    assert recompute_base(root, hash("unknown")) is root
