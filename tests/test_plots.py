"""Figures show the data they were given, say their units, and are saved with their data.

Guards against: a picture that cannot be made again, an axis without a unit or a hidden baseline, a
window that opens, and an ImportError that does not say what to install.
"""

import json
import sys
from types import SimpleNamespace

import pytest

from minihisparse import plots
from minihisparse.config import HiSparseConfig

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


# ---- bench decode and bench serve ----


def decode_row(mode: str, rate: float, **varied: float | None) -> dict:
    """A row whose latencies follow from its rate."""
    return {
        "mode": mode,
        "hbm_budget_gib": None,
        "input_len": 100,
        "decode_tokens_per_second": rate,
        "tokens_per_second": rate / 2,
        "ttft_ms": {"mean": 10 * rate},
        "tpot_ms": {"mean": rate / 4},
    } | varied


def decode_rows(key: str, values: list[float], **fixed) -> list[dict]:
    """Not in order; full is slower. With a budget, clients are as many as it holds."""
    rows = []
    for value in values:
        for factor, mode in ((1, "full"), (8, "hisparse")):
            clients = {"concurrency": factor * int(value)} if key == "hbm_budget_gib" else {}
            rows.append(decode_row(mode, 100 * factor + value, **fixed, **clients, **{key: value}))
    return rows


@pytest.mark.parametrize(
    ("key", "label", "fixed"),
    [
        ("hbm_budget_gib", "device memory for KV, selector and tables (GiB), log", {}),
        ("input_len", "prompt (tokens), log", {"hbm_budget_gib": 2.0, "concurrency": 3}),
        ("request_rate", "arrivals (requests/s), log", {"hbm_budget_gib": 2.0}),
        ("concurrency", "concurrency (clients), log", {"hbm_budget_gib": 2.0}),
    ],
)
def test_decode_has_a_line_per_mode_over_what_was_varied(key, label, fixed):
    data = {"config": "tiny, K = 4", "rows": decode_rows(key, [4, 1, 2], **fixed)}
    figure = plots.plot_decode(data)
    throughput, ttft, tpot = figure.axes
    assert [line.get_label() for line in throughput.lines] == ["full", "hisparse"]
    full, hisparse = (line.get_xydata().tolist() for line in throughput.lines)
    assert full == [[1, 101], [2, 102], [4, 104]]
    assert hisparse == [[1, 801], [2, 802], [4, 804]]
    assert ttft.lines[0].get_xydata().tolist() == [[50.5, 1010], [51, 1020], [52, 1040]]
    assert tpot.lines[1].get_xydata().tolist() == [[400.5, 200.25], [401, 200.5], [402, 201]]
    assert throughput.get_xlabel() == label
    assert [text.get_text() for text in throughput.get_xticklabels()] == ["1", "2", "4"]
    assert throughput.get_ylabel() == "decode throughput (tokens/s), log"
    assert throughput.get_xscale() == throughput.get_yscale() == ttft.get_yscale() == "log"
    assert tpot.get_ylim()[0] == 0 and "from 0" in tpot.get_ylabel()
    assert all("(tokens/s)" in axes.get_xlabel() for axes in (ttft, tpot))
    colours = [[line.get_color() for line in axes.lines] for axes in figure.axes]
    assert colours[0] == colours[1] == colours[2] and len(set(colours[0])) == 2
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["full", "hisparse"]
    assert data["config"] in figure.get_suptitle()


def test_decode_of_two_things_varied():
    """A line for each mode and value of the second: no line that jumps between them."""
    rows = [
        row
        for input_len in (900, 100)
        for row in decode_rows("hbm_budget_gib", [1, 2], input_len=input_len)
    ]
    (throughput, *_) = plots.plot_decode({"config": "", "rows": rows}).axes
    assert [(line.get_label(), len(line.get_xdata())) for line in throughput.lines] == [
        (f"{mode}, {tokens} tokens", 2) for tokens in (900, 100) for mode in ("full", "hisparse")
    ]
    colours = [line.get_color() for line in throughput.lines]
    markers = [line.get_marker() for line in throughput.lines]
    assert colours[0] == colours[2] != colours[1] == colours[3]  # per mode
    assert markers[0] == markers[1] != markers[2] == markers[3]  # per length


def test_decode_of_one_point_per_mode():
    rows = [decode_row("full", 10, concurrency=1), decode_row("hisparse", 20, concurrency=1)]
    (throughput, *_) = plots.plot_decode({"config": "", "rows": rows}).axes
    assert throughput.get_xlabel() == "prompt (tokens), log"
    assert [line.get_xydata().tolist() for line in throughput.lines] == [[[100, 10]], [[100, 20]]]


def test_decode_leaves_out_what_has_no_place():
    """transformers has no budget; one token per answer gives no decode rate, two no percentiles."""
    rows = decode_rows("hbm_budget_gib", [1, 2])
    rows.append(decode_row("transformers", 30, concurrency=1))
    rows.append(decode_row("no-io", 30, hbm_budget_gib=1) | {"decode_tokens_per_second": None})
    rows[0] |= {"tpot_ms": None}
    throughput, ttft, tpot = plots.plot_decode({"config": "", "rows": rows}).axes
    assert [line.get_label() for line in throughput.lines] == ["full", "hisparse"]
    assert [len(line.get_xdata()) for line in ttft.lines] == [2, 2]
    assert [len(line.get_xdata()) for line in tpot.lines] == [1, 2]


@pytest.mark.parametrize("rows", [[], [decode_row("full", 1) | {"decode_tokens_per_second": None}]])
def test_decode_without_rows_is_refused(rows):
    with pytest.raises(ValueError, match="no rows to draw"):
        plots.plot_decode({"config": "", "rows": rows})


def test_decode_is_saved_with_its_data(tmp_path):
    data = {"config": "tiny", "rows": decode_rows("concurrency", [1, 2])}
    path = plots.save(plots.plot_decode(data), data, tmp_path / "decode.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert json.loads(path.with_suffix(".json").read_text(encoding="utf-8")) == data


def test_config_lines():
    report = {"dtype": "bfloat16", "device_name": "a GPU", "output_len": 64}
    hisparse = HiSparseConfig(top_k=256)
    args = SimpleNamespace(model="/models/tiny", hisparse=hisparse)  # bench serve's
    expected = "tiny, bfloat16, a GPU, K = 256, B = 512, 64 new tokens"
    assert plots.config_line(report, args) == expected
    args.arrivals = "/data/monday.csv"
    line = plots.config_line(report | {"output_len": None}, args)
    assert line.endswith("B = 512, arrivals of monday.csv")

    args = SimpleNamespace(
        model=None,
        random_weights="configs/8b.json",
        num_layers=4,
        selections="traces/long.safetensors",
        hisparse=HiSparseConfig(top_k=256, cache_size_mb=1.5),
    )
    assert plots.config_line(report, args) == (
        "8b.json, random weights, 4 layers, bfloat16, a GPU, K = 256, 1.5 MiB of slots, "
        "64 new tokens, selections long.safetensors"
    )
    args.hisparse = HiSparseConfig(top_k=256, device_buffer_size=(512, 768))
    assert "K = 256, B per layer, 64 new tokens" in plots.config_line(report, args)
    args.num_layers, args.selections = None, "synthetic:miss=0.1"
    line = plots.config_line(report, args)
    assert line.startswith("8b.json, random weights, bfloat16")
    assert line.endswith("selections synthetic:miss=0.1")


# ---- files and windows ----


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
