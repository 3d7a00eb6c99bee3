"""Time lines and curves: what is drawn stands where it belongs, and is whole XML."""

import re
import xml.etree.ElementTree as ET

import pytest

from infra.reporting import curves, svg, timeline
from infra.reporting.curves import Panel
from infra.telemetry.system_metrics import AT

SVG = "{http://www.w3.org/2000/svg}"
MEASURES = {
    "draw": {"began_at": 1000.1, "seconds": 0.1},
    "roll_out": {"began_at": 1001.0, "seconds": 10.0},
    "train": {"began_at": 1012.0, "seconds": 8.0},
    "wake": {"began_at": 900.0, "seconds": 1.0},
    "old": {"seconds": 1.0},
}


def bars(picture: str) -> dict[str, tuple[float, float]]:
    """By name: where a bar begins and how wide it is."""
    found = {}
    for rect in ET.fromstring(picture).iter(f"{SVG}rect"):
        title = rect.find(f"{SVG}title")
        if title is not None and title.text:
            found[title.text.split()[0]] = (float(rect.attrib["x"]), float(rect.attrib["width"]))
    return found


def test_work_stands_in_its_lane_from_its_beginning_to_its_end() -> None:
    spans = timeline.spans_of(1000.0, MEASURES, {}, {})
    assert [(span.lane, span.name) for span in spans] == [("CPU, store", "draw"), ("engine", "roll_out"), ("trainer", "train")]
    assert (spans[1].begin, spans[1].end) == (1.0, 11.0)


def test_the_trainers_phases_stand_for_its_time() -> None:
    spans = timeline.spans_of(1000.0, MEASURES, {"import": 1013.0, "train": 1016.0}, {"import": 3.0, "train": 3.5})
    assert [span.name for span in spans if span.lane == "trainer"] == ["start", "import", "train"]
    assert spans[2] == ("trainer", "start", 12.0, 13.0)


def test_phases_of_an_earlier_attempt_are_left_out() -> None:
    spans = timeline.spans_of(1000.0, MEASURES, {"import": 513.0}, {"import": 3.0})
    assert [span.name for span in spans if span.lane == "trainer"] == ["train"]


def test_bars_are_as_long_as_the_work_was() -> None:
    drawn = bars(timeline.picture("r, step 0", timeline.spans_of(1000.0, MEASURES, {}, {}), [], 1000.0))
    second = drawn["roll_out"][1] / 10
    assert drawn["train"][1] == pytest.approx(8 * second, abs=0.2)
    assert drawn["train"][0] - drawn["roll_out"][0] == pytest.approx(11 * second, abs=0.2)


def test_memory_is_drawn_under_it_and_gpus_are_added_up() -> None:
    rows = [
        {
            AT: 1000.0 + n,
            "system/engine_memory_megabytes": 512.0 * n,
            "system/gpu_0_memory_usage_megabytes": 1024.0,
            "system/gpu_1_memory_usage_megabytes": 2048.0,
        }
        for n in range(-2, 5)
    ]
    picture = timeline.picture("r, step 0", timeline.spans_of(1000.0, MEASURES, {}, {}), rows, 1000.0)
    lines = {line.attrib["stroke"]: line.attrib["points"].split() for line in ET.fromstring(picture).iter(f"{SVG}polyline")}
    assert [len(points) for points in lines.values()] == [5, 5]
    assert "GPU memory" in picture
    heights = [float(point.split(",")[1]) for point in lines[svg.COLORS[0]]]
    assert heights == sorted(heights, reverse=True)
    gpu = float(lines[svg.COLORS[2]][0].split(",")[1])
    assert heights[0] - gpu == pytest.approx(1.5 * (heights[0] - heights[-1]), abs=0.2), (
        "3 GiB of GPUs beside 2 GiB of the engine"
    )


def test_a_step_of_which_nothing_is_known_has_a_picture() -> None:
    ET.fromstring(timeline.picture("r, step 0", [], [], 0.0))


def test_names_cannot_break_the_picture() -> None:
    ET.fromstring(timeline.picture('<script>"&', [timeline.Span("engine", "<b>&", 0.0, 1.0)], [], 0.0))


def test_curves_go_through_their_points() -> None:
    picture = curves.picture([Panel("mean reward", {"": [(0, 0.0), (1, 1.0), (2, 0.5)]}), Panel("nothing", {"": []})])
    [line] = ET.fromstring(picture).iter(f"{SVG}polyline")
    points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    (x0, y0), (x1, y1), (x2, y2) = points
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y1 < y2 < y0 and y2 == pytest.approx((y0 + y1) / 2, abs=0.2)
    assert all(curves.TOP < y < curves.HEIGHT - curves.BOTTOM + 0.1 and curves.LEFT - 0.1 < x < curves.WIDTH for x, y in points)
    assert y0 - y1 > 0.7 * (curves.HEIGHT - curves.TOP - curves.BOTTOM), "half of the panel is empty"
    assert "nothing" not in picture


@pytest.mark.parametrize("values", [[0.0], [3.0, 3.0], [-1e-9, 1e-9], [1e6, 2e6]])
def test_any_range_has_a_picture(values: list[float]) -> None:
    picture = curves.picture([Panel("x", {"": [(float(step), value) for step, value in enumerate(values)]})])
    assert "nan" not in picture and len(re.findall("<circle", picture)) == len(values)


def test_a_run_without_steps_has_a_picture() -> None:
    ET.fromstring(curves.picture([]))


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.0, 23.4), (-0.03, 0.02), (999.0, 1001.0), (0.0, 86400.0)])
def test_ticks_are_few_round_and_within(low: float, high: float) -> None:
    found = svg.ticks(low, high)
    assert 2 <= len(found) <= svg.MAX_TICKS and low <= found[0] and found[-1] <= high
    assert all(len(f"{tick:g}") <= 6 for tick in found)
