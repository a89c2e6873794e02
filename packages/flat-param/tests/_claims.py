"""Tests of a file that lists as CLAIMS what a worker checks on several ranks.

The file has a fixture `results`: of each rank, what each `check_<claim>` of the worker said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest


def holds_on_every_rank(claims: Sequence[str]) -> Callable[..., None]:
    """The test that each of the claims holds on every rank."""

    @pytest.mark.dist
    @pytest.mark.slow
    @pytest.mark.parametrize("claim", claims)
    def test(results: list[dict[str, str]], claim: str) -> None:
        """Each `check_<claim>` of the worker passes on all ranks."""
        for rank, result in enumerate(results):
            assert not result[claim], f"rank {rank}: {result[claim]}"

    return test


def all_are_listed(claims: Sequence[str]) -> Callable[..., None]:
    """The test that the worker checks these claims and no others."""

    @pytest.mark.dist
    @pytest.mark.slow
    def test(results: list[dict[str, str]]) -> None:
        """No check of the worker is forgotten in the file."""
        checked = results[0].keys()
        forgotten, absent = sorted(checked - set(claims)), sorted(set(claims) - checked)
        assert not forgotten, f"in the worker, and not in CLAIMS: {forgotten}"
        assert not absent, f"in CLAIMS, and not in the worker: {absent}"

    return test
