"""Lines over a number, as SVG: the same bytes for the same figures."""

import math
from collections.abc import Sequence
from html import escape

from dev.results.finding import Plot

WIDTH, HEIGHT = 480, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 14, 44
COLOURS = ("#1b6ca8", "#c8553d", "#4f8a3c", "#7d5ba6")
TICKS = 5
FONT = 'font-family="sans-serif"'


def svg(plot: Plot) -> str:
    """Return the picture."""
    points = [point for line in plot.lines for point in line.points]
    heights = [y for _, y in points] + [each for line in plot.lines for pair in line.intervals for each in pair]
    x_ticks, y_ticks = _ticks([x for x, _ in points]), _ticks(heights)

    def across(x: float) -> str:
        return _place(x, x_ticks, LEFT, WIDTH - RIGHT)

    def down(y: float) -> str:
        return _place(y, y_ticks, HEIGHT - BOTTOM, TOP)

    middle = f"{(TOP + HEIGHT - BOTTOM) / 2:g}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-size="11" {FONT}>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for tick in y_ticks:
        parts += [
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{down(tick)}" y2="{down(tick)}" stroke="#dddddd"/>',
            f'<text x="{LEFT - 6}" y="{down(tick)}" text-anchor="end" dominant-baseline="middle">{tick:g}</text>',
        ]
    for tick in x_ticks:
        parts.append(f'<text x="{across(tick)}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{tick:g}</text>')
    parts += [
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2:g}" y="{HEIGHT - 8}" text-anchor="middle">{escape(plot.x)}</text>',
        f'<text x="12" y="{middle}" text-anchor="middle" transform="rotate(-90 12 {middle})">{escape(plot.y)}</text>',
    ]
    for index, line in enumerate(plot.lines):
        colour = COLOURS[index % len(COLOURS)]
        for (x, _), (low, high) in zip(line.points, line.intervals, strict=False):
            parts.append(
                f'<line x1="{across(x)}" x2="{across(x)}" y1="{down(low)}" y2="{down(high)}" stroke="{colour}" '
                'stroke-opacity="0.5"/>'
            )
        path = " ".join(f"{across(x)},{down(y)}" for x, y in line.points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{across(x)}" cy="{down(y)}" r="3" fill="{colour}"/>' for x, y in line.points]
        height = TOP + 8 + 16 * index
        parts += [
            f'<rect x="{LEFT + 10}" y="{height - 4}" width="14" height="4" fill="{colour}"/>',
            f'<text x="{LEFT + 30}" y="{height + 2}">{escape(line.name)}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _ticks(values: Sequence[float]) -> list[float]:
    """Return round numbers from below the least to above the greatest value."""
    low, high = min(values), max(values)
    rough = (high - low or abs(high) or 1.0) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(each * power for each in (1, 2, 5, 10) if each * power >= rough * 0.999)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(index * step, 10) for index in range(first, max(last, first + 1) + 1)]


def _place(value: float, ticks: Sequence[float], begin: float, end: float) -> str:
    share = (value - ticks[0]) / (ticks[-1] - ticks[0])
    return f"{begin + share * (end - begin):.1f}"
