"""Training a selector beside a frozen model: batches, schedule, checkpoints.

One step is one text of `seq_len` tokens: the dense forward pass stops at each layer, the student's
loss of that layer is differentiated at once and its graph is gone before the next layer begins.
A fifth of the texts repeat a span of themselves, because finding something again is what plain
text teaches too rarely.

A student is an nn.Module with
    loss(states)   LayerStates in order of layers -> a scalar to minimise, or None
    export()       the add-on file's tensors
    settings       the add-on file's settings; `anchors`: its anchor layers

Schedule: warm-up, then a cosine, over steps if their number is given, otherwise over seconds.
Checkpoint: weights in bf16, the step, and what the run must agree in; AdamW's moments would be
twice the weights, so they are dropped, and the warm-up is repeated after a resume. Batches depend
on the seed and the step alone.
Cost on the device, SmolLM2-135M, 8,192 tokens, 512 rows: about 2 GiB in all.
Does not know: which selector it trains.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from minihisparse.model import Decoder
from minihisparse.weights_scripts.distil_model import dense_layers

FORMAT = "minihisparse-distil-1"
WARM_UP_STEPS = 50
LAST_LEARNING_RATE = 0.05  # of the highest
COPY_SHARE = 0.2  # of the texts
REPORT_STEPS = 20  # reading a loss waits for the GPU
CHECKPOINT_SECONDS = 60.0


@dataclass(frozen=True)
class TrainSettings:
    """seconds: of training, all calls together; with max_steps: of this call, and the schedule goes
    by steps. rows: queries per text that the loss looks at.
    """

    seconds: float = 480.0
    max_steps: int | None = None
    seq_len: int = 8192
    rows: int = 512
    learning_rate: float = 3e-3
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in {"seconds": 0, "max_steps": 1, "seq_len": 64, "rows": 1}.items():
            value = getattr(self, name)
            if value is not None and not value >= least:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} is {value}, expected at least {least}")
        if self.rows > self.seq_len - self.first_row:
            raise ValueError(
                f"--rows {self.rows}: a text of {self.seq_len} tokens has "
                f"{self.seq_len - self.first_row} rows to choose from; lower --rows"
            )

    @property
    def first_row(self) -> int:
        """Queries before it read little that a selector could leave out."""
        return min(256, self.seq_len // 4)


@dataclass(frozen=True)
class TrainResult:
    """losses: (step, mean over layers and the steps since the last one). finished: or the time of
    this call was up before max_steps.
    """

    steps: int
    seconds: float
    losses: list[tuple[int, float]]
    finished: bool


def make_batch(text: np.ndarray, settings: TrainSettings, step: int) -> tuple[Tensor, Tensor]:
    """Token ids [seq_len] int64 of a step's text, and the rows [R] int64 to look at, ascending.

    In a text with a copied span, a quarter of the rows lie in the copy.
    """
    rng = np.random.default_rng((settings.seed, step))
    length, num_rows = settings.seq_len, settings.rows
    start = int(rng.integers(0, len(text) - length + 1))
    tokens = text[start : start + length].astype(np.int64)
    candidates = np.arange(settings.first_row, length)
    chosen = np.empty(0, dtype=np.int64)
    if rng.random() < COPY_SHARE:
        span = int(rng.integers(length // 64, length // 8))
        source = int(rng.integers(0, length - 2 * span))
        target = int(rng.integers(source + span, length - span + 1))
        tokens[target : target + span] = tokens[source : source + span]
        copied = candidates[(candidates >= target) & (candidates < target + span)]
        chosen = rng.choice(copied, min(num_rows // 4, len(copied)), replace=False)
        candidates = np.setdiff1d(candidates, chosen)
    others = rng.choice(candidates, num_rows - len(chosen), replace=False)
    rows = np.sort(np.concatenate([chosen, others]))
    return torch.from_numpy(tokens), torch.from_numpy(rows)


def learning_rate(settings: TrainSettings, done: float, steps_since_start: int) -> float:
    """done: the share of the schedule that is over. The warm-up counts from the (re)start."""
    cosine = (1 + math.cos(math.pi * min(done, 1.0))) / 2
    warm_up = min(1.0, (steps_since_start + 1) / WARM_UP_STEPS)
    floor = LAST_LEARNING_RATE
    return settings.learning_rate * warm_up * (floor + (1 - floor) * cosine)


def train(
    model: Decoder,
    student: nn.Module,
    text: np.ndarray,
    settings: TrainSettings,
    *,
    checkpoint: Path | None = None,
    resume: bool = False,
    identity: dict[str, object] | None = None,
    progress: bool = True,
    clock: Callable[[], float] = time.monotonic,
) -> TrainResult:
    """Trains the student in place on `text`, token ids [N] uint16.

    checkpoint: written every minute, at the end, and when interrupted. resume: go on from it.
    identity: what a resumed run must agree in, beside the settings (the model, the selector ...).
    Raises ValueError: the text is shorter than seq_len, a checkpoint that is none or is another
    run's; FileNotFoundError: there is none; FloatingPointError: the loss is no number any more.
    """
    if len(text) < settings.seq_len:
        raise ValueError(
            f"the text has {len(text)} tokens, one step needs {settings.seq_len}; lower --seq-len"
        )
    run = asdict(settings) | (identity or {})
    if settings.max_steps is not None:
        del run["seconds"]  # of each call: free to change
    step, seconds_before = 0, 0.0
    if resume:
        step, seconds_before = load_checkpoint(checkpoint, student, run)
    first_step, start = step, clock()
    parameters = list(student.parameters())
    optimizer = torch.optim.AdamW(
        parameters, betas=(0.9, 0.95), weight_decay=0.0, fused=model.device.type == "cuda"
    )
    bar = _progress_bar(settings, step, seconds_before, progress)
    losses: list[tuple[int, float]] = []
    window = torch.zeros((), device=model.device)
    in_window, saved = 0, start

    def done_at(now: float) -> float:
        if settings.max_steps is not None:
            return step / settings.max_steps
        return (seconds_before + now - start) / settings.seconds

    def save(now: float) -> None:
        if checkpoint is not None:
            save_checkpoint(checkpoint, student, run, step, seconds_before + now - start)

    def report(now: float) -> None:
        nonlocal in_window
        mean = float(window) / max(in_window, 1)
        if not math.isfinite(mean):
            raise FloatingPointError(
                f"the loss of steps up to {step} is {mean}; lower --learning-rate"
            )
        losses.append((step, mean))
        window.zero_()
        in_window = 0
        bar.set_postfix(step=step, KL=f"{mean:.4f}", refresh=False)
        done = step if settings.max_steps is not None else seconds_before + now - start
        bar.update(done - bar.n)

    try:
        while (done := done_at(now := clock())) < 1.0:
            if settings.max_steps is not None and now - start >= settings.seconds:
                break
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(settings, done, step - first_step)
            tokens, rows = (x.to(model.device) for x in make_batch(text, settings, step))
            optimizer.zero_grad(set_to_none=True)
            num_losses, total = 0, 0.0
            for states in dense_layers(model, tokens, rows):
                loss = student.loss(states)
                if loss is not None:
                    loss.backward()
                    total, num_losses = total + loss.detach(), num_losses + 1
            optimizer.step()
            window += total / num_losses
            step, in_window = step + 1, in_window + 1
            if step % REPORT_STEPS == 0:
                report(clock())
                if clock() - saved >= CHECKPOINT_SECONDS:
                    save(saved := clock())
        if in_window:
            report(clock())
    except KeyboardInterrupt:
        save(clock())
        raise
    finally:
        bar.close()
    end = clock()
    save(end)
    return TrainResult(step, seconds_before + end - start, losses, done_at(end) >= 1.0)


def save_checkpoint(
    path: Path, student: nn.Module, run: dict[str, object], step: int, seconds: float
) -> None:
    """Replaces the file, whole or not at all: weights in bf16, buffers as they are."""
    parameters = {name for name, _ in student.named_parameters()}
    tensors = {
        name: (tensor.to(torch.bfloat16) if name in parameters else tensor).cpu().contiguous()
        for name, tensor in student.state_dict().items()
    }
    metadata = {
        "format": FORMAT,
        "run": json.dumps(run, sort_keys=True),
        "step": json.dumps(step),
        "seconds": json.dumps(seconds),
    }
    part = path.with_name(path.name + ".part")
    save_file(tensors, part, metadata)
    os.replace(part, path)


def load_checkpoint(
    path: Path | None, student: nn.Module, run: dict[str, object]
) -> tuple[int, float]:
    """Fills the student; returns the steps and seconds that are done. Raises as `train` says."""
    if path is None or not path.is_file():
        raise FileNotFoundError(f"--resume: there is no checkpoint {path}; see --checkpoint")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(f"its metadata lacks 'format': '{FORMAT}'")
            found, wanted = json.loads(metadata["run"]), json.loads(json.dumps(run))
            for key in sorted(found.keys() | wanted.keys()):
                if found.get(key) != wanted.get(key):
                    raise ValueError(
                        f"it was made with {key}={found.get(key)!r}, now it is "
                        f"{wanted.get(key)!r}; pass the same, or start without --resume"
                    )
            student.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
            return json.loads(metadata["step"]), json.loads(metadata["seconds"])
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise ValueError(f"{path} cannot be resumed from: {error}") from None


def _progress_bar(settings: TrainSettings, step: int, seconds: float, progress: bool) -> tqdm:
    by_steps = settings.max_steps is not None
    return tqdm(
        total=settings.max_steps if by_steps else settings.seconds,
        initial=step if by_steps else seconds,
        desc="distil",
        unit="step" if by_steps else "s",
        bar_format="{desc} {percentage:3.0f}%|{bar}| {n:.0f}/{total:.0f} {unit}{postfix}",
        disable=not progress,
        mininterval=1.0,
    )
