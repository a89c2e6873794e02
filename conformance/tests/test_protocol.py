"""What an adapter says of its implementation is checked when it is made."""

from __future__ import annotations

import subprocess
import sys

import pytest

from torchparts_conformance import PROTOCOL, Implementation
from torchparts_conformance._errors import AdapterError


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ({"lacks": {"wheels": {}}}, "lacks names ['wheels'], but the areas are"),
        ({"lacks": {"ckpt-wrap": {"a"}}}, "but it goes from a name to why it is not there"),
        ({"lacks": {"ckpt-wrap": {"a": ""}}}, "but it goes from a name to why it is not there"),
        ({"torch": "new"}, "torch is 'new', but versions are needed. Write '>=2.9,<2.12'."),
        ({"torch": None}, "torch is None, but versions are needed"),
    ],
)
def test_adapter_that_says_it_wrongly_is_refused(field, said):
    """In one line that names the field."""
    with pytest.raises(AdapterError) as caught:
        Implementation("mine", "1", **field)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"protocol": "2"}, "protocol '2' is not spoken here"),
        ({"name": ""}, "name '' is unusable"),
        ({"version": "1" * 101}, "but 1 to 100 characters are needed"),
        ({"parts": {"wheels": 1}}, r"parts names \['wheels'\]"),
        ({"capabilities": {"wheels": set()}}, r"capabilities names \['wheels'\]"),
        ({"parts": 5}, "parts is of type int, but it goes from area to value"),
        ({"parts": {5: 1}}, r"parts names \[5\]"),
        ({"capabilities": {"ckpt-wrap": "compile"}}, "is 'compile', but a set of names is needed"),
        ({"capabilities": {"ckpt-wrap": {5}}}, r"is \{5\}, but a set of names is needed"),
        ({"distributions": "mine"}, "distributions is no tuple"),
        ({"distributions": ("../mine",)}, "distributions has '../mine', but a distribution is"),
        ({"distributions": (5,)}, "distributions has 5, but a distribution is"),
        ({"distributions": ("mine",) * 21}, "distributions holds 21, but 20 is the most"),
    ],
)
def test_bad_adapter_is_refused(changes, said):
    """An adapter is checked when it is made."""
    with pytest.raises(AdapterError, match=said):
        Implementation(**{"name": "mine", "version": "1", "protocol": PROTOCOL, **changes})


def test_adapter_waits_for_no_parser():
    """An adapter is imported with the part that it is for; only versions and lists need one."""
    code = (
        "import sys; from torchparts_conformance import Implementation\n"
        "Implementation('mine', '1.0', parts={'ckpt-wrap': 'mine.wrapper'})\n"
        "print({'packaging.specifiers', 'tomllib', 'tomli', 'torch'} & set(sys.modules))\n"
        "Implementation('mine', '1.0', torch='>=2.9'); print('packaging' in sys.modules)"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert told.stdout.split("\n") == ["set()", "True", ""]
