"""Run the code in READMEs, guides and docstrings as tests, and keep torch to one thread."""

from __future__ import annotations

import torch

torch.set_num_threads(1)

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
            excludes=["docs/notes/*", "docs/benchmarks/*"],
        )
        + Sybil(
            parsers=[DocTestParser()],
            # `**` is one folder here, and rooms lie below one another.
            patterns=[f"*/src/{'*/' * folders}*.py" for folders in range(1, 6)],
            excludes=["*/cases/*", "*/cases/*/*"],
        )
    ).pytest()
