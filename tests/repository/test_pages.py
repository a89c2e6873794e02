"""Pages match the source: messages, public names, and a self-contained site."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[2]
TROUBLE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
PARTS = {"ckpt-wrap", "flat-param", "mod-tracker", "sac-policies"}
# Messages that torch raises in C++, or that another program prints.
ELSEWHERE = {
    "CUDA out of memory",
    "Trying to backward through the graph a second time",
    "element 0 of tensors does not require grad and does not have a grad_fn",
    "one of the variables needed for gradient computation has been modified by an inplace "
    "operation",
    "Expected to mark a variable ready only once",
    "error: externally-managed-environment",
    "'weight' must be 2-D",
}
FILES_OF_TORCH = [
    "utils/checkpoint.py",
    "distributed/fsdp/_flat_param.py",
    "nn/modules/module.py",
    "optim/optimizer.py",
]


GUIDES = [
    "out-of-memory",
    "one-gpu",
    "many-gpus",
    "long-context",
    "moe",
    "compile",
    "find-modules",
    "plan-memory",
    "migrate",
]
REPLACED = {"fairscale", "torchtune"}  # shown on a page as the code before


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"tools/site/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    """Import the hook of mkdocs."""
    return script("pages")


def headings(section: str) -> list[str]:
    """Return the explained messages of one section."""
    _, _, rest = TROUBLE.partition(f"\n## Messages of {section}\n")
    part = rest.partition("\n## ")[0]
    return [found.strip("` ") for found in re.findall(r"^### (.+)$", part, re.MULTILINE)]


def is_said(heading: str, text: str) -> bool:
    """Whether the pieces of a heading occur in a text, in order."""
    pieces = map(re.escape, filter(None, heading.split("…")))
    return re.search(".*".join(pieces), text, re.DOTALL) is not None


@pytest.mark.parametrize("part", sorted(PARTS))
def test_explained_messages_are_those_of_the_source(part: str, pages: ModuleType) -> None:
    """If a message changes, its heading must change, too."""
    said = [message.text for message in pages.messages(part.replace("-", "_"))]
    found = headings(part)
    assert len(found) >= 3
    assert [head for head in found if not any(is_said(head, text) for text in said)] == []


def test_explained_messages_of_torch_are_torchs() -> None:
    """Messages that torch raises in Python are in the installed torch."""
    root = Path(torch.__file__).parent
    text = "\n".join((root / file).read_text(encoding="utf-8") for file in FILES_OF_TORCH)
    joined = re.sub(r'"\s*\n\s*f?"', "", text)
    found = headings("torch")
    assert set(found) >= ELSEWHERE
    assert [h for h in found if h not in ELSEWHERE and not is_said(h, joined)] == []


def test_messages_that_torch_writes_in_its_own_core() -> None:
    """Four of them can be reproduced here."""
    weight = torch.ones(2, requires_grad=True)
    loss = weight.square().sum()
    loss.backward()
    changed = weight.exp()
    late = changed.sum()
    with torch.no_grad():
        changed += 1
    attempts = {
        "Trying to backward through the graph a second time": loss.backward,
        "element 0 of tensors does not require grad and does not have a grad_fn": (
            torch.ones(()).backward
        ),
        "has been modified by an inplace operation": late.backward,
        "'weight' must be 2-D": lambda: torch.nn.functional.embedding(torch.arange(2), weight),
    }
    for sentence, attempt in attempts.items():
        with pytest.raises(RuntimeError, match=sentence):
            attempt()
        assert any(sentence in head for head in headings("torch"))


@pytest.mark.parametrize("part", sorted(PARTS))
def test_messages_and_names_are_found_in_the_source(part: str, pages: ModuleType) -> None:
    """Many messages, none twice; every public name has a location and a heading."""
    package = part.replace("-", "_")
    texts = [message.text for message in pages.messages(package)]
    assert len(texts) > 10 and len(set(texts)) == len(texts)
    whole = "\n".join(texts) + "\n"  # a part of a concatenated string is not a message
    assert [text for text in texts if whole.count(f"\n{text}") > 1 or " " not in text] == []
    names = pages.public_names(package)
    own = [name for name in names if "." not in name]
    assert set(own) == set(importlib.import_module(package).__all__) - {"__version__"}
    for name in set(names) - set(own):
        module, _, inner = name.rpartition(".")
        assert inner in importlib.import_module(f"{package}.{module}").__all__
    page = (ROOT / f"docs/{part}/api.md").read_text(encoding="utf-8")
    entries = pages.on_page_markdown(page, config={"repo_url": "https://example.org/r/"})
    shown = re.findall(r"^::: (.+)$", entries, re.MULTILINE)
    assert sorted(shown) == sorted(f"{package}.{name}" for name in names)
    assert entries.count("](https://example.org/r/blob/main/packages/") == len(names)
    listed = re.findall(r"^\| \[`[\w.]+`\]\(#([\w.]+)\) \| (.*) \|$", entries, re.MULTILINE)
    assert [name for name, _ in listed] == shown
    main = re.findall(rf"^<!-- names of {package}: (.+) -->$", page, re.MULTILINE)[0].split(", ")
    assert shown[: len(main)] == [f"{package}.{name}" for name in main]
    assert [name for name, said in listed if name.rpartition(".")[2] in main and not said] == []


@pytest.mark.parametrize("part", sorted(PARTS))
def test_public_name_is_located_where_its_object_is_made(part: str, pages: ModuleType) -> None:
    """Several files may define one name; the page shows the one that the package imports."""
    package = part.replace("-", "_")
    located = {name: pages.definition(package, name).path for name in pages.public_names(package)}
    made: dict[str, str] = {}
    for name in located:
        module, _, last = f"{package}.{name}".rpartition(".")
        found = getattr(importlib.import_module(module), last)
        if inspect.isclass(found) or inspect.isfunction(found):
            file = inspect.getsourcefile(inspect.unwrap(found))
            assert file is not None
            made[name] = Path(file).as_posix()
    assert len(made) > 10
    assert [name for name, file in made.items() if not file.endswith(located[name])] == []


def test_main_name_that_a_package_lacks_is_an_error(pages: ModuleType) -> None:
    """Otherwise a renamed function would be missing from the top of its page."""
    with pytest.raises(LookupError, match="checkpoint_all_"):
        pages.ordered_names("ckpt_wrap", ["checkpoint_all_"])


def test_readme_is_the_home_page(pages: ModuleType) -> None:
    """Links lead to pages of the site, or to the repository if its address is known."""
    home = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    unknown = pages.on_page_markdown(home, config={})
    assert "](docs/" not in unknown and "](out-of-memory.md)" in unknown
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", unknown)
    assert targets
    assert [name for name in targets if not (ROOT / "docs" / name).exists()] == []
    page = pages.on_page_markdown(home, config={"repo_url": "https://example.org/r/"})
    assert "](https://example.org/r/blob/main/CONTRIBUTING.md)" in page


def test_tables_align_numbers_and_show_bars_in_code(pages: ModuleType) -> None:
    """A column of numbers is aligned to the right; text and given alignments stay."""
    table = (
        "| way | ms | note |\n|---|---|:-:|\n| `a \\| b` | 1,024.5 | 3 |\n| c | **2** to 3 | 4 |\n"
    )
    shown = pages.tables(f"text\n\n{table}\nmore")
    assert "|---|---:|:-:|" in shown
    assert "| <code>a &#124; b</code> | 1,024.5 | 3 |" in shown
    words = "| a | b |\n|---|---|\n| 1 | two |\n| x | 2 |\n"
    assert pages.tables(words) == words


def code_of(page: str) -> list[str]:
    """Return the Python blocks of a page that readers see."""
    return re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("guide", GUIDES)
def test_install_line_of_a_guide_names_its_imports(guide: str) -> None:
    """A reader who installs what the page says can run each of its blocks."""
    page = (ROOT / f"docs/{guide}.md").read_text(encoding="utf-8")
    installed = re.findall(r"`python -m pip install ([^`]+)`", page)[0].replace("-", "_").split()
    nodes = [node for code in code_of(page) for node in ast.walk(ast.parse(code))]
    plain = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    origins = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    imported = {name.partition(".")[0] for name in (*plain, *origins)}
    assert imported - sys.stdlib_module_names - REPLACED - {"torch"} - set(installed) == set()


@pytest.mark.parametrize("part", sorted(PARTS))
def test_page_of_a_package_begins_with_its_readme(part: str, pages: ModuleType) -> None:
    """Links are relative to the package's folder on the site."""
    page = (ROOT / f"docs/{part}/manual.md").read_text(encoding="utf-8")
    shown = pages.on_page_markdown(page, config={})
    assert f"\n# {part}\n" in shown and "<!-- README" not in shown
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", shown)
    assert [name for name in targets if not (ROOT / "docs" / part / name).exists()] == [
        name
        for name in targets
        if "conformance/spec-" in name  # made by the build
    ]


