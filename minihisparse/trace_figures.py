"""The figures of `trace replay` and `trace size`: data in, a matplotlib figure out.

    plot_miss_rate    misses over decode steps, a line per cache: the paper's Figure 6
    plot_reuse        a heat map: how far back each layer's selections reach
    plot_sizing       misses, predicted TPOT and throughput over B

Data is plain dicts and lists, rates in 0..1; style, and how data is saved beside the picture:
`plots.py`. It deliberately does not know traces or caches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from minihisparse.plots import COLOURS, new_figure, percent, tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LINE_COLOURS = [*COLOURS, "#7a5195", "#222222", "#8c8c8c", "#b58900", "#7fb3d5"]
LINE_STYLES = ["-", "--", ":", "-."]
LINES_PER_STYLE = 6  # the six caches of Figure 6 are solid
MISS_RATE_POINTS = 50  # at most twice as many of a line
TICK_RATIO = 1.2  # of two numbers that can be read beside each other


def plot_miss_rate(data: Mapping[str, Any]) -> Figure:
    """Miss rates over decode steps, one line per cache: the paper's Figure 6.

    data: "config": str; "by_step": {label: list of miss rates in 0..1, from step 1}, lists of one
    length; "mean": {label: miss rate}, for the legend. Each point is the mean of a window of steps,
    so that lines can be told apart. Raises ValueError if there are no steps, or not as many in all
    lists.
    """
    by_step = data["by_step"]
    lengths = {len(rates) for rates in by_step.values()}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(f"by_step has lists of {sorted(lengths)} steps, expected one length")
    (steps,) = lengths
    window = max(1, steps // MISS_RATE_POINTS)
    figure = new_figure(10, 4.6)
    axes = figure.subplots()
    for number, (label, rates) in enumerate(by_step.items()):
        starts = range(0, steps, window)
        parts = [percent(rates[start : start + window]) for start in starts]
        means = [sum(part) / len(part) for part in parts]
        axes.plot(
            [start + (len(part) + 1) / 2 for start, part in zip(starts, parts, strict=True)],
            means,
            linewidth=1.5,
            linestyle=LINE_STYLES[number // LINES_PER_STYLE % len(LINE_STYLES)],
            color=LINE_COLOURS[number % len(LINE_COLOURS)],
            label=f"{label} ({data['mean'][label]:.1%})",
        )
    means = f", means of {window} steps" if window > 1 else ""
    axes.set(xlabel="decode step", ylabel=f"misses (% of selected records{means})")
    axes.set_ylim(bottom=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    tidy(axes)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.suptitle(f"Selected records that a cache has to fetch, all layers\n{data['config']}")
    return figure


def plot_reuse(data: Mapping[str, Any]) -> Figure:
    """A heat map: how far back each layer reaches, in slots that plain LRU needs.

    data: "config": str; "sizes": slots, ascending; "shares": [layers][sizes + 1], each the share of
    selected records in 0..1 that misses in the size before (or at all) and not in this one; the
    last column misses in every size. Raises ValueError if a row has another number of columns.
    """
    sizes, shares = data["sizes"], data["shares"]
    wrong = [len(row) for row in shares if len(row) != len(sizes) + 1]
    if wrong or not shares:
        raise ValueError(f"shares has rows of {wrong} columns, expected {len(sizes) + 1}")
    figure = new_figure(1.2 * len(sizes) + 5, min(8.0, 2.4 + 0.17 * len(shares)))
    axes = figure.subplots()
    cells = [percent(row) for row in shares]
    image = axes.imshow(cells, vmin=0, vmax=100, cmap="viridis", aspect="auto")
    for layer, row in enumerate(cells):
        for column, value in enumerate(row):
            colour = "black" if value > 60 else "white"
            axes.text(
                column, layer, f"{value:.1f}", ha="center", va="center", color=colour, fontsize=6
            )
    labels = [f"<= {sizes[0]}", *(f"<= {size}" for size in sizes[1:]), f"> {sizes[-1]}"]
    axes.set_xticks(range(len(labels)), labels)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel="reuse distance: slots that plain LRU needs for a hit", ylabel="layer")
    figure.colorbar(image, ax=axes, label="selected records (%)", pad=0.01)
    figure.suptitle(f"How far back a layer's selections reach\n{data['config']}")
    return figure


def plot_sizing(data: Mapping[str, Any]) -> Figure:
    """Misses over B, and if there is a prediction, TPOT and throughput over it, the best B dashed.

    data: "config": str; "curve": rows by B of plain LRU {device_buffer_size miss_rate}, and, all or
    none, {tpot_ms tokens_per_second} (None: no request fits); "engine": the same of the engine's
    rule, at some B; "layers": {device_buffer_size: [...], least: [...], most: [...]}, miss rates of
    single layers; "best": B or None. Raises ValueError if a curve has no points.
    """
    curve, engine, layers = data["curve"], data["engine"], data["layers"]
    if not curve or not engine:
        raise ValueError(f"got {len(curve)} points of LRU, {len(engine)} of the engine's rule")
    predicted = "tpot_ms" in curve[0]
    figure = new_figure(13 if predicted else 6, 4.4)
    panels = figure.subplots(1, 3 if predicted else 1, squeeze=False)[0]
    panels[0].fill_between(
        layers["device_buffer_size"],
        percent(layers["least"]),
        percent(layers["most"]),
        color="0.9",
        label="single layers, least to most",
    )
    _draw(panels[0], data, "miss_rate", "misses (% of selected records)", 100)
    if predicted:
        _draw(panels[1], data, "tpot_ms", "predicted TPOT (ms, from 0)")
        _draw(panels[2], data, "tokens_per_second", "predicted decode throughput (tokens/s)")
    panels[0].legend(frameon=False)
    figure.suptitle(f"What B slots per request and layer give\n{data['config']}")
    return figure


def _draw(axes, data: Mapping[str, Any], key: str, label: str, scale: float = 1) -> None:
    """One quantity over B: a line by plain LRU, points by the engine's rule."""
    for rows, style in (
        (data["curve"], {"color": COLOURS[2], "label": "plain LRU, all B"}),
        (
            data["engine"],
            {"color": COLOURS[0], "label": "the engine's rule", "marker": "o", "linestyle": "none"},
        ),
    ):
        rows = [row for row in rows if row[key] is not None]
        sizes = [row["device_buffer_size"] for row in rows]
        axes.plot(sizes, [scale * row[key] for row in rows], **style)
    if data["best"] is not None:
        style = {"color": "black", "linestyle": "--", "linewidth": 1}
        axes.axvline(data["best"], label=f"best B: {data['best']}", **style)
    axes.set(xlabel="B, device_buffer_size (slots, log)", ylabel=label, xscale="log")
    ticks: list[int] = []
    for row in data["engine"]:
        if not ticks or row["device_buffer_size"] >= TICK_RATIO * ticks[-1]:
            ticks.append(row["device_buffer_size"])
    axes.set_xticks(ticks, [str(tick) for tick in ticks], rotation=45)
    axes.xaxis.minorticks_off()
    axes.set_ylim(bottom=0)
    tidy(axes)
