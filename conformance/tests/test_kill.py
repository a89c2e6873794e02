"""What kills say of the suite: what was not caught as declared, and what nothing made fail."""

from __future__ import annotations

from torchparts_conformance.mutation import _kill


def test_inexact_mutant_and_bare_requirement_are_problems(registry):
    """A mutant that is not caught as declared, or a MUST without one, is reported."""
    kill = _kill.Kill("ckpt-wrap", "wrong", "Wrong.", ("CW-002",), ("CW-001", "CW-002"), ("a::b",))
    lost = _kill.Kill("ckpt-wrap", "lost", "Lost.", ("CW-002",), (), failure="no answer in 1 s")
    problems = _kill.problems([kill, lost], registry)
    assert problems == [
        "mutant wrong of ckpt-wrap: declares ['CW-002'], but ['CW-001', 'CW-002'] failed",
        "mutant lost of ckpt-wrap: no answer in 1 s",
        "CW-001 has no mutant",
    ]


def test_page_of_kills_names_what_nothing_made_fail(registry):
    """What is exact is counted; what no mutant breaks and what never failed is named."""
    exact = _kill.Kill("ckpt-wrap", "wrong", "Wrong.", ("CW-002",), ("CW-002",), ("a::b", "a::c"))
    page = _kill.to_markdown([exact], registry, {"a::b", "a::c", "a::d"}, "1")
    assert "kills 1 of 1 mutants exactly as declared. They break 0 of 1 MUST" in page
    assert "| CW-002 | exactly these | 2 |" in page
    assert page.endswith(
        "MUST requirements that no mutant is declared to break:\n\n- `CW-001`\n\n"
        "Cases that no mutant made fail:\n\n- `a::d`\n"
    )
    assert "Cases that" not in _kill.to_markdown([exact], registry, {"a::b"}, "1")


def test_mutant_of_which_nothing_is_known_was_not_caught():
    """Whatever failed before its process did not answer."""
    kill = _kill.Kill("ckpt-wrap", "lost", "Lost.", ("CW-001",), ("CW-001",), failure="no answer")
    assert not kill.is_exact
    assert str(kill) == "no answer"
