"""Every public function raises the package's error for garbage arguments, with a helpful text."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import nn

import sac_policies as sp
from sac_policies import SacError


class Hostile:
    """Raises an error for every attribute and operation."""

    def __repr__(self):
        raise RuntimeError("no repr")

    def __eq__(self, other):
        raise RuntimeError("no equality")

    def __bool__(self):
        raise RuntimeError("no truth")

    def __len__(self):
        raise RuntimeError("no length")

    __hash__ = None


X = torch.ones(2, 2, requires_grad=True)
TRACE = sp.budget.Trace("ns", (), ())
ALL = sp.save_all()
LAYER = nn.Linear(2, 2)
GARBAGE = {
    "none": None,
    "true": True,
    "int": 3,
    "negative": -1,
    "huge": 10**5_000,
    "nan": math.nan,
    "infinite": math.inf,
    "empty": "",
    "long": "x" * 10**6,
    "text": "no such thing",
    "bytes": b"aten.mm",
    "list": [None],
    "tuple": (),
    "dict": {1: 2},
    "type": int,
    "object": object(),
    "tensor": torch.ones(2),
    "hostile": Hostile(),
}


# Functions, and arguments that are garbage for them: a byte count, a name, a callable.
class _Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()


ENTRIES = {
    "as_policy": (sp.policies.as_policy, "tuple type"),
    "checkpoint.function": (lambda g: sp.checkpoint(g, X, policy=ALL), "type"),
    "checkpoint.policy": (lambda g: sp.checkpoint(torch.sin, X, policy=g), "none tuple"),
    "context_fn": (sp.context_fn, "tuple type"),
    "first_match": (sp.first_match, ""),
    "fit_.model": (lambda g: sp.fit_(g, X, "1 GiB"), ""),
    "fit_.budget": (lambda g: sp.fit_(LAYER, X, g), "huge"),
    "fit_.reserve": (lambda g: sp.fit_(LAYER, X, "1 GiB", reserve=g), "int huge"),
    "fit_.optimizer": (lambda g: sp.fit_(LAYER, X, "1 GiB", optimizer=g), "none"),
    "fit_.step": (lambda g: sp.fit_(LAYER, X, "1 GiB", step=g), "none type"),
    "fit_.loss": (lambda g: sp.fit_(LAYER, X, "1 GiB", loss=g), "none type"),
    "format_size": (sp.budget.format_size, "int negative"),
    "checkpoint_name.tensor": (lambda g: sp.checkpoint_name(g, "a"), "tensor"),
    "checkpoint_name.label": (lambda g: sp.checkpoint_name(X, g), "empty long text"),
    "offload": (sp.offload, ""),
    "parse_size": (sp.budget.parse_size, ""),
    "profile": (sp.profile, "type"),
    "in_slices.function": (lambda g: sp.in_slices(g, 2), "type"),
    "in_slices_.module": (lambda g: sp.in_slices_(g, 2), ""),
    "in_slices.chunks": (lambda g: sp.in_slices(torch.sin, g), "int huge"),
    "in_slices.dim": (lambda g: sp.in_slices(torch.sin, 2, g), "int huge negative"),
    "profile.unit": (lambda g: sp.profile(torch.sin, X, unit=g), "none"),
    "profile.repeats": (lambda g: sp.profile(torch.sin, X, repeats=g), "int"),
    "recompute_ops": (sp.recompute_ops, ""),
    "report.function": (lambda g: sp.report(g, X, policy=ALL), "type"),
    "report.policy": (lambda g: sp.report(torch.sin, X, policy=g), "tuple"),
    "save_by_bytes.at_least": (lambda g: sp.save_by_bytes(at_least=g), "int"),
    "save_by_bytes.at_most": (lambda g: sp.save_by_bytes(at_most=g), "none int"),
    "save_by_flops": (lambda g: sp.save_by_flops(at_least=g), "int"),
    "save_by_index": (sp.policies.save_by_index, "tuple"),
    "save_by_index.call": (
        lambda g: sp.policies.save_by_index([(g, sp.policies.Decision.SAVE)]),
        "",
    ),
    "save_by_index.decision": (lambda g: sp.policies.save_by_index([(("a", 0), g)]), ""),
    "save_every_nth": (lambda g: sp.save_every_nth(g, n=2), ""),
    "save_every_nth.n": (lambda g: sp.save_every_nth("aten.mm", n=g), "int"),
    "save_every_nth.phase": (lambda g: sp.save_every_nth("aten.mm", n=4, phase=g), "int"),
    "save_modules": (sp.save_modules, "text long"),
    "save_named": (sp.save_named, "text long"),
    "save_ops": (sp.save_ops, ""),
    "scoped": (lambda g: sp.scoped(g, "a"), ""),
    "scoped.path": (lambda g: sp.scoped(ALL, g), "text long"),
    "solve": (lambda g: sp.solve(g, 1), ""),
    "solve.budget": (lambda g: sp.solve(TRACE, g), "int huge"),
}


@pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning")
@pytest.mark.parametrize("entry", ENTRIES)
def test_garbage_is_refused_with_help(entry, tmp_path, monkeypatch):
    """`sac_policies.<function>: <thing>, but <rule>. <Next step>.`, and short."""
    monkeypatch.chdir(tmp_path)
    call, takes = ENTRIES[entry]
    pattern = re.compile(r"sac_policies\.[\w.]+: .*, but [^.]+.*\. .+[.?]$", re.DOTALL)
    for kind, given in GARBAGE.items():
        if kind in takes.split():
            if kind != "type":  # int(x) raises
                call(given)
            continue
        with pytest.raises(SacError) as raised:
            call(given)
        assert pattern.match(str(raised.value)), kind
        assert len(str(raised.value)) < 700, kind


def test_table_has_every_function():
    """A new public function must be added to the table."""
    named = {entry.partition(".")[0] for entry in ENTRIES}
    functions = {
        each
        for each in sp.__all__
        if callable(getattr(sp, each)) and not isinstance(getattr(sp, each), type)
    }
    assert functions - named == {"offload_stats", "recompute_all", "save_all"}