def test_message_that_nobody_says_is_noticed() -> None:
    assert is_said("a … c", "a b c")
    assert not is_said("a … d", "a b c")


GOOD = "<html><head><title>{title} - torchparts</title></head><body>{body}</body></html>"


def test_site_that_asks_another_server_is_refused(tmp_path: Path) -> None:
    """Fonts, scripts and pictures from elsewhere are reported; ordinary links are allowed."""
    check = script("check_site")
    link = '<a href="https://example.org">there</a>'
    (tmp_path / "a.html").write_text(GOOD.format(title="A", body=link))
    (tmp_path / "b.html").write_text(GOOD.format(title="B", body='<img src="x.png">'))
    assert list(check.foreign_requests(tmp_path)) == []
    assert list(check.repeated_titles(tmp_path)) == []
    (tmp_path / "c.html").write_text(
        GOOD.format(title="A", body='<script src="https://cdn.example.org/x.js"></script>')
    )
    asking = '<a data-md-component="source" href="https://example.org">'
    (tmp_path / "e.html").write_text(GOOD.format(title="E", body=asking))
    (tmp_path / "d.css").write_text('@font-face { src: url("https://fonts.example.org/f.woff") }')
    assert list(check.foreign_requests(tmp_path)) == [
        "c.html asks https://cdn.example.org/x.js",
        "d.css asks https://fonts.example.org/f.woff",
        "e.html asks the repository's server for its facts",
    ]
    assert list(check.repeated_titles(tmp_path)) == ["'A - torchparts' is the title of 2 pages"]


