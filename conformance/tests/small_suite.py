"""The files of a small suite: an adapter, and cases with their requirements."""

from __future__ import annotations

ADAPTER = """
import types
from torchparts_conformance import Implementation

good = Implementation(
    "good", "1", parts={"ckpt-wrap": types.SimpleNamespace(answer=42)},
    capabilities={"ckpt-wrap": {"robust", "in-place"}},
)
plain = Implementation("plain", "1", parts={"ckpt-wrap": types.SimpleNamespace(answer=42)})
empty = Implementation("empty", "1")
"""
ONE = """
@requirement(
    "CW-001",
    "It MUST work.",
    source="test_fqn",
)
def test_one(part, device):
    {body}
"""
TWO = """
@requirement(
    "CW-002",
    "It SHOULD hold.",
    rationale="people rely on it",
)
def test_two(part):
    {body}
"""
THREE = """
@requirement(
    "CW-003",
    "It MUST change nothing.",
    rationale="names matter",
    profile="in-place",
)
def test_three(part):
    {body}
"""
RIGHT = "assert part.answer == 42"
HEAD = "import pytest\nfrom torchparts_conformance import requirement\n"


def cases(one: str = RIGHT, two: str | None = RIGHT, three: str | None = RIGHT) -> str:
    """Return a file of cases with these bodies; a case whose body is None is left out."""
    bodies = ((ONE, one), (TWO, two), (THREE, three))
    return HEAD + "".join(text.format(body=body) for text, body in bodies if body is not None)


def declared(id: str) -> str:
    """Return the decorator that declares a requirement of core."""
    return f'@requirement("{id}", "It MUST.", source="test_fqn")'
