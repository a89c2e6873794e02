"""Check that the built site is self-contained, has unique titles, and has every public name.

Usage: python tools/site/check_site.py SITE_FOLDER
"""

from __future__ import annotations

import html
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import pages

# URLs that a browser loads automatically; `<a href>` is not among them.
LOADED = re.compile(
    r"<(?:script|img|iframe|source|video|audio)\b[^>]*?\ssrc=[\"']?(https?:)?//([^\"'\s>]+)"
    r"|<link\b(?![^>]*rel=[\"']?(?:canonical|next|prev|alternate))[^>]*?\shref=[\"']?(https?:)?//([^\"'\s>]+)"
)
IN_STYLES = re.compile(r"(?:url\(|@import\s+)[\"']?(https?:)?//([^\"')\s;]+)")


def foreign_requests(site: Path) -> Iterator[str]:
    """Return everything that a page or style sheet loads from another server."""
    for suffix, pattern in ((".html", LOADED), (".css", IN_STYLES)):
        for path in sorted(site.rglob(f"*{suffix}")):
            for found in pattern.finditer(path.read_text(encoding="utf-8")):
                address = next(part for part in found.groups() if part and part[-1] != ":")
                yield f"{path.relative_to(site).as_posix()} asks https://{address}"
    for path in sorted(site.rglob("*.html")):
        if 'data-md-component="source"' in path.read_text(encoding="utf-8"):
            yield f"{path.relative_to(site).as_posix()} asks the repository's server for its facts"


def repeated_titles(site: Path) -> Iterator[str]:
    """Return titles that two pages share."""
    found = (
        re.search(r"<title>(.*?)</title>", path.read_text(encoding="utf-8"), re.DOTALL)
        for path in site.rglob("*.html")
        if path.name != "404.html"
    )
    titles = Counter(match[1].strip() for match in found if match)
    for title, count in titles.items():
        if count > 1:
            yield f"{title!r} is the title of {count} pages"


def wrong_names(page: Path, package: str, names: Iterable[str]) -> Iterator[str]:
    """Return public names without an entry, and entries of private names."""
    anchors = set(re.findall(rf'id="({package}\.[\w.]+)"', page.read_text(encoding="utf-8")))
    yield from (
        f"{package}.{name} has no entry" for name in names if f"{package}.{name}" not in anchors
    )
    private = (anchor for anchor in anchors if re.search(r"\._(?!_)", anchor))
    yield from (f"{anchor} is private" for anchor in sorted(private))


def inner_words(page: Path) -> Iterator[str]:
    """Return private names in signatures, which readers of the reference cannot look up."""
    text = page.read_text(encoding="utf-8")
    shown = re.sub(r"<details.*?</details>", "", text, flags=re.DOTALL)  # the source itself
    for signature in re.findall(r'<div class="[^"]*doc-signature.*?</div>', shown, re.DOTALL):
        said = html.unescape(re.sub(r"<[^>]+>", "", signature))
        for name in re.findall(r"(?<![\w.'\"])_[a-zA-Z]\w*", said):
            yield f"{page.parent.name}/{page.name} has {name} in {said.strip().splitlines()[0]}"


def problems(site: Path) -> Iterator[str]:
    """Return all problems."""
    yield from foreign_requests(site)
    yield from repeated_titles(site)
    for package in pages.SOURCES:
        page = (
            "conformance-api.html"
            if package.startswith("torchparts")
            else f"{package.replace('_', '-')}/api.html"
        )
        yield from wrong_names(site / page, package, pages.public_names(package))
        yield from inner_words(site / page)


if __name__ == "__main__":
    found = list(problems(Path(sys.argv[1])))
    print("\n".join(found) or "the site stands alone, and has every public name")
    sys.exit(bool(found))
