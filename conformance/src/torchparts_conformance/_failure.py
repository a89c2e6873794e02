"""One sentence about a failed case: what it expected, and what came instead.

The statement that failed is read from the file of the case, and the values in it from the frame.
Only expressions that change nothing are evaluated again.
"""

from __future__ import annotations

import ast
import functools
import re
import reprlib
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchparts_conformance._errors import one_line
from torchparts_conformance.requirements._areas import area_of_path

_MAX_CODE = 100
_HARMLESS = (
    *(ast.Name, ast.Attribute, ast.Subscript, ast.Slice, ast.Constant, ast.Load, ast.Store),
    *(ast.Tuple, ast.List, ast.Set, ast.Dict, ast.Starred, ast.keyword, ast.Expression),
    *(ast.UnaryOp, ast.unaryop, ast.BinOp, ast.operator, ast.Compare, ast.cmpop),
    *(ast.BoolOp, ast.boolop, ast.IfExp, ast.JoinedStr, ast.FormattedValue),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.comprehension),
)
_HARMLESS_CALLS = frozenset(
    {
        *("len", "set", "sorted", "list", "tuple", "dict", "sum", "type", "abs", "max", "min"),
        *("any", "all", "map", "zip", "enumerate", "isinstance", "torch.equal"),
        *("state_dict", "named_parameters", "named_modules", "named_buffers", "parameters"),
        *("modules", "buffers", "items", "keys", "values", "numel", "size", "tolist", "item"),
        *("data_ptr", "endswith", "startswith", "count"),
    }
)


