"""Places in a package's source where one token can be changed, and which of them to try.

The operators are cosmic-ray's. Taken are those that turn one token: a comparison, `and` and `or`,
a `not`, True and False, a number by one, an arithmetic operator, the end of a loop, what is caught.
Annotations are left out: nothing runs them.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.provider import OperatorProvider

COMPARISONS = (
    *("Eq_NotEq", "NotEq_Eq", "Is_IsNot", "IsNot_Is"),
    *("Lt_LtE", "Lt_GtE", "LtE_Lt", "LtE_Gt", "Gt_GtE", "Gt_LtE", "GtE_Gt", "GtE_Lt"),
)
ARITHMETIC = (
    *("Add_Sub", "Sub_Add", "Mul_FloorDiv", "Div_Mul", "FloorDiv_Mul", "Mod_FloorDiv", "Pow_Mul"),
    *("BitOr_BitAnd", "BitAnd_BitOr", "BitXor_BitOr", "RShift_LShift", "LShift_RShift"),
)
OPERATORS = (
    *(f"ReplaceComparisonOperator_{turn}" for turn in COMPARISONS),
    *(f"ReplaceBinaryOperator_{turn}" for turn in ARITHMETIC),
    *("ReplaceAndWithOr", "ReplaceOrWithAnd", "AddNot", "ReplaceUnaryOperator_Delete_Not"),
    *("ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "NumberReplacer"),
    *("ReplaceUnaryOperator_Delete_USub", "ReplaceUnaryOperator_Delete_Invert"),
    *("ReplaceBreakWithContinue", "ReplaceContinueWithBreak"),
    *("ZeroIterationForLoop", "ExceptionReplacer"),
)

Place = tuple[int, int]
"""Line, from 1, and column, from 0."""


@dataclass(frozen=True, order=True)
class Point:
    """One change of one file.

    Attributes:
        file: path below the source folder, with slashes.
        start, end: the token that is changed.
        operator: cosmic-ray's name of the change.
        occurrence: how many places the operator has in the file before this one.
    """

    file: str
    start: Place
    end: Place
    operator: str
    occurrence: int


@dataclass(frozen=True)
class Mutant:
    """A point, and the file with the change.

    Attributes:
        before, after: the lines that differ, stripped, joined by " / ".
        nth: how many lines of the file before this one are the same.
        source: text of the whole file.
    """

    point: Point
    before: str
    after: str
    nth: int
    source: str


def points_of(file: str, source: str) -> list[Point]:
    """Every point of one file, in the order of the source."""
    dead = list(_annotations(ast.parse(source)))
    nodes = list(ast_nodes(get_ast(source)))
    found = []
    for name in OPERATORS:
        operator = OperatorProvider()[name]()
        places = (place for node in nodes for place in operator.mutation_positions(node))
        for occurrence, (start, end) in enumerate(places):
            if not any(first <= tuple(start) < last for first, last in dead):
                found.append(Point(file, tuple(start), tuple(end), name, occurrence))
    return sorted(found)


def apply(point: Point, source: str) -> Mutant | None:
    """Make the mutant, or None if the change is no other program, or none at all."""
    changed = mutate_code(source, OperatorProvider()[point.operator](), point.occurrence)
    try:
        same = changed is None or _tree(changed) == _tree(source)
    except SyntaxError:
        same = True
    if same:
        return None
    olds, news = source.splitlines(), changed.splitlines()
    both = list(zip(olds, news, strict=False))
    differ = [(old.strip(), new.strip()) for old, new in both if old != new]
    before, after = (" / ".join(side) for side in zip(*differ, strict=True))
    nth = _same_before(olds, point.start[0])
    return Mutant(point, before, after, nth, changed)


def sample(sources: dict[str, str], count: int, seed: int) -> Iterator[Mutant]:
    """Draw up to `count` mutants, evenly over the places and not over the operators.

    Every place is drawn once before one is drawn again with another change. The same sources
    and seed give the same mutants, and a larger count begins with those of a smaller one. A
    place has its lot from the text of its line, so that an edit redraws only the lines it changes.
    """
    by_lot: dict[tuple[float, str, Place], list[Point]] = {}
    for file in sorted(sources):
        lines = sources[file].splitlines()
        for point in points_of(file, sources[file]):
            row, column = point.start
            line = lines[row - 1].strip()
            nth = _same_before(lines, row)
            indent = len(lines[row - 1]) - len(lines[row - 1].lstrip())
            draw = random.Random(f"{seed} {file} {line} {nth} {column - indent}")
            by_lot.setdefault((draw.random(), file, point.start), []).append(point)
    places = [by_lot[lot] for lot in sorted(by_lot)]
    for (lot, *_), options in zip(sorted(by_lot), places, strict=True):
        random.Random(lot).shuffle(options)
    left = count
    for point in _rounds(places):
        if left <= 0:
            return
        mutant = apply(point, sources[point.file])
        if mutant is not None:
            left -= 1
            yield mutant


def statement_lines(source: str, line: int) -> range:
    """Lines of the innermost statement at `line`; of a compound one, its head alone."""
    best = range(line, line + 1)
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.stmt):
            continue
        body = getattr(node, "body", None)
        last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
        lines = range(node.lineno, max(last, node.lineno) + 1)
        if line in lines and lines.start >= best.start - len(lines):
            best = lines
    return best


def is_in_function(source: str, line: int) -> bool:
    """Whether the line is in a function's body, and so runs when that is called."""
    return any(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body[0].lineno <= line <= (node.end_lineno or 0)
        for node in ast.walk(ast.parse(source))
    )


def source_files(folder: Path) -> dict[str, str]:
    """Text of each Python file below a folder, by path below it."""
    return {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(folder.rglob("*.py"))
    }


def _rounds(places: list[list[Point]]) -> Iterator[Point]:
    for turn in range(max(map(len, places), default=0)):
        for options in places:
            if turn < len(options):
                yield options[turn]


def _same_before(lines: list[str], row: int) -> int:
    """How many of the lines before line `row`, which counts from 1, are the same."""
    return sum(line.strip() == lines[row - 1].strip() for line in lines[: row - 1])


def _annotations(tree: ast.AST) -> Iterable[tuple[Place, Place]]:
    for node in ast.walk(tree):
        for field in ("annotation", "returns"):
            note = getattr(node, field, None)
            if isinstance(note, ast.expr):
                last = (note.end_lineno or note.lineno, note.end_col_offset or 0)
                yield (note.lineno, note.col_offset), last


@cache
def _tree(source: str) -> str:
    return ast.dump(ast.parse(source))
