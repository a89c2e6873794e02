"""What an implementation is held to: what it claims, of what was chosen and is known."""

from __future__ import annotations


def test_unknown_capability_is_refused(suite):
    """What the registry does not know cannot be claimed; exit code 4 before any case."""
    suite.write("adapter.py", (suite.root / "adapter.py").read_text().replace("in-place", "speed"))
    result = suite.run()
    assert result.ret == 4
    said = result.stderr.str()
    assert "implementation 'good' claims 'speed' for ckpt-wrap, but its profiles are core" in said


def test_unclaimed_profile_is_never_passed(suite):
    """A capability the adapter does not name is not claimed, and does not count against it."""
    assert suite.run(impl="adapter:plain").ret == 0
    assert suite.outcomes()["CW-003"] == "not_claimed"


def test_part_that_is_missing_among_others_is_not_provided(suite):
    """What an implementation lacks of all areas is said to be lacking, and never passed."""
    suite.write("spec/mod_tracker.toml", SPEC_OF_TRACKER)
    suite.write("cases/mod_tracker/test_more.py", CASES_OF_TRACKER)
    suite.run("--collect-only", f"--freeze={suite.root / 'lock.json'}", "--area", "all")
    assert suite.run("--area", "ckpt-wrap,mod-tracker").ret == 0
    assert suite.outcomes()["MT-001"] == "not_provided"
    (verdict,) = [v for v in suite.report()["verdicts"] if v["area"] == "mod-tracker"]
    assert verdict["verdict"] == "not provided"


SPEC_OF_TRACKER = """
[MT-001]
level = "MUST"
profile = "core"
devices = ["cpu"]
since = "0.1.0"
text = "It MUST track."
source = "none"
rationale = "it is the point"
"""


CASES_OF_TRACKER = """
from torchparts_conformance import requirement

@requirement("MT-001")
def test_tracks(part):
    assert part.tracks
"""
