"""Pure: policies as JSON and back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from ._decisions import Decision
from ._errors import PolicyError
from ._policies import Policy


def to_json(policy: Policy) -> str:
    """Write a policy as JSON; equal policies give equal text.

    Raises:
        PolicyError: the policy holds a Python function.

    Example:
        >>> from sac_policies import save_ops
        >>> to_json(save_ops("aten.mm"))
        '{"rule": "OpRule", "entries": ["aten.mm"], "answer": {"decision": "save"}}'
    """
    return json.dumps(_encode(policy))


def from_json(text: str) -> Policy:
    """Read a policy that `to_json` wrote.

    Raises:
        PolicyError: the text is no policy.

    Example:
        >>> from sac_policies import offload
        >>> from_json(to_json(offload("aten.mm"))) == offload("aten.mm")
        True
    """
    try:
        policy = _decode(json.loads(text))
    except (ValueError, TypeError) as error:
        raise PolicyError(_unreadable(str(error))) from error
    if not isinstance(policy, Policy):
        raise PolicyError(_unreadable(f"it holds a {type(policy).__name__}"))
    return policy


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
        f"sac_policies.to_json: value {value!r} of the policy is Python code, but JSON holds "
        "rules only. Build the policy from save_ops(...), first_match(...) and the like."
    )


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_decode(each) for each in value)
    if not isinstance(value, dict):
        return value
    if "decision" in value:
        return Decision(value["decision"])
    rules = {rule.__name__: rule for rule in _rules(Policy)}
    name = value.get("rule")
    if name not in rules:
        raise PolicyError(_unreadable(f"there is no rule {name!r}"))
    return rules[name](**{key: _decode(each) for key, each in value.items() if key != "rule"})


def _rules(base: type) -> Iterator[type[Policy]]:
    rule: type[Policy]
    for rule in base.__subclasses__():
        yield rule
        yield from _rules(rule)


def _unreadable(reason: str) -> str:
    return (
        f"sac_policies.from_json: text cannot be read ({reason}), but it must be what to_json "
        "wrote. Write it again with this version."
    )
