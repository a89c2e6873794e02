"""Charts as a picture, through matplotlib."""

from __future__ import annotations

import io
from importlib import import_module
from typing import Any

from ..._errors import MissingExtraError
from ._chart import Chart, Show
from ._colours import AREAS, PHASES
from ._memory_line import MemoryLine

NAMED = 40  # a name is written on frames of more than this part of the whole


def png(chart: Chart) -> bytes:
    """Draw what `page` shows. No window is opened, and pyplot's state is not touched.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        figure = import_module("matplotlib.figure").Figure(layout="constrained")
        import_module("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    except ImportError as error:
        raise MissingExtraError(
            "mod_tracker.to_png: the package matplotlib is not installed, but this output needs "
            "it. Install mod-tracker[plot], or use to_html()."
        ) from error
    rows = 1 + max((frame.depth for frame in chart.drawn), default=0)
    heights = [0.25 * rows + 0.4, *([2.6] if chart.line is not None else [])]
    figure.set_size_inches(10, sum(heights) + 0.8)
    axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    figure.suptitle(chart.title)
    _draw_flame(axes[0], chart, rows)
    if chart.line is not None:
        _draw_memory(axes[1], chart.line, chart.show_time, chart.show_bytes)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=120)
    return file.getvalue()


def _draw_flame(axes: Any, chart: Chart, rows: int) -> None:
    rectangle = import_module("matplotlib.patches").Rectangle
    whole = chart.whole
    used: dict[str, str] = {}
    for frame in chart.drawn:
        done = frame.start
        for phase, amount in frame.amounts.items():
            colour = used.setdefault(phase, PHASES.get(phase, PHASES["forward"]))
            axes.broken_barh([(done, amount)], (frame.depth, 0.94), color=colour)
            done += amount
        axes.plot([done, done], [frame.depth, frame.depth + 0.94], color="white", linewidth=0.8)
        if frame.total * NAMED > whole:
            written = axes.text(
                frame.start, frame.depth + 0.5, f" {frame.label}", va="center", clip_on=True
            )
            shape = rectangle((frame.start, frame.depth), frame.total, 1, transform=axes.transData)
            written.set_clip_path(shape)
    axes.set(xlim=(0, max(whole, 1)), ylim=(rows, 0), yticks=[])
    axes.xaxis.set_major_formatter(lambda value, _: chart.show(int(value)))
    handles = [axes.barh(0, 0, color=colour, label=phase) for phase, colour in used.items()]
    if handles:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False)


def _draw_memory(axes: Any, line: MemoryLine, show_time: Show, show_bytes: Show) -> None:
    moments = [*line.moments, line.end]
    held = [[*area.live, area.live[-1]] for area in line.areas]
    names = [area.name or "(outside)" for area in line.areas]
    colours = [AREAS[i % len(AREAS)] for i in range(len(names))]
    axes.stackplot(moments, held, labels=names, colors=colours, step="post")
    ends = [*(at for at, _ in line.phases[1:]), line.end]
    for (at, phase), end in zip(line.phases, ends, strict=True):
        colour = PHASES.get(phase, PHASES["outside"])
        axes.axvspan(at, end, ymin=0, ymax=0.03, color=colour, linewidth=0)
    axes.set(xlim=(0, max(line.end, 1)), ylim=(-0.03 * line.peak, None), ylabel="bytes alive")
    axes.xaxis.set_major_formatter(lambda value, _: show_time(int(value)))
    axes.yaxis.set_major_formatter(lambda value, _: show_bytes(int(value)))
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize="small")
