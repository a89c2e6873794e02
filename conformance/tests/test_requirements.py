"""Requirements and cases are read from decorators, without importing the files of cases."""

from __future__ import annotations

import ast
import importlib

import pytest
from small_suite import declared as text_of

from torchparts_conformance import requirement
from torchparts_conformance._errors import RegistryError
from torchparts_conformance.requirements._areas import AREAS
from torchparts_conformance.requirements._cases import (
    cases_by_id,
    find_cases,
    load_registry,
    source_tests,
    trace,
)
from torchparts_conformance.requirements._requirement import declared, with_links

FACTS = {
    "text": "It MUST work.",
    "rationale": "it is the point",
}
DOCUMENTED = {"source": "torch.utils.checkpoint.checkpoint", "quote": "re-invoking"}


def test_decorator_marks_the_case_with_its_id():
    @requirement("CW-001", **FACTS)
    @requirement("CW-002")
    def case(part):
        return part

    assert [mark.args for mark in case.pytestmark] == [("CW-002",), ("CW-001",)]
    assert case(3) == 3


def test_declared_requirement_has_defaults():
    found = declared("CW-001", **FACTS)
    assert (found.area, found.devices, found.source) == ("ckpt-wrap", ("cpu", "accelerator"), "")
    assert found.is_for("cpu") and found.is_for("cuda")
    assert not declared("CW-001", **FACTS, on_accelerators=False).is_for("cuda")


@pytest.mark.parametrize(
    ("id", "facts", "said"),
    [
        ("CW-1", {}, "'CW-1': an id is a prefix of CW, MT, FP, SP and three digits"),
        ("XX-001", {}, "an id is a prefix of"),
        (None, {}, "requirement None: an id"),
        ("CW-001", {"text": " "}, "CW-001: its first case gives the text"),
        ("CW-001", {"text": "It MAY."}, "the text must contain MUST or SHOULD, which is"),
        ("CW-001", {"text": "It MUST or SHOULD."}, "the text must contain MUST or SHOULD"),
        ("CW-001", {"profile": "Very Core"}, "profile is 'Very Core'; it must be a short"),
        ("CW-001", {"rationale": ""}, "it has neither source nor rationale"),
        ("CW-001", {"text": 3}, "text must be text"),
        ("CW-001", {"rationale": "see torch#1"}, "'torch#1' names no repository"),
        ("CW-001", {"profile": "core"}, "core has what the tests and the documentation of torch"),
        ("CW-001", {"profile": "robust", "source": "test_fqn"}, "a source is the sign of core"),
        ("CW-001", {"quote": "re-invoking"}, "quote has the words of a documented object"),
        ("CW-001", {**DOCUMENTED, "quote": ""}, "quote has the words of a documented object"),
    ],
)
def test_wrong_declaration_is_refused(id, facts, said):
    with pytest.raises(ValueError, match=said):
        requirement(id, **{**FACTS, **facts})


def test_id_without_facts_is_checked():
    with pytest.raises(ValueError, match="an id is a prefix of"):
        requirement("CW-0001")


def test_issues_become_links():
    found = with_links("pytorch#96136, a/b-c#7")
    assert "[pytorch#96136](https://github.com/pytorch/pytorch/issues/96136)" in found
    assert "[a/b-c#7](https://github.com/a/b-c/issues/7)" in found


HEAD = "from torchparts_conformance import requirement\n"
FILE = f"""
import pytest
raise SystemExit

{text_of("CW-001")}
@requirement("CW-002")
def test_two(part):
    \"\"\"It holds.

    And more.
    \"\"\"

@pytest.mark.parametrize("x", [pytest.param(1, marks={text_of("CW-003")[1:]})])
@pytest.mark.parametrize("y", ["CW-004"])
def test_marked_inside(part, x, y):
    pass

{text_of("CW-002")}
def test_three(part):
    pass

@requirement("CW-005")
def helper(part):
    def test_inner(): ...
"""


