"""The file of announced failures: what is wrong with it is said by file or by entry."""

from __future__ import annotations

import pytest

from torchparts_conformance._errors import ReportError
from torchparts_conformance.report import _known_failures

GOOD = {
    "id": '"CW-001"',
    "devices": '["cpu"]',
    "reason": '"it is being mended"',
    "issue": '"https://example.org/7"',
    "expires": "2999-01-01",
}


def _file(folder, **changes):
    lines = [f"{key} = {value}" for key, value in {**GOOD, **changes}.items() if value]
    path = folder / "known.toml"
    path.write_text("\n".join(["[[known_failure]]", *lines]), encoding="utf-8")
    return path


def test_good_entry_is_read(tmp_path):
    """Every key has its place."""
    (entry,) = _known_failures.load(_file(tmp_path))
    assert (entry.id, entry.devices, entry.expires.year) == ("CW-001", ("cpu",), 2999)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"reason": None}, "has other keys, but they are"),
        ({"colour": '"red"'}, "has other keys, but they are"),
        ({"devices": '["Cuda"]'}, r"'CW-001': devices is \['Cuda'\], but these are words"),
        ({"devices": "[]"}, r"devices is \[\], but these are words"),
        ({"reason": '" "'}, "id or reason is empty or no text, but both are words"),
        ({"issue": '"http://x.org"'}, "issue is 'http://x.org', but an https address is needed"),
        ({"expires": '"2999-01-01"'}, "expires is '2999-01-01', but a day, such as 2027-03-01"),
        ({"expires": "2999-01-01T00:00:00"}, "but a day, such as 2027-03-01, is needed"),
        ({"id": '"' + "x" * 90 + '"', "devices": "[]"}, "known failure 'x{59}: devices"),
    ],
)
def test_bad_entry_is_refused(tmp_path, changes, said):
    """An announcement that says too little, or what nobody knows, is refused."""
    with pytest.raises(ReportError, match=said) as refused:
        _known_failures.load(_file(tmp_path, **changes))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = [", "known failures 'known.toml' are no TOML"),
        ("other = 1", "hold something else, but"),
        ("known_failure = 1", "hold something else, but"),
        ("a = " + "[" * 5000, "are no TOML"),
    ],
)
def test_file_of_something_else_is_refused(tmp_path, text, said):
    """What is no list of announcements is named by file."""
    path = tmp_path / "known.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ReportError, match=said):
        _known_failures.load(path)
