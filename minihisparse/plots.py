"""Figures of what a cache did: data in, a matplotlib figure out.

Needs the extra `plots`; matplotlib is imported when a figure is made. No window is ever opened:
figures are made without pyplot, so they need no display and leave no global state behind.

Data is plain dicts and lists, with a "config" line that says what was run; it becomes part of the
title. `save` writes it as JSON beside the picture, so that a figure can always be made again.

Here are the figures of decoding, Resolve and the tutorials; those of traces are in
`trace_figures.py`. It deliberately does not know models, caches or traces.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ["#c44e52", "#dd8a2c", "#2a6f97", "#4c956c"]
MARKERS = ["o", "s", "^", "D"]
DECODE_AXES = {  # what a row of `bench decode` or `bench serve` was varied in: label, and in short
    "hbm_budget_gib": ("device memory for KV, selector and tables (GiB)", "{} GiB"),
    "input_len": ("prompt (tokens)", "{} tokens"),
    "request_rate": ("arrivals (requests/s)", "{}/s"),
    "concurrency": ("concurrency (clients)", "{} clients"),
}


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, inches. Raises ImportError, naming the extra, if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"figures need matplotlib ({error}); pip install 'minihisparse[plots]'"
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def plot_hit_rate(data: Mapping[str, Any]) -> Figure:
    """Hit rates over decode steps (left) and per layer (right), one line per cache size.

    data: "config": str; "by_step" and "by_layer": {label: list of hit rates in 0..1}, each label in
    both. "by_step" starts at step 1. Raises ValueError if the labels differ or there are none.
    """
    by_step, by_layer = data["by_step"], data["by_layer"]
    if not by_step or list(by_step) != list(by_layer):
        raise ValueError(
            f"by_step has labels {list(by_step)}, by_layer {list(by_layer)}; expected the same, "
            "and at least one"
        )
    figure = new_figure(10, 4)
    left, right = figure.subplots(1, 2)
    for number, label in enumerate(by_step):
        style = {
            "color": COLOURS[number % len(COLOURS)],
            "marker": MARKERS[number % len(MARKERS)],
            "markersize": 5,
            "label": label,
        }
        steps = range(1, len(by_step[label]) + 1)
        every = max(1, len(steps) // 12)
        left.plot(steps, percent(by_step[label]), linewidth=1.5, markevery=every, **style)
        layers = range(len(by_layer[label]))
        right.plot(layers, percent(by_layer[label]), linestyle="none", **style)
    left.set(xlabel="decode step", ylim=(0, 101), title="all layers, first step included")
    floor = 10 * int(min(min(percent(rates)) for rates in by_layer.values()) / 10)
    right.set(
        xlabel=f"layer (vertical axis starts at {floor}%)",
        ylim=(floor, 100 + (100 - floor) / 50),
        title="each layer, mean after the first step",
    )
    for axes in (left, right):
        axes.set_ylabel("hit rate (% of selected records)")
        axes.xaxis.get_major_locator().set_params(integer=True)
        tidy(axes)
    left.legend(loc="lower right", frameon=False)
    figure.suptitle(f"Share of the selected records that were in a slot\n{data['config']}")
    return figure


def plot_overlap(data: Mapping[str, Any]) -> Figure:
    """A heat map: how much a step's selection has in common with the one before, layer by layer.

    data: "config": str; "jaccard": [layers][steps - 1], each |both| / |either| in 0..1, the first
    column that of step 2 with step 1.
    """
    overlap: Sequence[Sequence[float]] = data["jaccard"]
    num_layers, num_steps = len(overlap), len(overlap[0])
    figure = new_figure(10, min(6.0, 2.2 + 0.12 * num_layers))
    axes = figure.subplots()
    extent = (1.5, num_steps + 1.5, num_layers - 0.5, -0.5)
    image = axes.imshow(
        overlap, vmin=0, vmax=1, cmap="viridis", aspect="auto", interpolation="none", extent=extent
    )
    axes.set(xlabel="decode step", ylabel="layer")
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_major_locator().set_params(integer=True)
    figure.colorbar(image, ax=axes, label="Jaccard overlap (0..1)", pad=0.01)
    figure.suptitle(f"Selected positions in common with the step before\n{data['config']}")
    return figure


def plot_resolve(data: Mapping[str, Any]) -> Figure:
    """Time of a Resolve call, split into bookkeeping and IO, over B/K (left) and batch (right).

    data: "config": str; "by_ratio" and "by_batch": rows of `bench resolve` in the order in which
    they are drawn, each {batch top_k device_buffer_size us us_no_io limit_us} and more; those of
    by_ratio have one batch, those of by_batch one B. Raises ValueError if there are none.
    """
    by_ratio, by_batch = data["by_ratio"], data["by_batch"]
    if not by_ratio or not by_batch:
        raise ValueError(
            f"got {len(by_ratio)} rows over B/K and {len(by_batch)} over batch, "
            "expected some of both"
        )
    figure = new_figure(10, 4.3)
    left, right = figure.subplots(1, 2)
    ratios = [f"{row['device_buffer_size'] / row['top_k']:g}" for row in by_ratio]
    _stack(left, by_ratio, ratios)
    left.set(xlabel="B / K", title=f"batch {by_ratio[0]['batch']}")
    _stack(right, by_batch, [str(row["batch"]) for row in by_batch])
    size = by_batch[0]["device_buffer_size"]
    right.set(xlabel="batch (requests)", title=f"B = {size} = {size / by_batch[0]['top_k']:g} K")
    handles = left.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(f"Resolve, one layer, whole batch\n{data['config']}")
    return figure


def plot_decode(data: Mapping[str, Any]) -> Figure:
    """Throughput over what was varied (left), and TTFT and TPOT over throughput (the others).

    data: "config": str; "rows": those of `bench decode` or `bench serve`. The first panel's axis is
    the budget, the prompt length, the request rate or the concurrency, whichever varies first; a
    colour per mode, a marker per value of whatever else was varied. Rows without such a value or
    without decode steps are left out. Raises ValueError if there are none.
    """
    rows = [row for row in data["rows"] if row["decode_tokens_per_second"] is not None]
    if not rows:
        raise ValueError("there are no rows to draw")
    key, *other_keys = _varied(rows)
    series: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row.get(key) is not None:
            others = (DECODE_AXES[name][1].format(row.get(name)) for name in other_keys)
            series.setdefault((row["mode"], ", ".join(others)), []).append(row)
    modes, others = (list(dict.fromkeys(names)) for names in zip(*series, strict=True))
    figure = new_figure(13, 4.6)
    throughput, ttft, tpot = figure.subplots(1, 3)
    for (mode, other), own in series.items():
        own.sort(key=lambda row: row[key])
        style = {
            "color": COLOURS[modes.index(mode) % len(COLOURS)],
            "marker": MARKERS[others.index(other) % len(MARKERS)],
            "label": f"{mode}, {other}" if other else mode,
        }
        throughput.plot(
            [row[key] for row in own], [row["decode_tokens_per_second"] for row in own], **style
        )
        for axes, name in ((ttft, "ttft_ms"), (tpot, "tpot_ms")):
            pairs = [(row["tokens_per_second"], row[name]["mean"]) for row in own if row[name]]
            axes.plot([x for x, _ in pairs], [y for _, y in pairs], **style)
    values = sorted({row[key] for own in series.values() for row in own})
    throughput.set(xlabel=f"{DECODE_AXES[key][0]}, log", xscale="log")
    throughput.set(ylabel="decode throughput (tokens/s), log", yscale="log")
    throughput.set_xticks(values, [f"{value:g}" for value in values])
    throughput.xaxis.minorticks_off()
    ttft.set(
        xlabel="throughput with prefill (tokens/s)", ylabel="mean TTFT (ms), log", yscale="log"
    )
    tpot.set(xlabel="throughput with prefill (tokens/s)", ylabel="mean TPOT (ms, from 0)")
    tpot.set_ylim(bottom=0)
    for axes in (throughput, ttft, tpot):
        tidy(axes)
    handles = throughput.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=len(modes), frameon=False)
    figure.suptitle(f"Decoding, per cache\n{data['config']}")
    return figure


def _varied(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys of DECODE_AXES in which rows of a mode differ that are equal in the keys before:
    a number of clients that follows from the budget is none. If none, the first that has a value.
    """
    keys = list(DECODE_AXES)

    def num_values(names: Sequence[str]) -> int:
        return len({tuple(row.get(name) for name in ("mode", *names)) for row in rows})

    varied = [key for i, key in enumerate(keys) if num_values(keys[: i + 1]) > num_values(keys[:i])]
    return varied or [key for key in keys if rows[0].get(key) is not None][:1]


