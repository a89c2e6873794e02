"""Cases can fail: each asserts something about the part, and one that does not is found out."""

from __future__ import annotations

import ast
import shutil

import pytest

from torchparts_conformance import _evidence
from torchparts_conformance._cases import CASES, find_cases
from torchparts_conformance._registry import AREAS, folder_of

FOLDERS = [folder_of(area) for area in AREAS]


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_case_asserts_something_about_the_part(folder):
    """No case only runs the part, and none asserts only about something else."""
    assert _evidence.cases_without_evidence(CASES / folder) == []


class _Removed(ast.NodeTransformer):
    """Takes every assertion out of a file and leaves all else as it is."""

    def visit_Assert(self, node):
        return ast.copy_location(ast.Pass(), node)

    def visit_Expr(self, node):
        if isinstance(node.value, ast.Call) and "assert_close" in ast.unparse(node.value.func):
            return ast.Expr(ast.Tuple(node.value.args, ast.Load()))
        return self.generic_visit(node)

    def visit_With(self, node):
        self.generic_visit(node)
        if any("pytest." in ast.unparse(item.context_expr) for item in node.items):
            return node.body
        return node


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_case_without_its_assertions_is_found_out(folder, tmp_path):
    """Whichever case loses its assertions, and its helpers theirs, it is named."""
    shutil.copytree(CASES / folder, tmp_path / folder)
    for path in (tmp_path / folder).glob("*.py"):
        tree = ast.fix_missing_locations(_Removed().visit(ast.parse(path.read_text())))
        path.write_text(ast.unparse(tree))
    wanted = sorted(case.name for case in find_cases() if case.name.startswith(f"{folder}/"))
    assert _evidence.cases_without_evidence(tmp_path / folder) == wanted


CASES_TEXT = """
import pytest
import torch

def alive():
    return 3

def same(a, b):
    assert a == b

def on_rank(part, rank, world_size):
    assert part.answer

def test_{name}(part, ranks, device):
    {body}
"""


@pytest.mark.parametrize(
    ("body", "is_evidence"),
    [
        ("assert part.answer == 42", True),
        ("found = part.answer; again = found; assert again", True),
        ("seen = []; part.call(seen.append); assert seen == [1]", True),
        ("same(part.answer, 42)", True),
        ("ranks(2, on_rank)", True),
        ("part.call(); assert alive() == 3", True),
        ("torch.testing.assert_close(part.answer, 42)", True),
        ("with pytest.raises(ValueError): part.call()", True),
        ("with part.on() as found: pass\n    assert found", True),
        ("part.call()", False),
        ("part.call(); assert device", False),
        ("part.call(); assert torch.ones(1) == 1", False),
        ("assert alive() == 3", False),
        ("part.call(); same(1, 1)", False),
        ("with pytest.raises(ValueError): int('x')", False),
    ],
)
def test_evidence_is_an_assertion_tied_to_the_part(tmp_path, body, is_evidence):
    """What the part gave, was given or left behind counts; anything else does not."""
    folder = tmp_path / "ckpt_wrap"
    folder.mkdir()
    (folder / "test_a.py").write_text(CASES_TEXT.format(name="x", body=body))
    assert (_evidence.cases_without_evidence(folder) == []) == is_evidence
