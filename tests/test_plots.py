"""Figures show the data they were given, say their units, and are saved with their data.

Guards against: a picture that cannot be made again, an axis without a unit or a hidden baseline, a
window that opens, and an ImportError that does not say what to install.
"""

import json
import sys

import pytest

from minihisparse import plots

pytest.importorskip("matplotlib")

HITS = {
    "config": "tiny, K = 4",
    "by_step": {"B = K": [0.0, 0.5, 0.75], "B = 2K": [0.0, 0.75, 1.0]},
    "by_layer": {"B = K": [0.6, 0.45], "B = 2K": [0.9, 0.8]},
}
OVERLAP = {"config": "tiny, K = 4", "jaccard": [[0.5, 1.0], [0.0, 0.25], [1.0, 0.75]]}


def resolve_row(batch: int, size: int, us: float, us_no_io: float, limit_us: float) -> dict:
    sizes = {"batch": batch, "top_k": 8, "device_buffer_size": size}
    return sizes | {"us": us, "us_no_io": us_no_io, "limit_us": limit_us}


RESOLVE = {
    "config": "made up, K = 8",
    "by_ratio": [resolve_row(16, 8, 50, 10, 30), resolve_row(16, 20, 48, 16, 30)],
    "by_batch": [
        resolve_row(1, 16, 12.5, 13, 2),  # less than without IO: noise
        resolve_row(16, 16, 49, 12, 30),
        resolve_row(64, 16, 160, 14, 120),
    ],
}


def test_hit_rates_in_percent_with_the_config_and_the_baseline():
    figure = plots.plot_hit_rate(HITS)
    left, right = figure.axes
    assert [line.get_label() for line in left.lines] == ["B = K", "B = 2K"]
    assert left.lines[1].get_xydata().tolist() == [[1, 0], [2, 75], [3, 100]]  # steps from 1
    assert right.lines[0].get_xydata().tolist() == [[0, 60], [1, 45]]
    assert left.get_ylim()[0] == 0 and right.get_ylim()[0] == 40
    assert "starts at 40%" in right.get_xlabel()
    assert all("%" in axes.get_ylabel() and axes.get_xlabel() for axes in figure.axes)
    assert HITS["config"] in figure.get_suptitle()


@pytest.mark.parametrize("by_layer", [{"B = K": [0.6]}, {}])
def test_hit_rates_of_other_labels_are_refused(by_layer):
    with pytest.raises(ValueError, match="by_layer"):
        plots.plot_hit_rate(HITS | {"by_layer": by_layer})


def test_overlap_has_a_cell_per_layer_and_step():
    figure = plots.plot_overlap(OVERLAP)
    axes, colour_bar = figure.axes
    image = axes.images[0]
    assert image.get_array().tolist() == OVERLAP["jaccard"]
    assert image.get_clim() == (0, 1)
    assert image.get_extent() == [1.5, 3.5, 2.5, -0.5]  # steps 2 and 3; layer 0 on top
    assert "Jaccard" in colour_bar.get_ylabel()
    assert OVERLAP["config"] in figure.get_suptitle()


def test_resolve_is_stacked_to_its_whole_beside_the_limit():
    figure = plots.plot_resolve(RESOLVE)
    left, right = figure.axes
    for axes, key, labels in (
        (left, "by_ratio", ["1", "2.5"]),
        (right, "by_batch", ["1", "16", "64"]),
    ):
        rows = RESOLVE[key]
        assert [text.get_text() for text in axes.get_xticklabels()] == labels
        below, top = ([bar for bar in bars] for bars in axes.containers)
        assert [bar.get_height() for bar in below] == [min(r["us_no_io"], r["us"]) for r in rows]
        assert [bar.get_y() for bar in top] == [bar.get_height() for bar in below]
        assert [bar.get_y() + bar.get_height() for bar in top] == [row["us"] for row in rows]
        assert all(bar.get_height() >= 0 for bar in top)
        assert [text.get_text() for text in axes.texts] == [f"{row['us']:.0f}" for row in rows]
        assert [set(ln.get_ydata()) for ln in axes.lines] == [{row["limit_us"]} for row in rows]
        assert all(ln.get_linestyle() == "--" for ln in axes.lines)
        assert axes.get_ylim()[0] == 0 and axes.get_ylim()[1] > max(row["us"] for row in rows)
        assert axes.get_ylabel() == "microseconds per call (from 0)"
    assert (left.get_xlabel(), left.get_title()) == ("B / K", "batch 16")
    assert (right.get_xlabel(), right.get_title()) == ("batch (requests)", "B = 16 = 2 K")
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert len(words) == 3 and any("limit" in word for word in words)
    assert RESOLVE["config"] in figure.get_suptitle()


@pytest.mark.parametrize("empty", ["by_ratio", "by_batch"])
def test_resolve_without_rows_is_refused(empty):
    with pytest.raises(ValueError, match="expected some of both"):
        plots.plot_resolve(RESOLVE | {empty: []})


def test_save_writes_a_png_and_its_data(tmp_path):
    path = plots.save(plots.plot_overlap(OVERLAP), OVERLAP, tmp_path / "new" / "overlap.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert json.loads(path.with_suffix(".json").read_text(encoding="utf-8")) == OVERLAP
    assert sorted(p.name for p in path.parent.iterdir()) == ["overlap.json", "overlap.png"]


@pytest.mark.parametrize(
    ("name", "data"), [("overlap.jpg", OVERLAP), ("overlap.png", OVERLAP | {"x": float("nan")})]
)
def test_save_refuses_and_writes_nothing(tmp_path, name, data):
    with pytest.raises(ValueError):
        plots.save(plots.plot_overlap(OVERLAP), data, tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_no_window_and_no_global_state():
    before = "matplotlib.pyplot" in sys.modules
    plots.plot_hit_rate(HITS)
    assert ("matplotlib.pyplot" in sys.modules) == before


def test_without_matplotlib_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"minihisparse\[plots\]"):
        plots.plot_hit_rate(HITS)
