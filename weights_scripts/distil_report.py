"""What a selector's measures mean: gates that it must pass, a table, and the model card.

    gates   is it good enough to ship?    table   the measures of an evaluation, side by side
    card    the README.md of a folder of add-on files, from their headers alone

Does not know: how anything is measured (distil_evaluate.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from minihisparse.addon import Addon, read_addon

Scores = dict[str, dict[str, float]]  # column -> measure -> value, of distil_evaluate.py

MEASURES = {  # name -> heading, format
    "ppl": ("ppl", "{:.2f}"),
    "mass": ("mass", "{:.3f}"),
    "copy": ("copy ppl", "{:.2f}"),
    "needles": ("needles", "{:.0f}"),
    "lru_2k": ("LRU 2K", "{:.1%}"),
    "fifo_2k": ("FIFO 2K", "{:.1%}"),
    "random_2k": ("random 2K", "{:.1%}"),
    "belady_2k": ("Belady 2K", "{:.1%}"),
    "lru_4k": ("LRU 4K", "{:.1%}"),
    "lru_1k": ("LRU K", "{:.1%}"),
}
LARGEST_LRU_MISS_RATE = 0.12
LEAST_MASS = 0.98  # of the oracle's
NEEDLES_BELOW_ORACLE = 1
LIMITS = {"dsa": {"ppl": 1.05, "copy": 4.0}, "dsa-shared": {"ppl": 1.07, "copy": 9.0}}


class Gate(NamedTuple):
    """One condition: what was found, what is asked for, and whether it is met."""

    name: str
    found: str
    wanted: str
    passed: bool


def gates(selector: str, scores: Scores) -> list[Gate]:
    """The conditions for an add-on of this selector: "dsa", "dsa-shared" or "nsa"."""
    addon = scores["addon"]
    if selector not in LIMITS:  # it must be worth its training
        untrained = scores["mean-pooled"]
        return [
            _below("ppl", addon["ppl"], untrained["ppl"], "{:.3f}"),
            _above("mass", addon["mass"], untrained["mass"], "{:.4f}"),
            _below("copy", addon["copy"], untrained["copy"], "{:.3f}"),
            _above("needles", addon["needles"], untrained["needles"], "{:.0f}"),
            _below("LRU miss rate at 2K", addon["lru_2k"], untrained["lru_2k"], "{:.2%}"),
        ]
    limits, oracle, lru = LIMITS[selector], scores["oracle"], addon["lru_2k"]
    most_ppl = limits["ppl"] * scores["dense"]["ppl"]
    least_mass = LEAST_MASS * oracle["mass"]
    least_needles = oracle["needles"] - NEEDLES_BELOW_ORACLE
    found_again = [  # sharing layers is known to cost some of it, even with the oracle's selections
        _above("mass", addon["mass"], least_mass, "{:.4f}", equal=True),
        _above("needles", addon["needles"], least_needles, "{:.0f}", equal=True),
    ]
    return [
        _below("ppl", addon["ppl"], most_ppl, "{:.3f}", equal=True),
        _below("copy", addon["copy"], limits["copy"], "{:.3f}", equal=True),
        *(found_again if selector == "dsa" else ()),
        _below("LRU miss rate at 2K", lru, LARGEST_LRU_MISS_RATE, "{:.2%}", equal=True),
        _below("LRU below FIFO", lru, addon["fifo_2k"], "{:.2%}"),
        _below("LRU below random", lru, addon["random_2k"], "{:.2%}"),
        _above("LRU above Belady", lru, addon["belady_2k"], "{:.2%}"),
    ]


def _below(name: str, found: float, limit: float, form: str, equal: bool = False) -> Gate:
    passed = found <= limit if equal else found < limit
    return Gate(name, form.format(found), ("<= " if equal else "< ") + form.format(limit), passed)


def _above(name: str, found: float, limit: float, form: str, equal: bool = False) -> Gate:
    passed = found >= limit if equal else found > limit
    return Gate(name, form.format(found), (">= " if equal else "> ") + form.format(limit), passed)


def table(scores: Scores) -> str:
    """The measures as a Markdown table, one row per column of the evaluation."""
    rows = [["selection", *(heading for heading, _ in MEASURES.values())]]
    for name, measures in scores.items():
        cells = [
            form.format(measures[key]) if key in measures else ""
            for key, (_, form) in MEASURES.items()
        ]
        rows.append([name, *cells])
    return _markdown(rows)


def gate_lines(results: Sequence[Gate]) -> str:
    return "\n".join(
        f"{'pass' if g.passed else 'FAIL'}  {g.name}: {g.found}, wanted {g.wanted}" for g in results
    )


# ---- the card ----

CARD = """# Trained selectors

