"""The requirements: the shipped ones keep their rules, and broken ones are refused by name."""

from __future__ import annotations

import ast

import pytest
from packaging.version import Version

import torchparts_conformance
from torchparts_conformance import PROTOCOL, Implementation, requirement
from torchparts_conformance._errors import AdapterError, RegistryError
from torchparts_conformance.requirements import _registry, _traceability
from torchparts_conformance.requirements._cases import cases_by_id, find_cases

GOOD = {
    "level": '"MUST"',
    "profile": '"core"',
    "devices": '["cpu"]',
    "since": '"0.1.0"',
    "text": '"It MUST."',
    "source": '"none"',
    "rationale": '"why"',
}


def _written(tmp_path, entry, id="CW-001"):
    lines = [f"[{id}]", *(f"{key} = {value}" for key, value in entry.items())]
    (tmp_path / "ckpt_wrap.toml").write_text("\n".join(lines))
    return tmp_path


def test_good_entry_is_read(tmp_path):
    """An entry with all its keys becomes a requirement."""
    (found,) = _registry.load_area("ckpt-wrap", spec=_written(tmp_path, GOOD))
    assert (found.id, found.level, found.devices) == ("CW-001", "MUST", ("cpu",))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"level": '"SHALL"'}, "has level 'SHALL', but levels are MUST, SHOULD, MAY"),
        ({"level": '"MAY"'}, "does not say MAY in its text"),
        ({"devices": "[]"}, r"has devices \[\]"),
        ({"devices": '["cuda:0"]'}, "but devices are words"),
        ({"profile": '"Core Stuff"'}, "but a profile is a short lower-case word"),
        ({"text": '""'}, r"has no text in \['text'\]"),
        ({"source": '"somewhere"'}, "but a source is file.py::Class::test or none"),
        ({"colour": '"red"'}, r"has \['colour'\], but no such key exists"),
        ({"since": None}, r"lacks \['since'\]"),
        ({"rationale": '"torchh#7 says so"'}, "in which 'torchh#7' is no address, but those read"),
        ({"rationale": None}, "has neither source nor rationale"),
    ],
)
def test_bad_entry_is_refused_by_id(tmp_path, changes, said):
    """A broken rule is named with the id and the file."""
    entry = {key: value for key, value in {**GOOD, **changes}.items() if value is not None}
    with pytest.raises(RegistryError, match=rf"ckpt_wrap.toml: CW-001 .*{said}"):
        _registry.load_area("ckpt-wrap", spec=_written(tmp_path, entry))


def test_no_requirement_is_newer_than_the_suite():
    """`since` is the version of the suite that brought it."""
    suite = Version(torchparts_conformance.__version__)
    newer = {id: r.since for id, r in _registry.load_registry().items() if Version(r.since) > suite}
    assert newer == {}


def test_foreign_id_is_refused(tmp_path):
    """An id has the prefix of its area and three digits."""
    with pytest.raises(RegistryError, match="MT-001 is not an id of ckpt-wrap"):
        _registry.load_area("ckpt-wrap", spec=_written(tmp_path, GOOD, id="MT-001"))


def test_broken_toml_is_refused(tmp_path):
    """A file that is not TOML is named."""
    (tmp_path / "ckpt_wrap.toml").write_text("[CW-001")
    with pytest.raises(RegistryError, match=r"ckpt_wrap\.toml: .* requirements are TOML"):
        _registry.load_area("ckpt-wrap", spec=tmp_path)


def test_every_requirement_has_a_case_and_every_case_a_requirement():
    """Nothing is required without being checked, and nothing is checked without being required."""
    registry, cases = _registry.load_registry(), cases_by_id()
    assert sorted(set(registry) - set(cases)) == []
    assert sorted(set(cases) - set(registry)) == []


def test_every_case_stays_in_its_area_and_says_what_it_claims():
    """A case checks requirements of its own folder, and has a sentence that says so."""
    registry = _registry.load_registry()
    strays = [c.name for c in find_cases() for id in c.ids if registry[id].area != c.area]
    silent = [case.name for case in find_cases() if not case.text]
    assert strays == []
    assert silent == []


def test_all_source_tests_are_traced():
    """All 49 source tests became requirements with cases, and no requirement invents a source."""
    registry = _registry.load_registry()
    sources = _traceability.source_tests()
    by_area = {area: sum(s.area == area for s in sources) for area in _registry.PARTS}
    assert by_area == {"ckpt-wrap": 7, "mod-tracker": 4, "flat-param": 10, "sac-policies": 28}
    assert (
        _traceability.problems(_traceability.trace(sources, registry, cases_by_id()), registry)
        == []
    )


def test_trace_notices_a_lost_source_test():
    """Without its requirement, a source test is reported as lost."""
    (source, *_) = _traceability.source_tests()
    (problem,) = _traceability.problems(_traceability.trace([source], {}, {}), {})
    assert problem == f"{source.key} has no requirement"


# Names with an underscore that torch documents as the way to extend it, or that have no other.
EXTENSION_POINTS = (
    "torch.Tensor._make_wrapper_subclass",
    "torch._dynamo.reset",
    "torch._subclasses.FakeTensorMode",
    "torch._subclasses.fake_tensor.FakeTensorMode",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._pytree.tree_map_only",
)


def test_suite_names_no_private_torch_outside_one_file(package):
    """Only the adapter of torch itself knows where torch keeps its private parts."""
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


def test_cases_import_only_what_everybody_has(package):
    """Cases use torch, pytest, the standard library and the suite; never an implementation."""
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


def test_requirement_needs_an_id():
    """A case without an id would check nothing that anybody asked for."""
    with pytest.raises(ValueError, match="no id given, but a case checks at least one"):
        requirement()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"protocol": "2"}, "protocol '2' is not spoken here"),
        ({"name": ""}, "name '' is unusable"),
        ({"version": "1" * 101}, "but 1 to 100 characters are needed"),
        ({"parts": {"wheels": 1}}, r"parts names \['wheels'\]"),
        ({"capabilities": {"wheels": set()}}, r"capabilities names \['wheels'\]"),
        ({"parts": 5}, "parts is of type int, but it goes from area to value"),
        ({"parts": {5: 1}}, r"parts names \[5\]"),
        ({"capabilities": {"ckpt-wrap": "compile"}}, "is 'compile', but a set of names is needed"),
        ({"capabilities": {"ckpt-wrap": {5}}}, r"is \{5\}, but a set of names is needed"),
        ({"distributions": "mine"}, "distributions is no tuple"),
        ({"distributions": ("../mine",)}, "distributions has '../mine', but a distribution is"),
        ({"distributions": (5,)}, "distributions has 5, but a distribution is"),
        ({"distributions": ("mine",) * 21}, "distributions holds 21, but 20 is the most"),
    ],
)
def test_bad_adapter_is_refused(changes, said):
    """An adapter is checked when it is made."""
    with pytest.raises(AdapterError, match=said):
        Implementation(**{"name": "mine", "version": "1", "protocol": PROTOCOL, **changes})
