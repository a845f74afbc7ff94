"""Lines over a number, as SVG: the same bytes for the same figures."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

INCHES = (4.8, 3.2)
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # words stay words
    "svg.hashsalt": "osprey",  # of ids, which are random otherwise
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "axes.spines.top": False,
    "axes.spines.right": False,
}


@dataclass(frozen=True)
class Line:
    """Points from the left to the right, and their intervals where there are any."""

    name: str
    points: Sequence[tuple[float, float]]
    intervals: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True)
class Plot:
    """A picture.

    Attributes:
        name: of its file.
        x: what the horizontal axis shows.
        y: what the vertical one shows.
        logarithmic: both axes are; all points are positive then.
    """

    name: str
    x: str
    y: str
    lines: Sequence[Line]
    logarithmic: bool = False


def svg(plot: Plot) -> str:
    """Return the picture."""
    with mpl.rc_context({**mpl.rcParamsDefault, **STYLE}):  # not the reader's own settings
        figure = Figure(INCHES, layout="constrained")
        axes = figure.add_subplot(xlabel=plot.x, ylabel=plot.y)
        if plot.logarithmic:
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
        for line in plot.lines:
            xs, ys = zip(*line.points, strict=True)
            (drawn,) = axes.plot(xs, ys, marker="o", label=line.name)
            if line.intervals:
                low, high = zip(*line.intervals, strict=True)
                axes.vlines(xs, low, high, colors=drawn.get_color(), alpha=0.5)
        axes.legend()
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()
