"""What is published follows from the published reports, and these can be believed."""

from __future__ import annotations

import json
import re

import pytest

from torchparts_conformance.commands import _cli
from torchparts_conformance.report import _report
from torchparts_conformance.verify import _installed, _publish

MAX_REPORT_BYTES = 1 << 18


@pytest.fixture
def docs(package):
    """Give the folder of the suite's pages."""
    return package.parents[2] / "docs" / "conformance"


def test_what_is_published_can_be_verified_and_follows_from_the_reports(docs):
    """Every committed report is believed, and badges and matrix are those it gives."""
    assert _publish.drift(docs) == []


def test_published_reports_are_small_and_name_no_machine(docs):
    """A report has no folder of the machine it was made on, and is bounded in size."""
    paths = _publish.published_reports(docs)
    assert {"ours.json", "torch.json"} <= {path.name for path in paths}
    for path in paths:
        text = path.read_text(encoding="utf-8")
        assert len(text) < MAX_REPORT_BYTES
        assert re.findall(r"(?<![\w:/.<])/(?:[\w.+@-]+/)+", text) == []
        assert "localhost" not in text


def test_our_published_badges_are_green(docs):
    """Ours is conformant in every area and profile, and says on which device."""
    badges = [json.loads(path.read_text()) for path in sorted((docs / "badges").glob("*.json"))]
    assert len(badges) == 5
    assert {badge["color"] for badge in badges} == {"brightgreen"}
    assert all(badge["message"].endswith("| cpu") for badge in badges)


def test_every_failure_of_others_has_a_line_and_a_script(docs):
    """What somebody else's implementation is said to do wrong can be seen without the suite."""
    page = (docs / "third-party-failures.md").read_text(encoding="utf-8")
    lost = []
    for path in _publish.published_reports(docs):
        if path.stem in ("ours", "torch"):
            continue
        report = json.loads(path.read_text(encoding="utf-8"))
        failed = {row["id"] for row in report["rows"] if row["outcome"] in ("fail", "error")}
        section = page.partition(f"\n## {report['implementation']['name']}\n")[2]
        section = section.partition("\n## ")[0]
        told = set(re.findall(r"[A-Z]{2}-\d{3}", section))
        lost += [(path.stem, id) for id in sorted(failed ^ told)]
    assert lost == []


@pytest.fixture
def published(make_report, registry, frozen, tmp_path, monkeypatch):
    """Publish two made-up reports; gives the folder."""
    monkeypatch.setattr(_installed._manifest, "load_manifest", lambda: frozen)
    monkeypatch.setattr(_installed, "load_registry", lambda: registry)
    reports = []
    for name, outcomes in (("other", {"CW-001": "fail"}), ("mine", {})):
        report = make_report(outcomes, name=name)
        report["implementation"]["adapter"] = "ours" if name == "mine" else "their.module:impl"
        path = tmp_path / f"{name}.json"
        path.write_text(_report.to_text(_resealed(report)))
        reports.append(str(path))
    assert _cli.main(["publish", str(tmp_path / "docs"), *reports]) == 0
    return tmp_path / "docs"


def _resealed(report):
    report = {**report, "digest": _report.digest(report)}
    return {**report, "seal": _report.seal(report)}


def test_first_report_is_ours_and_has_the_badges(published):
    """Ours comes first whatever the order given; a report is named by its adapter."""
    names = [path.name for path in _publish.published_reports(published)]
    assert names == ["ours.json", "their-module-impl.json"]
    lines = (published / "matrix.md").read_text().splitlines()
    head = next(line for line in lines if line.startswith("| profile"))
    assert head.index("mine") < head.index("other")
    assert "brightgreen" in (published / "badges" / "badge-ckpt-wrap.json").read_text()
    assert _cli.main(["publish", str(published), "--check"]) == 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("matrix.md", "matrix.md does not follow from the reports"),
        ("matrix.html", "matrix.html does not follow from the reports"),
        ("badges/badge-ckpt-wrap.svg", "badge-ckpt-wrap.svg does not follow from the reports"),
        ("badges/badge-combined.svg", "badge-combined.svg belongs to no report"),
    ],
)
def test_edited_file_is_noticed(published, capsys, name, said):
    """A page or badge that was edited by hand, or that nobody made, is named."""
    (published / name).write_text("edited")
    assert _cli.main(["publish", str(published), "--check"]) == 1
    assert said in capsys.readouterr().err


def test_edited_report_is_noticed(published, capsys):
    """A report that was edited by hand is not believed, and the reason is said."""
    path = published / "reports" / "their-module-impl.json"
    path.write_text(path.read_text().replace('"outcome":"fail"', '"outcome":"pass"'))
    assert _cli.main(["publish", str(published), "--check"]) == 1
    assert "their-module-impl.json: the seal does not match" in capsys.readouterr().err


def test_publishing_takes_reports_or_checks(tmp_path, capsys):
    """Neither both nor none."""
    assert _cli.main(["publish", str(tmp_path)]) == 4
    assert "publish: reports and --check were both or neither given, but" in capsys.readouterr().err
    assert _cli.main(["publish", str(tmp_path), "--check"]) == 1
    assert "reports holds no report" in capsys.readouterr().err


def test_reports_are_named_by_adapter_and_devices(make_report):
    """Not by the CPU alone; whatever else is in an adapter's address is a dash."""
    cpu, both = make_report(), make_report(devices=("cpu", "cuda"))
    assert _publish.name_of(cpu) == "mine-adapter"
    assert _publish.name_of(both) == "mine-adapter-cpu-cuda"
    cpu["implementation"]["adapter"] = "::"
    assert _publish.name_of(cpu) == "report"


def test_shipped_adapters_come_in_their_order_and_others_after_them(make_report):
    """The others by name."""
    reports = []
    for adapter in ("zebra:impl", "torch", "apple:impl", "ours"):
        reports.append(make_report())
        reports[-1]["implementation"]["adapter"] = adapter
    found = [each["implementation"]["adapter"] for each in sorted(reports, key=_publish._place)]
    assert found == ["ours", "torch", "apple:impl", "zebra:impl"]


def test_what_is_replaced_is_kept_and_drawn(published, make_report, registry, tmp_path):
    """A report on another torch takes the place of one, which is kept for the trend."""
    report = make_report(name="mine")
    report["implementation"]["adapter"] = "ours"
    report["environment"]["torch"] = "2.15.0"
    path = tmp_path / "newer.json"
    path.write_text(_report.to_text(_resealed(report)))
    assert _cli.main(["publish", str(published), str(path)]) == 0
    kept = sorted(path.name for path in (published / "past").iterdir())
    assert kept == [
        "ours-1.0-suite-0.1.0-torch-2.13.json",
        "their-module-impl-1.0-suite-0.1.0-torch-2.13.json",
    ]
    assert (
        "| suite 0.1.0, torch 2.13 | suite 0.1.0, torch 2.15 |"
        in (published / "trend.md").read_text()
    )
    assert _cli.main(["publish", str(published), "--check"]) == 0
    (published / "review.md").write_text("edited")
    (published / "trend.md").write_text("edited")
    assert _cli.main(["publish", str(published), "--check"]) == 1


def test_past_reports_are_small_and_name_no_machine(docs):
    """As those that are published."""
    paths = sorted((docs / "past").glob("*.json"))
    assert paths
    for path in paths:
        text = path.read_text(encoding="utf-8")
        assert len(text) < MAX_REPORT_BYTES
        assert re.findall(r"(?<![\w:/.<])/(?:[\w.+@-]+/)+", text) == []
