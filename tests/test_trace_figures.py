"""The figures of traces show the data they were given, and say their units.

Guards against: lines that look alike, a mean drawn at the wrong step, a cell under another layer, a
best B that is not marked, a prediction drawn where there is none.
"""

import pytest

from minihisparse import trace_figures

pytest.importorskip("matplotlib")

MISS_RATE = {
    "config": "tiny, K = 4",
    "by_step": {"B = K": [1.0, 0.5, 0.75], "B = 2K": [1.0, 0.25, 0.0]},
    "mean": {"B = K": 0.7512, "B = 2K": 0.4},
}
REUSE = {
    "config": "tiny, K = 4",
    "top_k": 4,
    "sizes": [4, 8],
    "shares": [[0.5, 0.25, 0.25], [0.875, 0.125, 0.0], [0.0, 0.0, 1.0]],
}


def test_miss_rates_in_percent_from_step_1_and_from_zero():
    figure = trace_figures.plot_miss_rate(MISS_RATE)
    (axes,) = figure.axes
    assert [line.get_label() for line in axes.lines] == ["B = K (75.1%)", "B = 2K (40.0%)"]
    assert axes.lines[0].get_xydata().tolist() == [[1, 100], [2, 50], [3, 75]]
    assert axes.get_ylim()[0] == 0
    assert axes.get_ylabel() == "misses (% of selected records)" and axes.get_xlabel()
    assert MISS_RATE["config"] in figure.get_suptitle()
    assert len(figure.legends[0].get_texts()) == 2


def test_miss_rates_of_many_steps_are_means():
    """Of 250 steps in windows of five; the last of 254 has four. Each is drawn in its middle."""
    rates = [step % 5 / 10 for step in range(254)]
    data = {"config": "", "by_step": {"B = K": rates}, "mean": {"B = K": 0.2}}
    (axes,) = trace_figures.plot_miss_rate(data).axes
    points = axes.lines[0].get_xydata().tolist()
    assert points[0] == pytest.approx([3, 20]) and points[1] == pytest.approx([8, 20])
    assert len(points) == 51 and points[-1] == pytest.approx([252.5, 15])
    assert "means of 5 steps" in axes.get_ylabel()


def test_no_two_lines_of_a_figure_look_alike():
    by_step = {f"cache {i}": [0.5, 0.25] for i in range(20)}
    data = {"config": "", "by_step": by_step, "mean": dict.fromkeys(by_step, 0.5)}
    (axes,) = trace_figures.plot_miss_rate(data).axes
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.lines}) == 20


@pytest.mark.parametrize("by_step", [{}, {"a": []}, {"a": [1.0], "b": [1.0, 0.5]}])
def test_miss_rates_without_steps_are_refused(by_step):
    with pytest.raises(ValueError, match="expected one length"):
        trace_figures.plot_miss_rate(MISS_RATE | {"by_step": by_step})


def test_reuse_has_a_cell_per_layer_and_size():
    figure = trace_figures.plot_reuse(REUSE)
    axes, colour_bar = figure.axes
    assert axes.images[0].get_array().tolist() == [[50, 25, 25], [87.5, 12.5, 0], [0, 0, 100]]
    assert axes.images[0].get_clim() == (0, 100)
    assert [text.get_text() for text in axes.get_xticklabels()] == ["<= 4", "<= 8", "> 8"]
    assert [text.get_text() for text in axes.texts[:3]] == ["50.0", "25.0", "25.0"]
    assert axes.get_ylim() == (2.5, -0.5)  # layer 0 on top
    assert "slots" in axes.get_xlabel() and "%" in colour_bar.get_ylabel()
    assert REUSE["config"] in figure.get_suptitle()


@pytest.mark.parametrize("shares", [[], [[0.5, 0.5]], [[0.5, 0.25, 0.25], [1.0]]])
def test_reuse_of_another_shape_is_refused(shares):
    with pytest.raises(ValueError, match="expected 3"):
        trace_figures.plot_reuse(REUSE | {"shares": shares})


# ---- trace size ----

SIZING = {
    "config": "t, K = 4",
    "curve": [
        {"device_buffer_size": b, "miss_rate": r, "tpot_ms": 2.0 * r, "tokens_per_second": t}
        for b, r, t in ((4, 0.5, 10.0), (6, 0.25, 20.0), (8, 0.125, None))
    ],
    "engine": [
        {"device_buffer_size": 4, "miss_rate": 0.5, "tpot_ms": 1.0, "tokens_per_second": 10.0},
        {"device_buffer_size": 8, "miss_rate": 0.2, "tpot_ms": 0.4, "tokens_per_second": None},
    ],
    "layers": {"device_buffer_size": [4, 6, 8], "least": [0.4, 0.2, 0.1], "most": [0.6, 0.3, 0.2]},
    "best": 6,
}


def test_sizing_has_a_panel_for_each_quantity():
    """Rates in percent; what no request fits in is left out; the best B is marked in each."""
    misses, tpot, throughput = trace_figures.plot_sizing(SIZING).axes
    lru, engine, best = misses.lines
    assert lru.get_xydata().tolist() == [[4, 50], [6, 25], [8, 12.5]]
    assert engine.get_xydata().tolist() == [[4, 50], [8, 20]]
    assert best.get_xdata() == [6, 6] and best.get_label() == "best B: 6"
    assert tpot.lines[0].get_xydata().tolist() == [[4, 1], [6, 0.5], [8, 0.25]]
    assert throughput.lines[0].get_xydata().tolist() == [[4, 10], [6, 20]]
    for axes, unit in ((misses, "%"), (tpot, "ms"), (throughput, "tokens/s")):
        assert unit in axes.get_ylabel() and "slots" in axes.get_xlabel()
        assert axes.get_ylim()[0] == 0 and axes.get_xscale() == "log"


def test_sizing_without_a_prediction_shows_misses_alone():
    keys = ("device_buffer_size", "miss_rate")
    rows = {
        name: [{key: row[key] for key in keys} for row in SIZING[name]]
        for name in ("curve", "engine")
    }
    figure = trace_figures.plot_sizing(SIZING | rows | {"best": None})
    (axes,) = figure.axes
    assert len(axes.lines) == 2 and SIZING["config"] in figure.get_suptitle()


@pytest.mark.parametrize("name", ["curve", "engine"])
def test_sizing_without_points_is_refused(name):
    with pytest.raises(ValueError, match="got . points of LRU, . of the engine's rule"):
        trace_figures.plot_sizing(SIZING | {name: []})