class _Short(reprlib.Repr):
    """Short texts of values; a large tensor is named by its shape, a module by its class."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = 8
        self.maxstring = self.maxother = 80

    def repr1(self, x: Any, level: int) -> str:
        import torch

        if isinstance(x, torch.Tensor):
            shape = tuple(x.shape)
            is_small = type(x) in (torch.Tensor, torch.nn.Parameter) and 0 < x.numel() <= 4
            return f"tensor({x.tolist()})" if is_small else f"a tensor of shape {shape}"
        if isinstance(x, torch.nn.Module):
            return f"a {type(x).__name__}"
        return super().repr1(x, level)


def text_of(value: object) -> str:
    """Return a short text of a value on one line, without addresses."""
    try:
        text = _Short().repr(value)
    except Exception:  # the code under test may define __repr__
        text = f"a {type(value).__name__}"
    return re.sub(r"0x[0-9a-fA-F]+", "0x...", " ".join(text.split()))


def difference(op: str, left: object, right: object) -> str:
    """Return how two compared values differ, if they are collections; else an empty string."""
    if op != "==" or type(left) is not type(right):
        return ""
    if isinstance(left, (set, frozenset)) and isinstance(right, (set, frozenset)):
        more, less = left - right, right - left
        return " and ".join(
            f"{word} {text_of(found)}"
            for word, found in (("also had", more), ("lacked", less))
            if found
        )
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        for index, (one, other) in enumerate(zip(left, right, strict=False)):
            if one is not other and text_of(one) != text_of(other):
                return f"had {text_of(one)} at {index} in place of {text_of(other)}"
        if len(left) != len(right):
            return f"had {len(left)} items in place of {len(right)}"
    if isinstance(left, dict) and isinstance(right, dict):
        for key in dict.fromkeys([*left, *right]):
            one, other = (text_of(d[key]) if key in d else "nothing" for d in (left, right))
            if one != other:
                return f"had {one} for {text_of(key)} in place of {other}"
    return ""


def apart(left: Any, right: Any) -> str:
    """Return how two tensors, or two collections of tensors, differ; else an empty string."""
    import torch

    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        found = (apart(one, other) for one, other in zip(left, right, strict=False))
        return next(filter(None, found), "")
    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        names = text_of(left), text_of(right)
        return f"one was {names[0]} and the other {names[1]}" if names[0] != names[1] else ""
    facts = [(tuple(t.shape), t.dtype, t.device.type) for t in (left, right)]
    if facts[0] != facts[1]:
        return f"one was of {facts[0]} and the other of {facts[1]}"
    if torch.equal(left, right):
        return ""
    by = (left.detach().double() - right.detach().double()).abs().max().item()
    return f"the tensors differed by up to {by:.3g}"


def sentence(raised: BaseException, compared: tuple[str, str, str, str] | None = None) -> str:
    """Return what a case expected and what came; only the error if that is not known.

    Args:
        raised: by the case.
        compared: operator, both values and their difference, if pytest saw the comparison.
    """
    if (lines := str(raised).splitlines()) and re.match(r"rank \d+: ", lines[0]):
        return lines[0]  # the process of the rank wrote it
    frame, line = _last_frame(raised)
    if frame is None:
        return one_line(raised)
    try:
        statements = list(_statements(frame.f_code.co_filename, line))
    except (OSError, SyntaxError):
        return one_line(raised)
    innermost = statements[-1] if statements else None
    awaiting = [s for s in statements if isinstance(s, ast.With) and _awaited(s)]
    if awaiting and (innermost is awaiting[-1] or not isinstance(raised, AssertionError)):
        return _of_raises(awaiting[-1], raised, is_exit=innermost is awaiting[-1])
    if isinstance(innermost, ast.Assert) and isinstance(raised, AssertionError):
        return _of_assert(innermost, frame, compared)
    came = _cleared(one_line(raised))
    if innermost is None:
        return came
    return f"expected {_code(innermost)} to pass, but it raised {came}"


def _last_frame(raised: BaseException) -> tuple[types.FrameType | None, int]:
    found: tuple[types.FrameType | None, int] = (None, 0)
    for frame, line in traceback.walk_tb(raised.__traceback__):
        if area_of_path(Path(frame.f_code.co_filename)):
            found = frame, line
    return found


@functools.cache
def _parsed(path: str) -> ast.Module:
    return ast.parse(Path(path).read_text(encoding="utf-8"))


def _statements(path: str, line: int) -> Iterator[ast.stmt]:
    """Return the statements that contain a line, from outside to inside."""
    node: ast.AST | None = _parsed(path)
    while node is not None:
        inside = (s for s in ast.walk(node) if isinstance(s, ast.stmt) and s is not node)
        around = [s for s in inside if s.lineno <= line <= (s.end_lineno or s.lineno)]
        node = around[0] if around else None
        if around:
            yield around[0]


def _awaited(block: ast.With) -> ast.Call | None:
    """Return the call of `pytest.raises` of a block."""
    for item in block.items:
        call = item.context_expr
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("raises"):
            return call
    return None


def _of_raises(block: ast.With, raised: BaseException, *, is_exit: bool) -> str:
    call = _awaited(block)
    assert call is not None
    wanted = ast.unparse(call.args[0]) if call.args else "an error"
    for option in call.keywords:
        if option.arg == "match":
            pattern = option.value
            said: object = (
                pattern.value if isinstance(pattern, ast.Constant) else ast.unparse(pattern)
            )
            wanted += f" that says '{said}'"
    expected = f"expected {_code(block.body[-1])} to raise {wanted}"
    if not is_exit:
        return f"{expected}, but it raised {_cleared(one_line(raised))}"
    if raised.__context__ is not None:
        return f"{expected}, but it raised {_cleared(one_line(raised.__context__))}"
    return f"{expected}, but nothing was raised"


def _of_assert(
    node: ast.Assert, frame: types.FrameType, compared: tuple[str, str, str, str] | None
) -> str:
    expected = f"expected {_code(node.test)}"
    if node.msg is not None and (said := _value(node.msg, frame)) is not _UNKNOWN:
        expected += f" ({said if isinstance(said, str) else text_of(said)})"
    return f"{expected}, but {_came(node.test, frame, compared)}"


def _came(
    test: ast.expr, frame: types.FrameType, compared: tuple[str, str, str, str] | None
) -> str:
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return _came_of_comparison(test, frame, compared)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        value = _value(test.operand, frame)
        return "it was true" if value is _UNKNOWN else f"{_code(test.operand)} was {text_of(value)}"
    if isinstance(test, ast.Call):
        values = _operands(test, frame)
        if ast.unparse(test.func) == "isinstance" and values:
            return f"{_code(test.args[0])} was a {type(values[0]).__name__}"
        if len(values) == 2 and (how := apart(*values)):
            return how
    value = _value(test, frame)
    return f"it was {text_of(value)}" if value is not _UNKNOWN and not value else "it was false"


def _operands(call: ast.Call, frame: types.FrameType) -> list[Any]:
    """Return the values that a call compares, as `torch.equal` or `all(map(torch.equal, ...))`."""
    arguments, first = call.args, call.args[0] if call.args else None
    if ast.unparse(call.func) == "all" and isinstance(first, ast.Call):
        arguments = first.args[1:] if ast.unparse(first.func) == "map" else []
    values = _value(ast.Tuple(arguments, ast.Load()), frame)
    return [] if values is _UNKNOWN else list(values)


def _came_of_comparison(
    test: ast.Compare, frame: types.FrameType, compared: tuple[str, str, str, str] | None
) -> str:
    sides = (test.left, test.comparators[0])
    op = ast.unparse(test).removeprefix(ast.unparse(test.left)).split()[0]
    if compared is not None and compared[0] == op:
        _, *texts, how = compared
    else:
        values = [_value(side, frame) for side in sides]
        if any(value is _UNKNOWN for value in values):
            return "it was false"
        texts, how = [text_of(value) for value in values], difference(op, *values)
    if how:
        return f"{_code(sides[0])} {how}"
    said = [
        f"{_code(side)} was {text}"
        for side, text in zip(sides, texts, strict=True)
        if not isinstance(side, ast.Constant) and ast.unparse(side) != text
    ]
    return " and ".join(said) or "it was false"


_UNKNOWN = object()


def _value(node: ast.expr, frame: types.FrameType) -> Any:
    """Evaluate an expression that changes nothing in a frame; else return `_UNKNOWN`."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call):
            name = ast.unparse(inner.func)
            if name not in _HARMLESS_CALLS and name.rpartition(".")[2] not in _HARMLESS_CALLS:
                return _UNKNOWN
        elif not isinstance(inner, _HARMLESS):
            return _UNKNOWN
    try:
        expression = ast.fix_missing_locations(ast.Expression(node))
        code = compile(expression, frame.f_code.co_filename, "eval")
        return eval(code, {**frame.f_globals, **frame.f_locals})
    except Exception:
        return _UNKNOWN


def _code(node: ast.AST) -> str:
    """Return code on one line, in backquotes."""
    if isinstance(node, (ast.Assert, ast.Return)):
        node = (node.test if isinstance(node, ast.Assert) else node.value) or node
    text = " ".join(ast.unparse(node).split())
    return f"`{text if len(text) <= _MAX_CODE else text[: _MAX_CODE - 3] + '...'}`"


def _cleared(text: str) -> str:
    """Remove what differs between runs: addresses and folders."""
    text = re.sub(r"0x[0-9a-fA-F]+", "0x...", text)
    return re.sub(r"(?<![\w:/])(?:/[\w.+@-]+)+/", "", text)
