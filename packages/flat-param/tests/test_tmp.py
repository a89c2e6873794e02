import pytest

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", ["unit_scaler"])
def test_all(ranks, world, name):
    for rank, result in enumerate(ranks(world, name)):
        failed = [f"rank {rank}: {claim}\n{error}" for claim, error in result.items() if error]
        assert not failed, "\n".join(failed)
