"""Implementations that do nothing right; not one requirement may pass on them."""

from __future__ import annotations

from typing import Any

from torchparts_conformance import Implementation
from torchparts_conformance.requirements._areas import PARTS


class _Nothing:
    """Has every name, and each of them accepts everything and does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()

    def __call__(self, *args: Any, **kwargs: Any) -> _Nothing:
        return _Nothing()


class _Raising:
    """Has every name, and each of them raises when it is used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _always_raise


def _always_raise(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("this implementation always raises")


def _made_of(part: Any, name: str) -> Implementation:
    return Implementation(name=name, version="0", parts=dict.fromkeys(PARTS, part))


do_nothing = _made_of(_Nothing(), "does nothing")
always_raise = _made_of(_Raising(), "always raises")
