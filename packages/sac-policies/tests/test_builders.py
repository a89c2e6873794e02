"""The functions that make rules make what they say, and refuse what no rule can be."""

from __future__ import annotations

import pytest

from sac_policies import (
    PolicyError,
    as_policy,
    save_by_bytes,
    save_by_flops,
    save_by_shape,
    save_every_nth,
    save_modules,
    save_named,
    save_ops,
    scoped,
)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: save_ops(), "no operator is given"),
        (lambda: save_ops(3), "entry 3 is a int"),
        (lambda: save_ops("@matmul"), "Use one of @matmuls"),
        (lambda: save_every_nth("aten.mm", n=2, phase=2), "n 2 and phase 2 pick no call"),
        (lambda: save_by_bytes(at_least=2, at_most=1), "bounds 2 to 1 bytes"),
        (lambda: save_by_flops(at_least=-1), "at_least -1 is no count"),
        (lambda: save_named(), "no name is given"),
        (lambda: save_named(3), "name 3 is a int"),
        (lambda: save_ops(""), "entry '' is a str"),
        (lambda: save_modules(["a", "b"]), r"module path \['a', 'b'\] is a list"),
        (lambda: scoped("attn", save_ops("aten.mm")), "'attn' is a str, but a policy is needed"),
        (lambda: save_every_nth("aten.mm", n="2"), "n '2' and phase 0 pick no call"),
        (lambda: save_by_bytes(at_least="1 KiB"), "bounds '1 KiB' to None"),
        (lambda: save_by_bytes(at_most=1.5), "bounds 0 to 1.5"),
        (lambda: save_by_flops(at_least="1"), "at_least '1' is no count"),
        (lambda: save_by_shape("a"), "shape 'a' is none"),
        (lambda: save_by_shape((1, "a")), r"shape \(1, 'a'\) is none"),
        (lambda: save_by_shape(), "no shape is given"),
        (lambda: save_modules(), "no module path is given"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(make, message):
    """Rules that cannot match anything are refused when they are made."""
    with pytest.raises(PolicyError, match=message):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: save_ops("a" * 1001),
        lambda: save_named("a" * 1001),
        lambda: save_modules("a" * 1001),
        lambda: save_ops(*["b.x"] * 4097),
        lambda: save_named(*["b"] * 4097),
        lambda: as_policy(["aten.*"] * 4097),
    ],
)
def test_builders_have_the_same_limits(make):
    """What text may not say, code may not either."""
    with pytest.raises(PolicyError, match="are the most"):
        make()