@pytest.fixture
def write(tmp_path):
    """`write(...)` writes files of cases of ckpt-wrap and returns the root."""

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
    assert (two.area, two.name) == ("ckpt-wrap", "ckpt_wrap/test_a.py::test_two")
    assert (two.ids, two.text) == (("CW-001", "CW-002"), "It holds.")
    assert (inside.ids, inside.text) == (("CW-003",), "")
    assert cases_by_id(root)["CW-002"] == [two, three]
    assert list(load_registry(root)) == ["CW-001", "CW-002", "CW-003"]


def test_changed_file_is_read_again(write):
    write(test_a=HEAD + text_of("CW-001") + "\ndef test_a(part): ...\n")
    root = write(test_a=HEAD + text_of("CW-007") + "\ndef test_longer(part): ...\n")
    assert list(load_registry(root)) == ["CW-007"]


@pytest.mark.parametrize(
    ("decorators", "said"),
    [
        ("", "ckpt_wrap/test_a.py:2 test_a has no @requirement"),
        ('@requirement("CW-001")\n', "test_a checks CW-001, which no case declares"),
        (f"{text_of('MT-001')}\n", "requirement MT-001 is of mod-tracker, but the case"),
        ('@requirement("CW-001", profile="x")\n', "CW-001: its first case gives the text"),
        ("@requirement()\n", "requirement None: an id is a prefix of"),
        (text_of("CW-001")[:-1] + ', levle="")\n', "unexpected keyword argument 'levle'"),
        ('@requirement("CW-001", "It MUST.", "CW-002")\n', "requirement takes one id and its text"),
        ("@requirement(ID)\n", "'ID' is not a literal"),
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
    one = f"{HEAD}{text_of('CW-001')}\ndef test_a(part): ...\n"
    root = write(test_a=one, test_b=one.replace("test_a", "test_b"))
    with pytest.raises(RegistryError, match="CW-001 is declared twice, by ckpt_wrap"):
        load_registry(root)


def test_all_source_tests_are_traced():
    by_area = {area: sum(of == area for of, _ in source_tests()) for area in AREAS}
    assert by_area == {"ckpt-wrap": 7, "mod-tracker": 4, "flat-param": 11, "sac-policies": 28}
    lines, problems = trace()
    assert (len(lines), problems) == (50, [])


def _documentation(name):
    module, _, words = name.rpartition(".")
    while True:
        try:
            found = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, word = module.rpartition(".")
            words = f"{word}.{words}"
    for word in words.split("."):
        found = getattr(found, word)
    return " ".join((found.__doc__ or "").split())


def test_core_has_what_tests_or_documentation_of_torch_say():
    """Its sources are tests of PyTorch, or documented objects whose words are quoted."""
    core = [r for r in load_registry().values() if r.profile == "core"]
    of_tests = [r.id for r in core if (r.area, r.source) in source_tests()]
    documented = [r for r in core if r.is_documented]
    assert len(core) == len(of_tests) + len(documented) > 70
    assert [r.id for r in documented if r.quote not in _documentation(r.source)] == []


def test_lost_and_invented_source_tests_are_named(write):
    source = text_of("CW-001")
    invented = text_of("CW-002").replace("test_fqn", "test_of_nobody")
    root = write(
        test_a=f"{HEAD}{source}\ndef test_a(part): ...\n{invented}\ndef test_b(part): ...\n"
    )
    lines, problems = trace(root)
    assert "test_checkpoint_wrapper.py::" in lines[5]
    assert "test_fqn -> CW-001 -> ckpt_wrap/test_a.py::test_a" in lines[5]
    assert len(problems) == 50
    assert (
        problems[-1] == "CW-002 names test_of_nobody, which is not a test of PyTorch for ckpt-wrap"
    )


def test_every_area_has_requirements_and_every_case_a_docstring():
    assert {r.area for r in load_registry().values()} == set(AREAS)
    assert [case.name for case in find_cases() if not case.text] == []


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


# Names with an underscore that torch documents for extensions, or that have no public alternative.
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
