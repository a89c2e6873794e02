"""What can be wrong with the input of the suite; every one of these ends with exit code 4."""

from __future__ import annotations


class ConformanceError(Exception):
    """Something given to the suite cannot be used; the message is one line."""


class AdapterError(ConformanceError, ValueError):
    """An implementation cannot be found, imported or spoken to."""


class OptionError(ConformanceError, ValueError):
    """An option has a value that means nothing."""


class RegistryError(ConformanceError, ValueError):
    """The requirements contradict their own rules."""


class ReportError(ConformanceError, ValueError):
    """A report, badge or list of known failures cannot be read or believed."""


class RankError(ConformanceError, RuntimeError):
    """A worker process raised, crashed or did not answer in time."""


class NotProvided(AttributeError):
    """An adapter's part lacks what a case needs, and says so.

    The case's outcome is `not_provided`. That is never a pass, and no profile with such a row is
    conformant; it tells a matrix what was left out from what was tried and is wrong.
    """
