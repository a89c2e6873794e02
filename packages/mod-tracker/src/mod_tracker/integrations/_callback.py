"""What the callbacks have in common - a schedule, and a class made when the library is there.

Note [Classes made late]
A trainer asks whether a callback is one of its own class, which cannot be a base of a class here
without a requirement. So the events are a class of ours, and the class that is handed out has
both as bases.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any, ClassVar

from .._errors import MissingExtraError, OptionError
from ._schedule import ReportSchedule


class Callback:
    """Steps of a schedule.

    Attributes:
        function: name of the function that makes it.
        modules: where the library's class for callbacks may be; one is enough.
        base: the name of that class.
    """

    function: ClassVar[str]
    modules: ClassVar[tuple[str, ...]]
    base: ClassVar[str]

    def __init__(self, schedule: ReportSchedule) -> None:
        super().__init__()
        self.schedule = schedule

    def __reduce__(self) -> tuple[Any, ...]:
        return make, (type(self).__bases__[0], self.schedule)


def make(events: type[Callback], schedule: ReportSchedule) -> Any:
    """Return a callback that is of the library's class, too. See Note [Classes made late].

    Raises:
        OptionError: the argument is not a schedule.
        MissingExtraError: the library is not installed.
    """
    if not isinstance(schedule, ReportSchedule):
        raise OptionError(
            f"mod_tracker.{events.function}: a {type(schedule).__name__} is given, but it must be "
            "a ReportSchedule. Give ReportSchedule(profile_time, every_n_steps=100, on_report=...)."
        )
    kind = type(events.__name__, (events, _base(events)), {"__doc__": events.__doc__})
    return kind(schedule)


def _base(events: type[Callback]) -> type:
    # A module that is imported already comes first: it is the one whose trainer is used.
    for module in sorted(events.modules, key=lambda module: module not in sys.modules):
        try:
            return getattr(import_module(module), events.base)
        except ModuleNotFoundError as error:
            if error.name not in (module, module.partition(".")[0]):
                raise
            missing = error
    library = events.modules[0].partition(".")[0]
    raise MissingExtraError(
        f"mod_tracker.{events.function}: {library} is not installed, but its {events.base} is the "
        f"class of this callback. Install it: python -m pip install {library}."
    ) from missing