def config_line(report: Mapping[str, Any], args: Any) -> str:
    """What was run, in one line for a title. args: of `bench decode` or `bench serve`."""
    parts = [Path(args.model or args.random_weights).name]
    if args.model is None:
        parts.append("random weights")
        if args.num_layers is not None:
            parts.append(f"{args.num_layers} layers")
    parts += [report["dtype"], report["device_name"], f"K = {args.hisparse.top_k}"]
    if args.hisparse.cache_size_mb is None:
        size = args.hisparse.device_buffer_size
        parts.append(f"B = {size}" if isinstance(size, int) else "B per layer")
    else:
        parts.append(f"{args.hisparse.cache_size_mb:g} MiB of slots")
    if report["output_len"] is None:
        parts.append(f"arrivals of {Path(args.arrivals).name}")
    else:
        parts.append(f"{report['output_len']} new tokens")
    if getattr(args, "selections", None) is not None:
        parts.append(f"selections {Path(args.selections).name}")
    return ", ".join(parts)


def _stack(axes, rows: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> None:
    """A bar per row: bookkeeping below, IO on top, the whole as a number, the limit dashed."""
    places = range(len(rows))
    whole = [row["us"] for row in rows]
    bookkeeping = [min(row["us_no_io"], row["us"]) for row in rows]  # more is noise
    io = [us - part for us, part in zip(whole, bookkeeping, strict=True)]
    axes.bar(
        places, bookkeeping, width=0.7, color=COLOURS[2], label="bookkeeping (call without IO)"
    )
    top = axes.bar(
        places, io, bottom=bookkeeping, width=0.7, color=COLOURS[1], label="IO, the rest"
    )
    axes.bar_label(top, [f"{us:.0f}" for us in whole])
    for place, row in zip(places, rows, strict=True):
        label = "limit: these bytes by memcpy" if place == 0 else None
        ends = (place - 0.45, place + 0.45)
        axes.plot(ends, [row["limit_us"]] * 2, color="black", linestyle="--", label=label)
    axes.set_xticks(places, labels)
    axes.set(ylabel="microseconds per call (from 0)", ylim=(0, 1.1 * max(whole)))
    tidy(axes)


def save(figure: Figure, data: Mapping[str, Any], path: str | Path) -> Path:
    """Writes the figure as PNG to `path` and its data beside it, as .json; makes the folder.

    Returns the PNG's path. Raises ValueError if `path` does not end in .png, or if a number is NaN
    or infinite.
    """
    path = Path(path)
    if path.suffix != ".png":
        raise ValueError(f"got {path}, expected a path that ends in .png")
    text = json.dumps(data, indent=1, allow_nan=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    path.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
    return path


def percent(rates: Sequence[float]) -> list[float]:
    """Shares in 0..1 as percentages."""
    return [100 * rate for rate in rates]


def tidy(axes) -> None:
    """The style of all axes: horizontal lines behind the data, no frame above and to the right."""
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
