"""The errors of this package, one base and a leaf per kind of mistake.

Every message reads ``flat_param.<function>: <named thing> <actual>, but <rule>. <Next step>.``,
except the sentences that torch's private class fixed, which are kept word for word.
"""

from __future__ import annotations


class FlatParamError(Exception):
    """Base of every error that this package raises on purpose."""


class ParameterError(FlatParamError, ValueError):
    """A parameter cannot be flattened, or no longer fits the place planned for it."""


class LayoutError(FlatParamError, ValueError):
    """The requested layout or shard plan cannot exist."""


class VectorError(FlatParamError, ValueError):
    """A vector does not fit the segment it was given for."""


class StateError(FlatParamError, RuntimeError):
    """An object was used in a state in which the request has no meaning."""


class CommError(FlatParamError, RuntimeError):
    """Ranks disagree, or a rank did not answer."""


class CheckpointError(FlatParamError, RuntimeError):
    """A checkpoint is truncated, foreign or does not match the module."""