def test_changelogs_are_on_the_page_of_releases(pages: ModuleType) -> None:
    """All five, with headings one level below the name of the distribution."""
    page = (ROOT / "docs/releases.md").read_text(encoding="utf-8")
    shown = pages.on_page_markdown(page, config={})
    assert shown.count("\n### 0.1.0") == len(PARTS) + 1
    assert "<!-- changes" not in shown


def test_look_at_the_site_says_when_it_was_not_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a browser's library it fails, so that "not run" is not taken for a pass."""
    monkeypatch.setitem(sys.modules, "axe_playwright_python", None)
    look = script("look_at_site")
    assert look.main("site") == 1
    assert look.main("--probe") == 0
    assert capsys.readouterr().out.count("not run: ") == 2


def test_names_that_the_site_lacks_are_named(tmp_path: Path) -> None:
    """Every public name has an anchor, and private names have none."""
    check = script("check_site")
    page = tmp_path / "api.html"
    page.write_text('<h3 id="ckpt_wrap.unwrap">x</h3><h3 id="ckpt_wrap._hidden">x</h3>')
    found = list(check.wrong_names(page, "ckpt_wrap", ["unwrap", "checkpoint_"]))
    assert found == ["ckpt_wrap.checkpoint_ has no entry", "ckpt_wrap._hidden is private"]


def test_words_that_no_reader_can_look_up_are_named(tmp_path: Path) -> None:
    """Private names in signatures; the source itself may have them."""
    check = script("check_site")
    page = tmp_path / "api.html"
    page.write_text(
        '<div class="language-python doc-signature highlight">f(x: <a>_Kind</a>, y="_z")</div>'
        "<code>_example</code><details>_hidden</details>"
    )
    (found,) = check.inner_words(page)
    assert found.endswith("""/api.html has _Kind in f(x: _Kind, y="_z")""")
