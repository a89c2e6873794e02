"""Cases run in any order that is asked for, and no outcome depends on it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from torchparts_conformance._errors import OptionError
from torchparts_conformance.report import _report
from torchparts_conformance.run import _order


@pytest.mark.parametrize("order", ["reversed", "seed:1", "seed:2"])
def test_two_runs_in_any_order_have_one_digest(suite, order):
    """Neither time nor order is in the digest, and the order is really another one."""
    suite.write("cases/conftest.py", NOTE_ORDER)
    suite.run()
    first, listed = suite.report(), (suite.root / "order").read_text().split()
    suite.run("--order", order)
    shuffled = (suite.root / "order").read_text().split()[len(listed) :]
    assert suite.report()["digest"] == first["digest"]
    assert shuffled != listed
    assert sorted(shuffled) == sorted(listed)


NOTE_ORDER = """
def pytest_runtest_call(item):
    with open("order", "a") as file:
        file.write(item.name + " ")
"""


@pytest.mark.nightly
def test_real_area_in_two_shuffled_orders_has_one_digest(tmp_path):
    """No case of the tracker's area depends on what ran before it."""
    digests = {_digest_of(tmp_path / order[-1], order) for order in ("seed:1", "seed:2")}
    assert len(digests) == 1


def _digest_of(folder, order):
    command = [sys.executable, "-m", "torchparts_conformance", "run", "--impl", "ours"]
    options = ["--area", "mod-tracker", "--profile", "core,robust,queries,reports"]
    command += [*options, "--order", order, "--out", str(folder)]
    subprocess.run(command, capture_output=True, timeout=300, check=False)
    report = _report.read(folder / "report.json")
    assert {row["outcome"] for row in report["rows"]} == {"pass", "not_claimed"}
    return report["digest"]


def test_listed_and_reversed_are_what_they_say():
    """As a list of its own."""
    items = [1, 2, 3]
    listed = _order.ordered(items, "listed")
    assert listed == items
    assert listed is not items
    assert _order.ordered(items, "reversed") == [3, 2, 1]
    assert items == [1, 2, 3]


def test_seed_decides_the_order_and_loses_nothing():
    """The same seed gives the same order, another one another."""
    items = list(range(50))
    first, again, other = (_order.ordered(items, f"seed:{seed}") for seed in (7, 7, 8))
    assert first == again
    assert first != items
    assert first != other
    assert sorted(first) == items


@pytest.mark.parametrize("order", ["", "random", "seed:", "seed:-1", "seed:1 ", "seed:1234567890"])
def test_unknown_order_is_refused(order):
    """With the orders that are known."""
    with pytest.raises(OptionError, match="is unknown, but listed, reversed and seed:N are known"):
        _order.ordered([1], order)
