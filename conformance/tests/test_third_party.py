"""What the page of others' failures says happens, where the library is installed."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
from pathlib import Path

import pytest

from torchparts_conformance.subject import _adapters
from torchparts_conformance.subject._adapters import SHIPPED

Nursery = runpy.run_path(str(Path(__file__).with_name("nursery.py")))["Nursery"]
PAGE = Path(__file__).parents[2] / "docs" / "conformance" / "third-party-failures.md"
MODULES = {
    "fairscale": "fairscale",
    "DeepSpeed": "deepspeed",
    "transformers": "transformers",
    "Lightning": "lightning",
    "torchtitan": "torchtitan",
    "torch-remat": "torch_remat",
    "torch fully_shard": "torch",
    "torch FullyShardedDataParallel": "torch",
    "torch tools": "torch",
    "torch profiler": "torch",
    "torch activation_memory_budget": "torch",
}
MOST_LINES = 10


def _scripts():
    """Give library, ids and script of each entry of the page."""
    text = PAGE.read_text(encoding="utf-8")
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        name = section.partition("\n")[0]
        entries = re.findall(
            r"^([A-Z]{2}-\d[^:]*): [^\n]+\n\n```python\n(.*?)```", section, re.M | re.S
        )
        assert len(entries) == section.count("```python")
        yield from ((name, ids, script) for ids, script in entries)


SCRIPTS = list(_scripts())


def _lines(script):
    return len([line for line in script.splitlines() if line.strip()])


def test_scripts_are_short_and_need_nothing_of_the_suite():
    """Ten lines that are not empty, an assertion, one entry for each library's requirement."""
    assert {name for name, _, _ in SCRIPTS} == set(MODULES)
    assert [ids for _, ids, script in SCRIPTS if _lines(script) > MOST_LINES] == []
    assert [ids for _, ids, script in SCRIPTS if "assert" not in script] == []
    assert "import torchparts" not in PAGE.read_text(encoding="utf-8")
    ids = [(name, id) for name, several, _ in SCRIPTS for id in several.split(", ")]
    assert len(ids) == len(set(ids))


@pytest.fixture(scope="module")
def nursery():
    """Give what has imported the rooms of torch that the scripts are about."""
    found = Nursery("-c", "import torch._dynamo, torch.distributed.fsdp, torch.distributed._tools")
    yield found
    found.close()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ids", "script"), SCRIPTS, ids=[ids for _, ids, _ in SCRIPTS])
def test_script_shows_what_the_page_says(nursery, name, ids, script, tmp_path):
    """Its assertions hold."""
    if importlib.util.find_spec(MODULES[name]) is None:
        pytest.skip(f"{name} is not installed")
    path, said = tmp_path / "shown.py", tmp_path / "said"
    path.write_text(script, encoding="utf-8")
    assert nursery.run(str(path), said=said) == 0, said.read_text()[-2000:]


JUDGED = PAGE.with_name("judged.md")


def _judged():
    """Give the cells of each row of who is judged, by the name that it is published as."""
    table = JUDGED.read_text(encoding="utf-8").partition("\n## ")[0]
    rows = [re.split(r" \| ", line[2:-2]) for line in table.splitlines() if line.startswith("| ")]
    return {cells[0]: cells[1:] for cells in rows[1:]}


def test_every_published_implementation_has_a_line_that_says_how_it_was_checked():
    """What is judged, what not, and how we know that its authors would accept it."""
    names = {
        json.loads(path.read_text(encoding="utf-8"))["implementation"]["name"]
        for path in sorted((PAGE.parent / "reports").glob("*.json"))
    }
    rows = _judged()
    assert names - rows.keys() == set()
    for name, cells in rows.items():
        assert len(cells) == 3, name
        assert len(cells[2].split()) >= 20, f"{name}: says little of how it was checked"
    checks = [cells[2] for cells in rows.values()]
    assert len(set(checks)) == len(checks)


def test_every_shipped_adapter_has_a_line():
    """Also before its report is published."""
    known = {"ours": "torchparts", "deepspeed": "DeepSpeed", "torch-tools": "torch tools"}
    known |= {"torch-profiler": "torch profiler", "lightning": "Lightning"}
    known |= {"torch-budget": "torch activation_memory_budget"}
    known |= {"fsdp1": "torch FullyShardedDataParallel", "fsdp2": "torch fully_shard"}
    assert {known.get(name, name) for name in SHIPPED} == _judged().keys()


def test_adapters_are_short_enough_to_be_read():
    """As the page promises: at most about a hundred lines each."""
    folder = Path(_adapters.__file__).parents[1] / "adapters"
    lines = {path.name: len(path.read_text().splitlines()) for path in folder.glob("*.py")}
    assert {name: n for name, n in lines.items() if n > 101} == {}
