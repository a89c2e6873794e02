"""State that lies elsewhere, on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.dist


@pytest.mark.nightly
def test_state_elsewhere_is_trained_and_saved_the_same(
    ranks: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Each check of workers/offloaded.py, on both ranks, which share the folder."""
    results = ranks(2, "offloaded", str(tmp_path_factory.mktemp("offloaded")))
    assert [len(result) for result in results] == [4, 4], "a check has come or gone"
    for rank, result in enumerate(results):
        failed = [f"rank {rank}: {claim}\n{error}" for claim, error in result.items() if error]
        assert not failed, "\n".join(failed)
