"""One thing that is taken out."""

from __future__ import annotations

from typing import NamedTuple

NO_LOCK = "__import__('contextlib').nullcontext()"


class Part(NamedTuple):
    """What is taken out.

    Args:
        name: by which it is asked for.
        file: in `packages`.
        old: the text, which is there once.
        new: what stands there instead.
        tests: what is run, from the root; one of them has to fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def package(self) -> str:
        """The folder of its package."""
        return self.file.partition("/")[0]

    def __str__(self) -> str:
        return f"{self.package}: {self.name}"
