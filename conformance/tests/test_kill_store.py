"""What each mutant made fail is remembered, as long as all that decides it is the same."""

from __future__ import annotations

from torchparts_conformance.mutation import _kill_store


def test_key_of_a_result_changes_with_what_decides_it(tmp_path):
    """Another mutant, another file content or another area's fingerprint is another key."""
    path = tmp_path / "faults.py"
    path.write_text("a")
    keys = [_kill_store.key("f", path, "one"), _kill_store.key("f", path, "two")]
    keys += [_kill_store.key("g", path, "one"), _kill_store.key("f", path, "")]
    path.write_text("b")
    keys.append(_kill_store.key("f", path, "one"))
    assert len(set(keys)) == len(keys)


def test_what_some_requirements_say_is_not_taken_for_what_all_say():
    """Nor the other way round: a mutant that passes a few cases is not one that passes all."""
    asked = [(), ("MT-001",), ("MT-001", "MT-002")]
    assert len({_kill_store.fingerprint("mod-tracker", "torch", ids) for ids in asked}) == 3


def test_cut_cache_is_read_as_far_as_it_goes(tmp_path):
    """A run that was ended while it wrote loses one result."""
    path = tmp_path / "cache.jsonl"
    _kill_store.Store(path).put("k", [("CW-001", "a::b")])
    path.write_text(path.read_text() + '{"key": "l", "fai')
    store = _kill_store.Store(path)
    assert store.get("k") == [("CW-001", "a::b")]
    assert store.get("l") is None
