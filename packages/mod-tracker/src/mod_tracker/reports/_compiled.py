"""Notes in a report about compiled code. A compiled module is one row, without its children."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .._attribution import Attribution
from .._record import Path
from .._torch_compat import is_compiled

SHOWN = 3
"""Names that a note shows."""

UNSEEN_BYTES = "bytes that compiled code allocates are missing"

WHOLE = "its time includes that of its children"


def ran_compiled(path: Path) -> bool:
    """Whether calls on this path run compiled code."""
    called = None if path.guard is None else path.guard()
    return called is not None and is_compiled(called)


def nothing_called_note(rows: Mapping[str, object]) -> tuple[str, ...]:
    """Return a note if no module was called."""
    if any(rows):
        return ()
    return ("no module was called in the `with` block: all of it is outside",)


def compiled_paths(attribution: Attribution) -> list[Path]:
    """Return the paths of modules that ran compiled, in the order of their calls."""
    paths = (path for state in list(attribution.states) for path in state.walk())
    return [path for path in paths if path.name and ran_compiled(path)]


def compiled_modules(attribution: Attribution) -> list[str]:
    """Return the names of modules that ran compiled, in the order of their calls."""
    return list(dict.fromkeys(path.name for path in compiled_paths(attribution)))


def compiled_note(attribution: Attribution, what: str) -> tuple[str, ...]:
    """Return a note that names the compiled modules; `what` is the missing measurement."""
    names = compiled_modules(attribution)
    if not names:
        return ()
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    shown = ", ".join(names[:SHOWN])
    return (f"compiled, so each is one row without its children: {shown}{more}; {what}",)


def functions_note(names: Iterable[str], what: str) -> tuple[str, ...]:
    """Return a note that names the modules in which compiled functions ran."""
    found = list(names)
    if not found:
        return ()
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return (f"compiled functions ran in {', '.join(found[:SHOWN])}{more}; {what}",)
