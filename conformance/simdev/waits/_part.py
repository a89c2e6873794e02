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
        unnoticed: why no test can notice; empty where one has to.
        tests: files that are run in the place of all that are marked, from the root.
    """

    name: str
    file: str
    old: str
    new: str
    unnoticed: str = ""
    tests: tuple[str, ...] = ()

    @property
    def package(self) -> str:
        """The folder of its package."""
        return self.file.partition("/")[0]
