"""What requirements name as sources is well formed."""

from __future__ import annotations

import pytest

from torchparts_conformance.requirements._addresses import REPOSITORIES, addresses
from torchparts_conformance.requirements._cases import load_registry


@pytest.mark.parametrize(
    ("text", "pages"),
    [
        ("no address at all", []),
        ("seen (pytorch#7).", ["https://github.com/pytorch/pytorch/issues/7"]),
        ("a/b-c.d#12; more", ["https://github.com/a/b-c.d/issues/12"]),
        ("see https://example.org/x/y?z=1.", ["https://example.org/x/y?z=1"]),
        (
            "pytorch#1, metaseq#2",
            [
                f"https://github.com/{REPOSITORIES[name]}/issues/{number}"
                for name, number in (("pytorch", 1), ("metaseq", 2))
            ],
        ),
    ],
)
def test_address_becomes_a_page(text, pages):
    """A short form is a page on GitHub, a long one is itself, and punctuation is left out."""
    assert addresses(text) == pages


@pytest.mark.parametrize(
    "text",
    [
        "torchh#7",
        "#7",
        "pytorch#",
        "pytorch#x7",
        "pytorch#07",
        "a/b/c#1",
        "http://x.org",
        "https://x",
    ],
)
def test_malformed_address_is_refused(text):
    """What looks like an address and leads nowhere is named."""
    with pytest.raises(ValueError, match="is no address, but those read owner/repo#7, pytorch#7"):
        addresses(text)


def test_requirements_give_addresses():
    """The forms are those that are in use: the registry's reasons lead to pages."""
    found = [page for r in load_registry().values() for page in addresses(r.rationale)]
    assert len(set(found)) > 20
    assert all(page.startswith("https://") for page in found)
