"""What a report says of modules that ran compiled: nothing inside them is seen apart."""

from __future__ import annotations

from .._attribution import Attribution
from .._torch_compat import is_compiled

SHOWN = 3
"""Names that are written out."""


def compiled_modules(attribution: Attribution) -> list[str]:
    """Return the names of modules that were called and are compiled, in the order of their calls.

    Those inside them that ran by themselves, after a graph break for example, are seen as ever.
    """
    found: dict[str, None] = {}
    for state in list(attribution.states):
        for path in state.walk():
            called = None if path.guard is None else path.guard()
            if called is not None and path.name and is_compiled(called):
                found[path.name] = None
    return list(found)


def compiled_notes(attribution: Attribution, *, bytes_missing: bool = False) -> tuple[str, ...]:
    """Return what a report has to say of them.

    Args:
        attribution: where the report looked.
        bytes_missing: the report is of memory, and of what compiled code allocates only the
            operators that it calls are seen.
    """
    names = compiled_modules(attribution)
    if not names:
        return ()
    shown = ", ".join(names[:SHOWN])
    shown += f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    missing = "; bytes that compiled code allocates itself are missing" if bytes_missing else ""
    return (
        f"compiled, and seen as a whole: {shown}; what runs inside is charged to it{missing}. "
        "Compile parts one by one, part.compile(), to see each, or measure without compiling",
    )
