"""Cases and requirements are read from the files of cases, without importing them."""

from __future__ import annotations

import ast

import pytest
from small_suite import declared

from torchparts_conformance._errors import RegistryError
from torchparts_conformance.requirements._areas import AREAS, GROUPS
from torchparts_conformance.requirements._cases import cases_by_id, find_cases, load_registry

HEAD = "from torchparts_conformance import requirement\n"
FILE = f"""
import pytest
raise SystemExit

def requirement_of(id): ...

{declared("CW-001")}
@requirement("CW-002")
def test_two(part):
    \"\"\"It holds.

    And more.
    \"\"\"

@pytest.mark.parametrize("x", [pytest.param(1, marks={declared("CW-003")[1:]})])
@pytest.mark.parametrize("y", ["CW-004"])
def test_marked_inside(part, x, y):
    pass

{declared("CW-002")}
def test_three(part):
    pass

@requirement("CW-005")
def helper(part):
    def test_inner(): ...
"""


@pytest.fixture
def write(tmp_path):
    """Give a function that writes files of cases of ckpt-wrap, and gives the root."""

    def write(**files):
        for name, text in files.items():
            path = tmp_path / "ckpt_wrap" / f"{name}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


def test_cases_are_read_without_importing_them(write):
    root = write(test_a=FILE, _beside=FILE)
    two, inside, three = find_cases(root)
    path = root / "ckpt_wrap/test_a.py"
    assert (two.area, two.name, two.path) == ("ckpt-wrap", "ckpt_wrap/test_a.py::test_two", path)
    assert (two.ids, two.text) == (("CW-001", "CW-002"), "It holds.")
    assert path.read_text().splitlines()[two.line - 1].startswith("def test_two(")
    assert (inside.ids, inside.text) == (("CW-003",), "")
    found = cases_by_id(root)
    assert {id: len(cases) for id, cases in found.items()} == {
        "CW-001": 1,
        "CW-002": 2,
        "CW-003": 1,
    }
    assert found["CW-002"] == [two, three]


def test_registry_has_each_declared_requirement_in_order(write):
    registry = load_registry(write(test_a=FILE))
    assert list(registry) == ["CW-001", "CW-002", "CW-003"]
    assert registry["CW-002"].text == "It MUST."


def test_changed_file_is_read_again(write):
    write(test_a=HEAD + declared("CW-001") + "\ndef test_a(part): ...\n")
    root = write(test_a=HEAD + declared("CW-007") + "\ndef test_longer(part): ...\n")
    assert list(load_registry(root)) == ["CW-007"]


@pytest.mark.parametrize(
    ("decorators", "said"),
    [
        ("", "ckpt_wrap/test_a.py:2 test_a has no @requirement"),
        (
            '@requirement("CW-001")\n',
            "test_a checks CW-001, which no case declares. Give level, te",
        ),
        (
            f"{declared('MT-001')}\n",
            "test_a.py:2 requirement MT-001 is of mod-tracker, but the case",
        ),
        (f"{declared('CW-1')}\n", "test_a.py:2 requirement 'CW-1': an id is"),
        ('@requirement("CW-001", level="MUST")\n', "CW-001: text, since, profile is missing"),
        (
            '@requirement("CW-001", levle="MUST")\n',
            "CW-001: level, text, since, profile is missing",
        ),
        (declared("CW-001")[:-1] + ", levle=1)\n", "levle must be text"),
        (declared("CW-001")[:-1] + ', levle="")\n', "unexpected keyword argument 'levle'"),
        ('@requirement("CW-001", "CW-002")\n', "requirement takes one id; stack decorators"),
        ("@requirement(ID)\n", "'ID' is no literal"),
        ('@requirement("CW-001", text=TEXT)\n', "'TEXT' is no literal"),
        ("@requirement(\n", "ckpt_wrap/test_a.py:2 is not Python"),
    ],
)
def test_wrong_decorator_is_refused_with_its_place(write, decorators, said):
    root = write(test_a=f"{HEAD}{decorators}def test_a(part): ...\n")
    with pytest.raises(RegistryError) as refused:
        load_registry(root)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_requirement_declared_twice_is_refused(write):
    one = f"{HEAD}{declared('CW-001')}\ndef test_a(part): ...\n"
    root = write(test_a=one, test_b=one.replace("test_a", "test_b"))
    with pytest.raises(RegistryError, match="CW-001 is declared twice, by ckpt_wrap"):
        load_registry(root)


def test_wrong_decorator_ends_a_run_with_one_line(suite):
    cases = suite.root / "cases/ckpt_wrap/test_cases.py"
    cases.write_text(cases.read_text().replace('level="MUST"', 'level="MAY"', 1))
    result = suite.run()
    assert result.ret == 4
    said = result.stderr.str()
    assert "ckpt_wrap/test_cases.py:4 requirement CW-001: level is 'MAY'; it must be" in said
    assert "Traceback" not in said


def test_every_case_says_what_it_claims():
    assert [case.name for case in find_cases() if not case.text] == []


def test_every_area_has_requirements_of_its_groups():
    registry = load_registry().values()
    assert {r.area for r in registry} == set(AREAS)
    for area in AREAS:
        assert {r.group for r in registry if r.area == area} - {""} == set(GROUPS.get(area, ()))


def test_cases_import_no_implementation(package):
    ours = {"ckpt_wrap", "mod_tracker", "flat_param", "sac_policies"}
    imported = {
        (path.name, name.partition(".")[0])
        for path in package.glob("cases/*/*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in _modules(node)
    }
    assert [found for found in imported if found[1] in ours] == []


def _modules(node):
    return [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]


# Names with an underscore that torch documents as the way to extend it, or that have no other.
EXTENSION_POINTS = (
    "torch.Tensor._make_wrapper_subclass",
    "torch._dynamo.reset",
    "torch._subclasses.FakeTensorMode",
    "torch._subclasses.fake_tensor.FakeTensorMode",
    "torch.autograd.Variable._execution_engine",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._pytree.tree_map_only",
)


def test_private_torch_names_are_in_one_file(package):
    found = {
        (path.relative_to(package).as_posix(), name)
        for path in package.rglob("*.py")
        for name in _torch_names(path)
        if any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
        and not any(f"{point}.".startswith(f"{name}.") for point in EXTENSION_POINTS)
    }
    assert {path for path, _ in found} <= {"adapters/inside_torch.py"}


def _torch_names(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch."):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith("torch."))
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if name.startswith("torch."):
                yield name
