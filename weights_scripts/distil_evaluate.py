"""Measuring a selector against dense attention, the best possible one, and untrained ones.

The last `num_decode` tokens of each text decode under a selection in every layer, with the tokens
given (distil_decode.py); the prompt before them is read densely. Columns:

    dense | oracle | addon: what is judged | quest | mean-pooled | recent   (distil_masks.py)

Measures:
    ppl       perplexity of natural text            mass      share of dense attention that is read,
    copy      the same where text repeats itself              mean over layers, heads and tokens
    needles   numbers found again, all digits       locality  misses of a GPU cache, by replay
    free      greedy continuations: how long they are those of dense attention

Perplexity of natural text hides a selector that finds nothing again; copy and needles do not.
Locality replays the selections of the natural texts (minihisparse/replay.py): a prompt longer than
B begins with an empty cache, and the first `warm_up` steps are not counted. Only anchors are
replayed: the layers that share their selection have the same misses.
Cost: 8,192 tokens of SmolLM2-135M take 2 GiB on the device.
Does not know: files, gates, tables (distil_report.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minihisparse.addon import Addon
from minihisparse.model import Decoder
from minihisparse.replay import replay
from minihisparse.trace import Trace
from minihisparse.weights_scripts.distil_decode import (
    TextStates,
    decode,
    dense,
    greedy,
    prefill,
    token_losses,
)
from minihisparse.weights_scripts.distil_masks import (
    Selection,
    mean_pooled,
    oracle,
    positions_of,
    quest,
    recent,
    selection_of,
)
from minihisparse.weights_scripts.distil_model import LayerStates, dense_probabilities
from minihisparse.weights_scripts.distil_sequences import Sequences

ADDON = "addon"
# name of the measure -> policy, B in units of K; only the first is measured for other columns too
LOCALITY = {
    "lru_2k": ("engine", 2),
    "fifo_2k": ("fifo", 2),
    "random_2k": ("random", 2),
    "belady_2k": ("belady", 2),
    "lru_4k": ("engine", 4),
    "lru_1k": ("engine", 1),
}
REPLAYED = ("oracle", ADDON, "quest", "mean-pooled")
Progress = Callable[[str], None]


@dataclass(frozen=True)
class EvaluateSettings:
    """num_decode: tokens that decode sparsely; num_free: of a continuation; warm_up: steps before
    misses are counted.
    """

    num_decode: int = 512
    num_free: int = 256
    warm_up: int = 64


def columns(addon: Addon, num_positions: int, device: torch.device) -> dict[str, Selection]:
    """The selections that are measured, by name."""
    top_k = addon.settings["top_k"]
    return {
        "dense": dense,
        "oracle": oracle(top_k),
        ADDON: selection_of(addon, num_positions, device),
        "quest": quest(top_k),
        "mean-pooled": mean_pooled(top_k),
        "recent": recent(top_k),
    }


def num_passes(texts: Sequences, settings: EvaluateSettings) -> int:
    """How often `evaluate` calls progress."""
    num_texts = len(texts.natural) + len(texts.copy) + len(texts.needles)
    num_replays = len(LOCALITY) + len(REPLAYED) - 1
    return num_texts * 6 + num_replays + 2 * settings.num_free * len(texts.free)


def evaluate(
    model: Decoder,
    addon: Addon,
    texts: Sequences,
    settings: EvaluateSettings,
    progress: Progress = lambda stage: None,
) -> tuple[dict[str, dict[str, float]], Trace]:
    """Measures all columns on texts of equal length. progress: called with the stage's name after
    each pass.

    Returns the measures by column, and the add-on's selections for the natural texts: a trace of
    num_decode steps, with one request per text.
    """
    selections = columns(addon, len(texts.natural[0]), model.device)
    scores: dict[str, dict[str, float]] = {name: {} for name in selections}
    recorder = _Recorder(model, addon, texts, settings)
    losses = {name: [] for name in selections}
    for index, ids in enumerate(texts.natural):
        run = _Run(model, ids, settings)
        for name, select in selections.items():
            watch = recorder.masses(selections) if name == "dense" else None
            if name in REPLAYED:
                watch = recorder.positions(name, index)
            losses[name].append(run.losses(select, watch)[0])
            progress("natural")
    for name in selections:
        scores[name]["ppl"] = _perplexity(losses[name])
        if name != "dense":
            scores[name]["mass"] = recorder.mass[name] / len(texts.natural)

    losses = {name: [] for name in selections}
    for ids in texts.copy:
        run = _Run(model, ids, settings)
        for name, select in selections.items():
            losses[name].append(run.losses(select)[0])
            progress("copy")
    for name in selections:
        scores[name]["copy"] = _perplexity(losses[name])
        scores[name]["needles"] = 0

    for ids, answer_len in texts.needles:
        run = _Run(model, ids, settings)
        for name, select in selections.items():
            right = run.losses(select)[1]
            scores[name]["needles"] += int(right[-1 - answer_len : -1].all())
            progress("needles")

    for name in REPLAYED:
        trace = recorder.trace(name, addon.anchors)
        for measure, (policy, factor) in LOCALITY.items():
            if name == ADDON or measure == "lru_2k":
                result = replay(trace, policy, factor * trace.positions.shape[-1])
                scores[name][measure] = result.miss_rate(settings.warm_up)
                progress("replay")

    scores[ADDON] |= _free_running(model, selections[ADDON], texts.free, settings, progress)
    return scores, recorder.trace(ADDON, range(model.config.num_hidden_layers))


class _Run:
    """One text, its prompt read: the last num_decode tokens can be decoded again and again."""

    def __init__(self, model: Decoder, ids: np.ndarray, settings: EvaluateSettings) -> None:
        self.model = model
        self.ids = torch.from_numpy(ids.astype(np.int64)).to(model.device)
        self.first = len(ids) - settings.num_decode
        self.text: TextStates = prefill(model, self.ids[: self.first], len(ids))

    def losses(self, select: Selection, watch: Callable | None = None) -> tuple[Tensor, Tensor]:
        """Of the tokens after the first decoded one: -log p [E - 1], and whether they are right."""
        ids = self.ids[self.first :]
        hidden = decode(self.model, self.text, ids, self.first, select, watch)
        losses, right = token_losses(self.model, hidden[:-1], ids[1:])
        return losses.cpu(), right.cpu()


class _Recorder:
    """What is collected while the natural texts decode.

    mass: by column, summed over texts. chosen: by column, positions [steps, L, texts, K] int32.
    """

    def __init__(
        self, model: Decoder, addon: Addon, texts: Sequences, settings: EvaluateSettings
    ) -> None:
        self.num_layers = model.config.num_hidden_layers
        self.first = len(texts.natural[0]) - settings.num_decode
        self.top_k = addon.settings["top_k"]
        shape = (settings.num_decode, self.num_layers, len(texts.natural), self.top_k)
        self.chosen = {name: torch.empty(shape, dtype=torch.int32) for name in REPLAYED}
        self.mass: dict[str, float] = {}

    def masses(self, selections: dict[str, Selection]) -> Callable:
        """A watch of a dense pass: how much of its attention each selection would have read."""

        def watch(states: LayerStates, mask: Tensor) -> None:
            mean = dense_probabilities(states).mean(dim=0)  # [E, T], over heads
            for name, select in selections.items():
                if name != "dense":
                    share = float((mean * select(states)).sum(dim=1).mean())
                    self.mass[name] = self.mass.get(name, 0.0) + share / self.num_layers

        return watch

    def positions(self, name: str, text: int) -> Callable:
        """A watch that keeps the selections."""

        def watch(states: LayerStates, mask: Tensor) -> None:
            self.chosen[name][:, states.layer, text] = positions_of(mask, self.top_k).cpu()

        return watch

    def trace(self, name: str, layers: Sequence[int]) -> Trace:
        positions = self.chosen[name][:, list(layers)]
        steps = torch.arange(len(positions), dtype=torch.int32)[:, None]
        seq_lens = (self.first + 1 + steps).expand(-1, positions.shape[2]).contiguous()
        return Trace(positions, seq_lens)


def _perplexity(losses: list[Tensor]) -> float:
    return math.exp(float(torch.cat(losses).double().mean()))


def _free_running(
    model: Decoder,
    select: Selection,
    prompts: Sequence[np.ndarray],
    settings: EvaluateSettings,
    progress: Progress,
) -> dict[str, float]:
    """Means over texts: tokens before the first that is not dense attention's, share of equal ones.

    After the first difference the two read different texts: the share says little beyond it.
    """
    until, equal = [], []
    for ids in prompts:
        prompt = torch.from_numpy(ids.astype(np.int64)).to(model.device)
        ours, expected = (
            greedy(model, prompt, settings.num_free, s, lambda: progress("free"))
            for s in (select, dense)
        )
        same = ours == expected
        until.append(int(same.long().cumprod(dim=0).sum()))
        equal.append(float(same.float().mean()))
    if not until:
        return {}
    return {
        "free_tokens_until_difference": sum(until) / len(until),
        "free_share_equal": sum(equal) / len(equal),
    }
