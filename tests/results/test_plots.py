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
    drawn = [use for use in uses if use.parentNode.parentNode.getAttribute("id").startswith("line2d")]
    marks = [
        (float(use.getAttribute("x")), float(use.getAttribute("y"))) for use in drawn if "fill" in str(use.toxml())
    ]
    assert len(marks) >= 4


def test_a_plot_of_one_point_has_axes():
    assert "AL" in svg(Plot("p", "x", "AL", [Line("one", [(0, 0)])]))
