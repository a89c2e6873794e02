"""The gradients of a sharded module, for the norm over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from ..buffers._dtensors import place_of_dtensor
from ..comm._clip import Spread, spread_of
from ..comm._groups import CommGroups
from ._param_piece import piece_of
from ._piece_tensors import plain


def norm_parts(
    params: Iterable[Tensor], *, ignored: Sequence[Tensor], comms: CommGroups
) -> Iterator[tuple[Spread, Spread, Tensor | None]]:
    """Gradients for `norm_over`. Each rank has separate ones of `ignored` parameters."""
    known = set(map(id, ignored))
    for param in params:
        piece, grad = piece_of(param), param.grad
        if piece is not None:  # without elements a rank may have no gradient, and takes part
            yield piece.spread, (), None if grad is None else plain(grad)
        elif grad is not None or id(param) in known:
            place = place_of_dtensor(param)
            local = grad if grad is None or place is None else place.local_of_grad(grad)
            beside = (comms.reduce, comms.replicate) if id(param) in known else ()
            yield spread_of(place, comms.log), beside, local
