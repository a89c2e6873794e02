"""A requirement, and the decorator that declares it on a case."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torchparts_conformance.requirements._areas import (
    ACCELERATOR,
    CORE,
    LEVELS,
    PREFIXES,
    ROBUST,
)

_Case = TypeVar("_Case", bound=Callable[..., Any])
_ID = re.compile(rf"({'|'.join(PREFIXES.values())})-\d{{3}}")
_WORD = re.compile(r"[a-z][a-z0-9-]{0,31}")
_AREA_OF = {prefix: area for area, prefix in PREFIXES.items()}
_ISSUE = re.compile(r"(?:([\w.-]+/[\w.-]+)|(\w+))#([1-9]\d{0,6})\b")


@dataclass(frozen=True)
class Requirement:
    """One sentence that an implementation has to satisfy.

    Attributes:
        id: permanent, with the prefix of its area, such as `CW-012`.
        area: such as `ckpt-wrap`.
        text: the whole requirement, with MUST or SHOULD.
        profile: `core` if it has a source; else `robust` or a capability.
        devices: the CPU, and accelerators if its first case takes `device`.
        source: name of the test of PyTorch that it comes from, or dotted name of the documented
            object; empty if it is torchparts' own.
        quote: the words of the object's documentation.
        rationale: why it exists; may be empty if it has a source.
    """

    id: str
    area: str
    text: str
    profile: str
    devices: tuple[str, ...]
    source: str = ""
    quote: str = ""
    rationale: str = ""

    @property
    def level(self) -> str:
        """The word of the text: MUST or SHOULD."""
        return _levels(self.text)[0]

    @property
    def is_documented(self) -> bool:
        """Whether it comes from PyTorch's documentation, and not from one of its tests."""
        return "." in self.source

    def is_for(self, device: str) -> bool:
        """Return whether it applies to a kind of device."""
        return device == "cpu" or ACCELERATOR in self.devices


def requirement(
    id: str,
    text: str = "",
    *,
    rationale: str = "",
    source: str = "",
    quote: str = "",
    profile: str = "",
) -> Callable[[_Case], _Case]:
    """Declare a requirement on its first case; `@requirement(id)` marks further cases of it.

    The suite reads the decorator from the file, so each argument must be a literal. A case that
    takes `device` runs on each chosen device, any other case on the CPU.

    Args:
        id: such as `"CW-012"`.
        text: the requirement in one sentence, with MUST or SHOULD, which is its level.
        rationale: why users need it; required if there is no source.
        source: name of the test of PyTorch it comes from, or dotted name of the object of torch
            whose documentation says it. A requirement with a source is of core.
        quote: the words of that documentation.
        profile: a capability, such as `"compile"`; without it, a requirement of torchparts' own is
            `robust`.
    Raises:
        ValueError: an argument is missing or has the wrong form.
    Example:
        @requirement(
            "CW-012",
            "Dropout MUST be replayed in recomputation.",
            rationale="Gradients are wrong otherwise.",
        )
        def test_dropout_is_replayed(part, device): ...
    """
    facts: dict[str, Any] = {
        "rationale": rationale,
        "source": source,
        "quote": quote,
        "profile": profile,
    }
    if text or any(facts.values()):
        declared(id, text, **facts)
    else:
        area_of_id(id)
    import pytest  # adapters import this package without needing pytest

    return pytest.mark.requirement(id)


def area_of_id(id: str) -> str:
    """Return the area of an id.

    Raises:
        ValueError: it is not an id.
    """
    if not isinstance(id, str) or not _ID.fullmatch(id):
        raise ValueError(
            f"requirement {id!r:.60}: an id is a prefix of {', '.join(PREFIXES.values())} and "
            "three digits, such as 'CW-012'."
        )
    return _AREA_OF[id.partition("-")[0]]


def declared(id: str, text: str = "", *, on_accelerators: bool = True, **facts: Any) -> Requirement:
    """Make a requirement from the arguments of its decorator.

    Raises:
        ValueError: an argument is missing or has the wrong form.
    """
    area = area_of_id(id)
    facts = {"text": text, **facts}
    if reason := _violation(facts):
        raise ValueError(f"requirement {id}: {reason}")
    facts["profile"] = CORE if facts.get("source") else facts.get("profile") or ROBUST
    devices = ("cpu", ACCELERATOR) if on_accelerators else ("cpu",)
    return Requirement(id=id, area=area, devices=devices, **facts)


def _levels(text: str) -> list[str]:
    return [level for level in LEVELS if re.search(rf"\b{level}\b", text)]


def _violation(texts: dict[str, str]) -> str:
    """Return what is wrong with the arguments of a requirement, or ""."""
    if wrong := sorted(word for word, value in texts.items() if not isinstance(value, str)):
        return f"{', '.join(wrong)} must be text."
    if not texts["text"].strip():
        return "its first case gives the text, and rationale or source."
    if len(_levels(texts["text"])) != 1:
        return f"the text must contain {' or '.join(LEVELS)}, which is its level."
    source, profile = texts.get("source", ""), texts.get("profile", "")
    if profile and not _WORD.fullmatch(profile):
        return f"profile is {profile!r}; it must be a short lower-case word."
    if (source and profile) or profile == CORE:
        return (
            "core has what the tests and the documentation of torch say, so a source is the sign "
            "of core. Give the source, or another profile."
        )
    if bool(texts.get("quote")) != ("." in source):
        return "quote has the words of a documented object, whose dotted name is the source."
    if not source and not texts.get("rationale"):
        return "it has neither source nor rationale. Say where it comes from."
    issues = _ISSUE.finditer(texts.get("rationale", ""))
    unknown = [issue[0] for issue in issues if not _repository(issue)]
    if unknown:
        return f"{unknown[0]!r} names no repository. Write owner/repo#7."
    return ""


def _repository(issue: re.Match[str]) -> str:
    """Return `owner/repo`; an issue without an owner is one of PyTorch."""
    return issue[1] or ("pytorch/pytorch" if issue[2] == "pytorch" else "")


def with_links(text: str) -> str:
    """Turn issue references in a text, such as `pytorch#96136`, into Markdown links."""
    return _ISSUE.sub(
        lambda found: f"[{found[0]}](https://github.com/{_repository(found)}/issues/{found[3]})",
        text,
    )
