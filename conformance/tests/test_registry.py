"""The requirements: the shipped ones keep their rules, and broken ones are refused by name."""

from __future__ import annotations

import ast

import pytest
from packaging.version import Version

import torchparts_conformance
from torchparts_conformance._errors import RegistryError
from torchparts_conformance.requirements import _registry

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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('profile = "core"\ngroup = "none"', "has group 'none', but groups are a, b"),
        ('profile = "speed"\ngroup = "c"', "has group 'c', but groups are a, b"),
    ],
)
def test_group_that_is_none_is_refused(tmp_path, text, said):
    """By the requirement and the file."""
    entry = 'level = "MUST"\ndevices = ["cpu"]\nsince = "0.1.0"\ntext = "It MUST."\n'
    more = f'source = "none"\nrationale = "why"\n{text}\n'
    path = tmp_path / "ckpt_wrap.toml"
    path.write_text(f'[groups]\na = "One."\nb = "Two."\n[CW-001]\n{entry}{more}')
    with pytest.raises(RegistryError, match=said):
        _registry.load_area("ckpt-wrap", spec=tmp_path)
    path.write_text(f"groups = 3\n[CW-001]\n{entry}{more}")
    with pytest.raises(RegistryError, match="groups is 3, but it goes to sentences"):
        _registry.load_area("ckpt-wrap", spec=tmp_path)


def test_requirement_without_a_group_is_of_the_first():
    """So that a new one is asked of whoever has the area's first part."""
    (first,) = {r.group for r in _registry.load_area("ckpt-wrap") if r.id == "CW-001"}
    assert first == next(iter(_registry.load_groups("ckpt-wrap"))) == "wrapping"
    assert {r.group for r in _registry.load_area("sac-policies")} == {""}


def test_capability_is_divided_where_it_says_so(tmp_path):
    """It has the group that it names; one that names none is of none."""
    entry = 'level = "MUST"\ndevices = ["cpu"]\nsince = "0.1.0"\ntext = "It MUST."\n'
    more = f'{entry}profile = "speed"\nsource = "none"\nrationale = "why"\n'
    path = tmp_path / "ckpt_wrap.toml"
    path.write_text(f'[groups]\na = "One."\n[CW-001]\n{more}group = "a"\n[CW-002]\n{more}')
    assert [r.group for r in _registry.load_area("ckpt-wrap", spec=tmp_path)] == ["a", ""]


def test_reports_are_divided_whole():
    """Every requirement of the profile is of a group, and none of another profile is of these."""
    area = _registry.load_area("mod-tracker")
    reports = {r.group for r in area if r.profile == "reports"}
    assert reports == {
        *("counting", "splitting", "watching", "memory", "holding", "time", "trace", "writing"),
    }
    assert not reports & {r.group for r in area if r.profile != "reports"}
