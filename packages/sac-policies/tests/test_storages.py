"""The storage key of a tensor, also after the storage is freed."""

from __future__ import annotations

import pytest
import torch

from sac_policies._torch_compat import (
    storage_bytes,
    storage_key,
)


def test_views_have_the_key_of_their_base_and_copies_do_not():
    """Two empty tensors have different storages."""
    tensor = torch.ones(4)
    assert storage_key(tensor) == storage_key(tensor[1:]) == storage_key(tensor.detach())
    assert storage_key(tensor) != storage_key(tensor.clone())
    empties = [torch.empty(0), torch.empty(0)]
    assert len(set(map(storage_key, empties))) == 2


EYE = torch.eye(4)
OPAQUE = {
    "coo": lambda: EYE.to_sparse(),
    "csr": lambda: EYE.to_sparse_csr(),
    "oneDNN": lambda: EYE.to_mkldnn(),
    "nested": lambda: torch.nested.nested_tensor([EYE, EYE[:2]]),
    "zeros": lambda: torch._efficientzerotensor((4, 4)),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("make", OPAQUE.values(), ids=OPAQUE)
def test_what_lies_in_no_storage_has_a_key_and_a_size(make):
    """Tensors without a storage get a unique key, and the bytes of their components."""
    one, other = make(), make()
    assert storage_key(one) != storage_key(other)
    assert storage_bytes(one) > 0


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_bytes_of_a_sparse_tensor_are_those_of_its_parts():
    """Four values, and four indices of two dimensions or their compressed form."""
    assert storage_bytes(EYE.to_sparse()) == 4 * 2 * 8 + 4 * 4
    assert storage_bytes(EYE.to_sparse_csr()) == 5 * 8 + 4 * 8 + 4 * 4
    assert storage_bytes(EYE[1:]) == 64
