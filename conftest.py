"""Run the code in READMEs, guides and docstrings as tests, and keep torch to one thread."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)

_FILES: list[Path] = []  # of which tests have run

collect_ignore = ["docs/examples/adapter"]  # a template's test, for an implementation of its own

try:
    from sybil import Sybil
    from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser
    from sybil.parsers.rest import DocTestParser
except ModuleNotFoundError:  # a GPU machine may hold only torch and pytest
    pass
else:
    pytest_collect_file = (
        Sybil(
            parsers=[PythonCodeBlockParser(), SkipParser()],
            patterns=["README.md", "docs/*.md", "docs/**/*.md"],
        )
        + Sybil(
            parsers=[DocTestParser()],
            # `**` is one folder here, and rooms lie below one another.
            patterns=[f"*/src/{'*/' * folders}*.py" for folders in range(1, 6)],
            excludes=["*/cases/*", "*/cases/*/*"],
        )
    ).pytest()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave what is there before a file's first test out of later garbage collections.

    Torch and all tests stay to the end, and looking through them took a third of the time.
    """
    if _FILES[-1:] != [item.path]:
        _FILES.append(item.path)
        gc.collect()
        gc.freeze()
