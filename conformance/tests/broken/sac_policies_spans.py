"""Broken spans of the area sac-policies; each fails what it declares."""

from contextlib import nullcontext

from torch.utils._python_dispatch import _disable_current_modes

from torchparts_conformance.mutants import mutant, overlay

AREA = "sac-policies"


@mutant(area=AREA, kills={"SP-190", "SP-191"})
def spans_are_plain_calls(part):
    """Gives the function back as it is."""

    def span(function, label):
        part.span(function, label)
        return function

    return overlay(part, span=span)


@mutant(area=AREA, kills={"SP-190"})
def spans_have_another_name(part):
    """Names every span alike."""

    def span(function, label):
        del label
        return part.span(function, "span")

    return overlay(part, span=span)


@mutant(area=AREA, kills={"SP-192"})
def writes_of_spans_are_not_seen(part):
    """Runs the code of spans again where no mode sees what it writes to."""

    def span(function, label):
        runs = []

        def run(*args, **kwargs):
            runs.append(label)
            with _disable_current_modes() if len(runs) > 1 else nullcontext():
                return function(*args, **kwargs)

        return part.span(run, label)

    return overlay(part, span=span)
