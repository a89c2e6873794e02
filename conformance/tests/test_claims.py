"""What an implementation is held to: what it claims, of what was chosen and is known."""

from __future__ import annotations

import dataclasses

import pytest
from small_suite import declared

from torchparts_conformance import Implementation
from torchparts_conformance._errors import OptionError
from torchparts_conformance.subject import _claims
from torchparts_conformance.subject._claims import Claims


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
    suite.write("cases/mod_tracker/test_more.py", CASES_OF_TRACKER)
    assert suite.run("--area", "ckpt-wrap,mod-tracker").ret == 0
    assert suite.outcomes()["MT-001"] == "not_provided"
    (verdict,) = [v for v in suite.report()["verdicts"] if v["area"] == "mod-tracker"]
    assert verdict["verdict"] == "not provided"


CASES_OF_TRACKER = f"""
from torchparts_conformance import requirement

{declared("MT-001")}
def test_tracks(part):
    assert part.tracks
"""


MINE = Implementation(
    "mine", "1", parts={"ckpt-wrap": 1}, capabilities={"ckpt-wrap": {"plan", "compile"}}
)
CLAIMS = Claims(MINE, ("ckpt-wrap", "mod-tracker"), ("cpu",))


@pytest.fixture
def asked(registry):
    """Give a function that makes a requirement of an area and a profile."""
    return lambda area, profile: dataclasses.replace(registry["CW-001"], area=area, profile=profile)


@pytest.mark.parametrize(
    ("claims", "area", "profile", "outcome", "why"),
    [
        (CLAIMS, "ckpt-wrap", "core", "", None),
        (CLAIMS, "ckpt-wrap", "plan", "", None),
        (CLAIMS, "ckpt-wrap", "offload", "not_claimed", "profile offload is not claimed"),
        (CLAIMS, "mod-tracker", "core", "not_provided", "mod-tracker is not provided"),
        (CLAIMS, "combined", "core", "not_provided", "combined is not provided"),
        (
            dataclasses.replace(CLAIMS, profiles=("plan",)),
            *("ckpt-wrap", "core", "not_claimed", "profile core is not claimed"),
        ),
        (
            dataclasses.replace(CLAIMS, unfit="mine is for torch <2"),
            *("ckpt-wrap", "core", "not_provided", "mine is for torch <2"),
        ),
        (
            dataclasses.replace(CLAIMS, unfit="mine is for torch <2"),
            *("ckpt-wrap", "offload", "not_claimed", "mine is for torch <2"),
        ),
    ],
)
def test_who_is_not_held_to_a_requirement_lacks_or_does_not_claim_it(
    asked, claims, area, profile, outcome, why
):
    """With the reason, and nothing where the implementation is held to it."""
    requirement = asked(area, profile)
    assert claims.lacks(requirement) == outcome
    assert claims.hold(requirement) is (outcome == "")
    assert why is None or claims.why_not(requirement) == why


def test_claims_are_told_in_an_order_of_their_own():
    """So that equal claims give equal reports."""
    assert CLAIMS.provided_areas() == ("ckpt-wrap",)
    assert CLAIMS.to_json() == {
        "areas": ["ckpt-wrap", "mod-tracker"],
        "devices": ["cpu"],
        "profiles": None,
        "capabilities": {"ckpt-wrap": ["compile", "plan"]},
    }
    chosen = dataclasses.replace(CLAIMS, profiles=("robust", "core")).to_json()
    assert chosen["profiles"] == ["robust", "core"]


def test_profile_that_no_requirement_has_cannot_be_chosen(registry):
    """The known ones are named."""
    _claims.refuse_unknown_profiles(["core", "robust"], registry)
    with pytest.raises(
        OptionError, match=r"--profile 'a', 'b' is unknown, but .* known: core, robust"
    ):
        _claims.refuse_unknown_profiles(["core", "b", "a"], registry)
