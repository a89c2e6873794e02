"""Asks the network whether what the requirements name exists; nothing else here does."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator

from torchparts_conformance._errors import ReportError
from torchparts_conformance.requirements._addresses import addresses
from torchparts_conformance.requirements._registry import Requirement
from torchparts_conformance.requirements._traceability import SourceTest

RAW = "https://raw.githubusercontent.com/pytorch/pytorch/v2.13.0/"
TIMEOUT_S = 30.0
MAX_BYTES = 4 << 20
_GONE = (404, 410)


def get(address: str) -> str | None:
    """Give the text of a page, or None where there is no such page.

    Raises:
        ReportError: nobody answered, so nothing is known.
    """
    request = urllib.request.Request(address, headers={"User-Agent": "torchparts-conformance"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as page:
            return str(page.read(MAX_BYTES).decode("utf-8", "replace"))
    except urllib.error.HTTPError as error:
        if error.code in _GONE:
            return None
        raise ReportError(_unknown(address, f"status {error.code}")) from error
    except OSError as error:
        raise ReportError(_unknown(address, str(getattr(error, "reason", error)))) from error


def _unknown(address: str, reason: str) -> str:
    return f"address {address:.200} gave {reason:.120}, but a page is needed. Try again later."


def problems(
    sources: Iterable[SourceTest],
    requirements: Iterable[Requirement],
    *,
    fetch: Callable[[str], str | None] = get,
) -> Iterator[str]:
    """Say which source tests and which addresses do not exist; each page is asked for once."""
    pages: dict[str, str | None] = {}

    def text_of(address: str) -> str | None:
        if address not in pages:
            pages[address] = fetch(address)
        return pages[address]

    for source in sources:
        text, name = text_of(RAW + source.path), source.name.rpartition("::")[2]
        if text is None or f"def {name}(" not in text:
            yield f"{source.key} is not in {source.path} of PyTorch v2.13.0"
    for requirement in requirements:
        for address in addresses(f"{requirement.rationale} {requirement.torch_deviation}"):
            if text_of(address) is None:
                yield f"{requirement.id} names {address}, which does not exist"
