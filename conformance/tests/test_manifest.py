"""The frozen list is that of the cases, and remembers what was withdrawn."""

from __future__ import annotations

import json

from torchparts_conformance.requirements import _manifest


def test_frozen_list_is_the_one_of_the_cases():
    """The requirement and case files are those that were frozen."""
    manifest = json.loads(_manifest.LOCK.read_text())
    assert manifest["files"] == _manifest.file_fingerprints()


def test_freezing_keeps_withdrawn_ids(tmp_path):
    """An id that left the list is remembered, so that it is not used again."""
    path = tmp_path / "lock.json"
    _manifest.freeze([_manifest.Row("CW-001", "a"), _manifest.Row("CW-002", "b")], path=path)
    again = _manifest.freeze([_manifest.Row("CW-001", "a")], path=path)
    assert again.withdrawn == ("CW-002",)
    assert _manifest.load_manifest(path) == again
