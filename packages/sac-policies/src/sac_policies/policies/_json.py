"""Policies as JSON and back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from .._errors import PolicyError, shown, shown_text
from ._checked import field_problem
from ._decisions import Decision
from ._policies import Policy, check_policy


def to_json(policy: Policy) -> str:
    """Write a policy as JSON; equal policies give equal text.

    Raises:
        PolicyError: not a policy, or one that contains a Python function.

    Example:
        >>> from sac_policies import save_ops
        >>> to_json(save_ops("aten.mm"))
        '{"rule": "OpRule", "entries": ["aten.mm"], "answer": {"decision": "save"}}'
    """
    check_policy(policy, where="to_json")
    return json.dumps(_encode(policy))


def from_json(text: str) -> Policy:
    """Read a policy that `to_json` wrote.

    Every value must have the type that its rule declares.

    Raises:
        PolicyError: the text is not a policy.

    Example:
        >>> from sac_policies import offload
        >>> from_json(to_json(offload("aten.mm"))) == offload("aten.mm")
        True
    """
    try:
        value = json.loads(text, parse_constant=_no_constant)
        policy = _decode(value, {r.__name__: r for r in _rules(Policy) if _is_public(r)})
        if not isinstance(policy, Policy):
            raise PolicyError(f"it holds a {type(policy).__name__}")
    except PolicyError as error:
        raise PolicyError(_unreadable(str(error))) from error
    except Exception as error:  # damaged text, or a user's rule, may raise anything
        raise PolicyError(_unreadable(f"{type(error).__name__}: {error}")) from error
    return policy


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _encode(value: Any) -> Any:
    if isinstance(value, Policy):
        held = (each.name for each in fields(value) if each.compare)  # type: ignore[arg-type]  # policies are dataclasses
        pairs = {name: _encode(getattr(value, name)) for name in held}
        return {"rule": type(value).__name__, **pairs}
    if isinstance(value, Decision):
        return {"decision": value.value}
    if isinstance(value, tuple):
        return [_encode(each) for each in value]
    if value is None or isinstance(value, (str, int)):
        return value
    raise PolicyError(
        f"sac_policies.to_json: value {shown(value)} of the policy is Python code, but JSON holds "
        "rules only. Build the policy from save_ops(...), first_match(...) and the like."
    )


def _decode(value: Any, rules: dict[str, type[Policy]]) -> Any:
    if isinstance(value, list):
        return tuple(_decode(each, rules) for each in value)
    if not isinstance(value, dict):
        return value
    if set(value) == {"decision"}:
        return Decision(value["decision"])
    name = value.get("rule")
    rule = rules.get(name) if isinstance(name, str) else None
    if rule is None:
        raise PolicyError(f"there is no rule {shown(name)}")
    given = {key: _decode(each, rules) for key, each in value.items() if key != "rule"}
    if problem := field_problem(rule, given):
        raise PolicyError(problem)
    return rule(**given)


def _rules(base: type) -> Iterator[type[Policy]]:
    rule: type[Policy]
    for rule in base.__subclasses__():
        yield rule
        yield from _rules(rule)


def _is_public(rule: type[Policy]) -> bool:
    """Whether a rule may be read: a public rule of the package, or a rule of a user."""
    ours = rule.__module__.partition(".")[0] == __package__.partition(".")[0]
    return not (ours and rule.__name__.startswith("_")) and is_dataclass(rule)


def _unreadable(reason: str) -> str:
    return (
        f"sac_policies.from_json: text cannot be read ({shown_text(reason)}), but it must be what "
        "to_json wrote. Write it again with this version."
    )