Each file holds the weights of a sparse selector beside a dense model that stays as it is; it was
made with `python -m minihisparse.weights_scripts.distil`, which says how, and can make it again.
Use one with `--selector dsa --selector-weights FILE`. (`minihisparse/addon.py` has the format.)

## Files

{files}

## Scores

Held-out text, none of it from works that were trained on; the last tokens of each text decode under
the selection in every layer, with the tokens given. ppl: perplexity of natural text. mass: share
of dense attention that is read. copy: perplexity where the text repeats itself. needles: six-digit
numbers found again. LRU, FIFO, random, Belady: miss rates of a GPU cache of 2K records per layer
(or K, 4K), from an empty one, the first steps left out.

{scores}

A selector leaves things out: what it gives is exact with respect to its own selection, and not what
dense attention gives. `dsa-shared` selects in every second layer only: it is lossy against `dsa`.

## Training data

{data}

## Licence

The files of this folder: {licence}. The model that they belong to has its own.
"""


def card(folder: Path) -> str:
    """The text of a folder's README.md, from the headers of its add-on files.

    Raises FileNotFoundError: there are none; ValueError: a file is no add-on.
    """
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"{folder} has no *.safetensors; train one with --out")
    addons = {path: read_addon(path) for path in paths}
    licences = sorted({addon.metadata["licence"] for addon in addons.values()})
    return CARD.format(
        files=_files(addons),
        scores="\n\n".join(_scores(path, addon) for path, addon in addons.items()),
        data=_data(addons),
        licence=", ".join(licences),
    )


def _files(addons: dict[Path, Addon]) -> str:
    rows = [["file", "selector", "model", "MB", "anchors", "settings", "made"]]
    for path, addon in addons.items():
        settings = ", ".join(f"{key} {value:g}" for key, value in addon.settings.items())
        size = f"{path.stat().st_size / 1e6:.1f}"
        anchors = f"{len(addon.anchors)} layers"
        made = addon.metadata.get("created", "")
        model = addon.metadata["model"]
        rows.append([f"`{path.name}`", addon.selector, model, size, anchors, settings, made])
    return _markdown(rows)


def _scores(path: Path, addon: Addon) -> str:
    report = json.loads(addon.metadata.get("scores", "{}"))
    if not report:
        return f"`{path.name}`: not evaluated yet."
    head = (
        f"`{path.name}` ({report['num_natural']} texts of {report['num_positions']} tokens, "
        f"{report['num_copy']} that repeat themselves, {report['num_needles']} needles; "
        f"{report['num_decode']} tokens decode; {report['device']}, {report['date']}):"
    )
    lines = [head, "", table(report["columns"]), ""]
    failed = [gate["name"] for gate in report["gates"] if not gate["passed"]]
    lines.append(f"Gates failed: {', '.join(failed)}." if failed else "All gates passed.")
    addon_scores = report["columns"]["addon"]
    if "free_tokens_until_difference" in addon_scores:
        lines.append(
            f"Continuing {report['num_free_prompts']} texts by {report['num_free']} tokens: the "
            f"first {addon_scores['free_tokens_until_difference']:.0f} are dense attention's on "
            f"average, {addon_scores['free_share_equal']:.0%} are equal in all."
        )
    return "\n".join(lines)


def _data(addons: dict[Path, Addon]) -> str:
    parts = []
    for path, addon in addons.items():
        training = json.loads(addon.metadata.get("training", "{}"))
        if not training:
            continue
        parts.append(
            f"`{path.name}`: {training['steps']:,} texts of {training['seq_len']:,} tokens, drawn "
            f"from {training['text_tokens']:,} (seed {training['seed']}), "
            f"in {training['seconds']:.0f} s on {training['device']}."
        )
        rows = [["text", "package", "licence", "tokens"]]
        for source in training.get("sources", ()):
            package = f"{source['package']} {source['version']}"
            tokens = f"{source['tokens']:,}"
            rows.append([source["name"], package, source["licence"], tokens])
        if len(rows) > 1 and _markdown(rows) not in parts:
            parts.append(_markdown(rows))
    return "\n\n".join(parts) or "The files do not say."


def _markdown(rows: list[list[str]]) -> str:
    """Rows of cells as a table; the first row is its head."""
    rows = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
