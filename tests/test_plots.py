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
