"""Pictures of the documentation."""

from xml.dom import minidom

import pytest

from dev.plots import Line, Plot, svg


@pytest.mark.parametrize("logarithmic", [False, True])
def test_a_plot_is_a_small_picture_and_the_same_every_time(logarithmic):
    lines = [Line("one & two", [(2, 1.5), (8, 2.5)], [(1.4, 1.6), (2.4, 2.6)]), Line("three", [(2, 30.0), (8, 20.0)])]
    plot = Plot("p", "drafts", "AL", lines, logarithmic=logarithmic)
    text = svg(plot)
    assert text == svg(plot)
    assert "one &amp; two" in text
    assert len(text) < 40_000
    uses = minidom.parseString(text).getElementsByTagName("use")  # noqa: S318 - our own
    marks = [each for each in uses if "fill:" in each.getAttribute("style")]
    (x0, y0), (x1, y1), (x2, y2), (x3, y3), *legend = (
        (float(each.getAttribute("x")), float(each.getAttribute("y"))) for each in marks
    )
    assert x0 == x2 < x1 == x3
    assert y2 < y3 < y1 < y0  # from above: the larger, the higher
    assert len(legend) == 2


def test_a_plot_of_one_point_has_axes():
    assert "AL" in svg(Plot("p", "x", "AL", [Line("one", [(0, 0)])]))
