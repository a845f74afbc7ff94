"""A line plot as SVG, the same bytes for the same points; both axes are logarithmic."""

import math
from collections.abc import Mapping, Sequence

_WIDTH, _HEIGHT = 420, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 150, 34, 44
_FONT = 'font-family="sans-serif" font-size="11"'
_COLOURS = ("#1f5fa8", "#c0504d", "#4f8f3c", "#7f5fa8")

Curve = Sequence[tuple[float, float]]


def log_log(title: str, x: str, y: str, curves: Mapping[str, Curve]) -> str:
    """Draw curves of positive points.

    Args:
        title: above.
        x: what the horizontal axis shows.
        y: what the vertical one shows.
        curves: points by name, each from the left to the right.
    """
    points = [point for curve in curves.values() for point in curve]
    xs, ys = _powers([px for px, _ in points], 2), _powers([py for _, py in points], 10)
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def across(value: float) -> float:
        return _LEFT + width * math.log(value / xs[0]) / math.log(xs[-1] / xs[0])

    def down(value: float) -> float:
        return _TOP + height * (1 - math.log(value / ys[0]) / math.log(ys[-1] / ys[0]))

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" {_FONT}>',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_LEFT, 18, title, "start", 'font-size="13"'),
        _text(_LEFT + width / 2, _HEIGHT - 8, x, "middle"),
        _text(14, _TOP + height / 2, y, "middle", f'transform="rotate(-90 14 {_TOP + height / 2:.1f})"'),
    ]
    for value in xs:
        lines += [
            _line([(across(value), _TOP), (across(value), _TOP + height)], "#dddddd", 1),
            _text(across(value), _TOP + height + 16, _short(value), "middle"),
        ]
    for value in ys:
        lines += [
            _line([(_LEFT, down(value)), (_LEFT + width, down(value))], "#dddddd", 1),
            _text(_LEFT - 6, down(value) + 4, _short(value), "end"),
        ]
    for index, (name, curve) in enumerate(curves.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        placed = [(across(px), down(py)) for px, py in curve]
        lines.append(_line(placed, colour, 2))
        lines += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{colour}"/>' for px, py in placed]
        lines.append(_text(_LEFT + width + 8, _TOP + 12 + 16 * index, name, "start", f'fill="{colour}"'))
    return "\n".join([*lines, "</svg>"]) + "\n"


def _powers(values: Sequence[float], base: int) -> list[float]:
    """Return the powers of a base around some values, at least two."""
    first = math.floor(math.log(min(values), base) + 1e-9)
    last = max(first + 1, math.ceil(math.log(max(values), base) - 1e-9))
    return [float(base) ** exponent for exponent in range(first, last + 1)]


def _short(value: float) -> str:
    if value >= 1024 and math.log2(value).is_integer():
        return f"{value / 1024:g}k"
    return f"{value:g}"


def _text(x: float, y: float, words: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more and " "}{more}>{words}</text>'


def _line(points: Curve, colour: str, width: int) -> str:
    where = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{where}" fill="none" stroke="{colour}" stroke-width="{width}"/>'
