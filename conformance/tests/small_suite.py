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
    level="MUST",
    text="It MUST work.",
    source="test_fqn",
    since="0.1.0",
    profile="core",
)
def test_one(part):
    {body}
"""
TWO = """
@requirement(
    "CW-002",
    level="SHOULD",
    text="It SHOULD hold.",
    rationale="people rely on it",
    since="0.1.0",
    profile="robust",
    devices=("cpu",),
)
def test_two(part):
    {body}
"""
THREE = """
@requirement(
    "CW-003",
    level="MUST",
    text="It MUST change nothing.",
    rationale="names matter",
    since="0.1.0",
    profile="in-place",
    devices=("cpu",),
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
    facts = 'level="MUST", text="It MUST.", source="test_fqn", since="0.1.0", profile="core"'
    return f'@requirement("{id}", {facts})'
