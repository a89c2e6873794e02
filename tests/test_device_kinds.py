"""Packages and cases mean an accelerator, not one of its kinds."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = [*ROOT.glob("packages/*/src"), ROOT / "conformance/src"]
KINDS = {"cuda", "hip", "hpu", "mps", "mtia", "npu", "privateuseone", "xla", "xpu"}

MEANT = {
    "ckpt_wrap/checkpointing/_ambient_state.py": (1, "torch's functions for mps take no device"),
    "flat_param/memory/_views.py": (3, "where what a storage points to is an address"),
    "mod_tracker/_torch_compat/_out_of_memory.py": (1, "torch tells of this on CUDA only"),
    "mod_tracker/reports/_trace.py": (3, "ranges of NVIDIA's profiler"),
    "mod_tracker/reports/_watch.py": (1, "torch tells of this on CUDA only"),
    "torchparts_conformance/plugin.py": (1, "an example in a message"),
    "torchparts_conformance/report/_known_failures.py": (1, "an example in a message"),
    "torchparts_conformance/run/_options.py": (2, "an example in a help text"),
    "torchparts_conformance/subject/_identity.py": (2, "the version of CUDA that torch has"),
}
"""How often a file names kinds, and why it has to."""


def named(path: Path) -> list[str]:
    """Kinds that a file names in strings that are no docstrings, and as attributes of torch."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and isinstance(node.body[0], ast.Expr)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in docstrings:
                found += [word for word in re.findall(r"\w+", node.value) if word in KINDS]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch":
            found += [node.attr] if node.attr in KINDS else []
    return found


def test_kinds_of_devices_are_named_only_where_they_are_meant() -> None:
    """What holds for an accelerator is asked of `torch.accelerator`."""
    counts: Counter[str] = Counter()
    for source in SOURCES:
        for path in source.rglob("*.py"):
            counts[path.relative_to(source).as_posix()] += len(named(path))
    assert +counts == {name: count for name, (count, _) in MEANT.items()}


def test_a_kind_is_found_in_any_place(tmp_path: Path) -> None:
    """A string inside another, an attribute; words of a docstring are not code."""
    path = tmp_path / "module.py"
    path.write_text('"""On cuda."""\nx = f"cuda:{0}", torch.xpu, {"mps"}, torch.cpu, "cudas"\n')
    assert sorted(named(path)) == ["cuda", "mps", "xpu"]
