"""What one rank refuses or changes is an error on every rank, in its words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from flat_param.comm import _peer_messages
from flat_param.comm._peer_messages import PeerMessages

TIMEOUT_S = 30
MOVED = "parameters are torch.float64 on cpu"
CASES = [
    (2, "shape", "ZeRO-3"),
    (2, "to", "ZeRO-3"),
    (2, "to", "replicated"),
    (4, "to", "HSDP"),
]


@pytest.fixture
def on_rank(notes: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], PeerMessages]:
    """The notices as one rank of two sees them; each rank has a count of its own."""
    counts: dict[int, Counter[Any]] = {0: Counter(), 1: Counter()}

    def be(rank: int) -> PeerMessages:
        monkeypatch.setattr(_peer_messages, "_posted", counts[rank])
        return PeerMessages(notes, (0, 1), rank)

    return be


def test_what_only_another_refused_is_seen(on_rank: Callable[[int], PeerMessages]) -> None:
    """The rank that waits reads the words of the one that refused."""
    assert not on_rank(0).unshared()
    on_rank(1).refuse("no")
    assert on_rank(0).unshared() == "rank 1: no"


def test_what_all_refused_is_nothing_to_report(on_rank: Callable[[int], PeerMessages]) -> None:
    """Ranks that made the same mistake, and mended it, go on; the next one is seen again."""
    on_rank(1).refuse("no")
    on_rank(0).refuse("no")
    assert not on_rank(0).unshared()
    assert not on_rank(1).unshared()
    on_rank(0).refuse("again")
    assert on_rank(1).unshared() == "rank 0: again"


def test_groups_do_not_hear_each_other(notes: Any, on_rank: Callable[[int], PeerMessages]) -> None:
    """What ranks 0 and 1 refuse does not stop ranks 2 and 3."""
    on_rank(1).refuse("no")
    assert not PeerMessages(notes, (2, 3), 2).unshared()


def test_a_change_that_others_lack_is_seen_by_both(on_rank: Callable[[int], PeerMessages]) -> None:
    """One waits in vain, and says how many came; the other finds the change that it lacks."""
    reason = on_rank(1).share_change(MOVED, trouble=lambda: "")
    assert reason == "only 1 of 2 ranks made the change in time"
    assert on_rank(0).unshared() == f"rank 1: {MOVED}"


def test_a_wait_ends_with_the_trouble_of_another(on_rank: Callable[[int], PeerMessages]) -> None:
    """The rank that lacks the change says so, and nobody waits for the timeout."""
    assert on_rank(1).share_change(MOVED, trouble=lambda: "rank 0: stop") == "rank 0: stop"


def test_the_same_change_on_all_ranks_is_agreed(on_rank: Callable[[int], PeerMessages]) -> None:
    """The last to come finds all there, and nothing is left to see."""
    on_rank(1).share_change(MOVED, trouble=lambda: "here")
    assert on_rank(0).share_change(MOVED, trouble=lambda: "") == ""
    assert not on_rank(0).unshared()


def test_another_change_is_named(on_rank: Callable[[int], PeerMessages]) -> None:
    """Two ranks that cast to different dtypes do not agree."""
    on_rank(1).share_change(MOVED, trouble=lambda: "here")
    assert on_rank(0).share_change("other", trouble=lambda: "") == f"rank 1: {MOVED}"


@pytest.fixture(scope="module")
def runs(ranks: Any, run: Callable[..., Any]) -> dict[Any, Any]:
    """One for each case, all at the same time, since ranks wait for seconds before they leave."""
    found = {
        (world, what, way): run(world, "one_sided", (what, way), TIMEOUT_S)
        for world, what, way in CASES
    }
    ranks.ahead(list(found.values()))
    return found


@pytest.mark.nightly
@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(("world", "what", "way"), CASES)
def test_one_sided_change_is_an_error_on_every_rank(
    ranks: Any, runs: dict[Any, Any], world: int, what: str, way: str
) -> None:
    """All fail within the timeout, each with the words of the rank that changed."""
    words = MOVED if what == "to" else "'head.bias' was re-assigned with shape (3,)"
    results = ranks.results_of(runs[world, what, way])
    for result in results:
        assert words in result["error"]
        assert result["seconds"] < TIMEOUT_S / 2
    assert all(result["error"].startswith("CommError") for result in results[:-1])
    last = "CommError: flat_param.fully_shard: " + MOVED if what == "to" else "ParameterError"
    assert results[-1]["error"].startswith(last)
