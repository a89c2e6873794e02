"""What is raised for bad input: one class catches all of it."""

from __future__ import annotations

import pytest

from torchparts_conformance import NotProvided, _errors

OF_THE_SUITE = ("AdapterError", "OptionError", "RegistryError", "ReportError", "RankError")


@pytest.mark.parametrize("name", OF_THE_SUITE)
def test_one_class_catches_all_that_is_wrong_with_the_input(name):
    """The command line catches this one, and ends with exit code 4."""
    with pytest.raises(_errors.ConformanceError, match="said"):
        raise getattr(_errors, name)("said")


def test_every_class_of_the_file_is_known_here():
    """A new one is put among those above, or is no error of the input."""
    classes = {name for name, value in vars(_errors).items() if isinstance(value, type)}
    assert classes == {"ConformanceError", "NotProvided", *OF_THE_SUITE}


@pytest.mark.parametrize("name", [name for name in OF_THE_SUITE if name != "RankError"])
def test_value_that_cannot_be_used_is_a_value_error(name):
    """And what went wrong in a process is none."""
    assert issubclass(getattr(_errors, name), ValueError)
    assert not issubclass(_errors.RankError, ValueError)


def test_what_is_not_provided_is_a_missing_attribute_and_no_bad_input():
    """`hasattr` answers for a part that says so, and a run goes on."""

    class Part:
        @property
        def answer(self):
            raise NotProvided("there is no answer")

    assert not hasattr(Part(), "answer")
    assert not issubclass(NotProvided, _errors.ConformanceError)
