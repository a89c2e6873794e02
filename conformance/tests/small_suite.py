"""The files of a small suite: its requirements, an adapter and cases."""

from __future__ import annotations

SPEC = """
[CW-001]
level = "MUST"
profile = "core"
devices = ["cpu", "cuda"]
since = "0.1.0"
text = "It MUST work."
source = "none"
rationale = "it is the point"

[CW-002]
level = "SHOULD"
profile = "robust"
devices = ["cpu"]
since = "0.1.0"
text = "It SHOULD hold."
source = "none"
rationale = "people rely on it"

[CW-003]
level = "MUST"
profile = "in-place"
devices = ["cpu"]
since = "0.1.0"
text = "It MUST change nothing."
source = "none"
rationale = "names matter"
"""
ADAPTER = """
import types
from torchparts_conformance import Implementation

good = Implementation(
    "good", "1", parts={"ckpt-wrap": types.SimpleNamespace(answer=42)},
    capabilities={"ckpt-wrap": {"in-place"}},
)
plain = Implementation("plain", "1", parts={"ckpt-wrap": types.SimpleNamespace(answer=42)})
empty = Implementation("empty", "1")
"""
CASES = """
import pytest
from torchparts_conformance import requirement

@requirement("CW-001")
def test_one(part):
    \"\"\"The part answers.\"\"\"
    assert part.answer == 42

@requirement("CW-002")
def test_two(part):
    \"\"\"The part answers again.\"\"\"
    assert part.answer == 42

@requirement("CW-003")
def test_three(part):
    \"\"\"The part keeps answering.\"\"\"
    assert part.answer == 42
"""
ONE_CASE = """
import pytest
from torchparts_conformance import requirement

@requirement("CW-001")
def test_one(part):
    {body}
"""
CASE_TWO = """
@requirement("CW-002")
def test_two(part):
    assert part.answer == 42
"""
