"""distil_train: what a step is given, that the loss falls, and that a run can be resumed.

Guards: batches that depend on more than seed and step; a resumed run that repeats or skips steps,
restarts its schedule or goes on with other settings; a checkpoint that is half written or larger
than allowed; a loss that became NaN and goes unnoticed; a step per layer that leaks its graph.
"""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from minihisparse.weights_scripts import distil_train
from minihisparse.weights_scripts.distil_dsa import DsaStudent
from minihisparse.weights_scripts.distil_train import (
    TrainSettings,
    learning_rate,
    make_batch,
    train,
)

SMALL = {"index_head_dim": 16, "rope_dim": 8, "num_recent": 8}
TEXT = np.random.default_rng(0).integers(0, 128, 4000).astype(np.uint16)
SETTINGS = TrainSettings(max_steps=30, seq_len=96, rows=24, seed=1)


def make_student(model, anchors=(0, 1, 2)) -> DsaStudent:
    return DsaStudent(model.config, anchors, 96, seed=0, **SMALL)


class Clock:
    """Seconds that pass whenever somebody looks."""

    def __init__(self, tick: float) -> None:
        self.now, self.tick = 0.0, tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


def weights_of(student) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in student.state_dict().items()}


# ---- batches and schedule ----


def test_batches_depend_on_seed_and_step():
    settings = TrainSettings(seq_len=512, rows=64)
    text = np.arange(5000).astype(np.uint16)
    again = [make_batch(text, settings, step) for step in range(200)]
    num_copies = 0
    for step, (tokens, rows) in enumerate(again):
        same_tokens, same_rows = make_batch(text, settings, step)
        assert torch.equal(tokens, same_tokens) and torch.equal(rows, same_rows)
        assert len(rows) == 64 and (rows[1:] > rows[:-1]).all()
        assert rows[0] >= 128 and rows[-1] < 512 and len(tokens) == 512
        repeated = torch.arange(512)[(tokens - tokens[0]) != torch.arange(512)]
        if len(repeated):
            num_copies += 1
            assert 8 <= len(repeated) < 64 and repeated[-1] - repeated[0] == len(repeated) - 1
            in_copy = torch.isin(rows, repeated).sum()
            assert in_copy >= min(16, (repeated >= 128).sum())
    assert 25 <= num_copies <= 55  # a fifth
    assert len({int(tokens[0]) for tokens, _ in again}) > 150


def test_learning_rate_warms_up_and_falls():
    rates = [learning_rate(TrainSettings(learning_rate=1.0), i / 1000, i) for i in range(1001)]
    assert rates[0] == 1 / 50 and abs(rates[49] - 1) < 0.01
    assert all(a > b for a, b in zip(rates[50:], rates[51:], strict=False))
    assert abs(rates[-1] - 0.05) < 1e-9
    assert learning_rate(TrainSettings(learning_rate=1.0), 0.5, 0) < 0.02  # after a resume


@pytest.mark.parametrize(
    "changes", [{"rows": 90}, {"seq_len": 32}, {"max_steps": 0}, {"seconds": float("nan")}]
)
def test_settings_are_checked(changes):
    with pytest.raises(ValueError, match="--"):
        TrainSettings(**{"seq_len": 96, "rows": 24} | changes)


# ---- training ----


@pytest.mark.parametrize("anchors", [(0, 1, 2), (0, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_falls(tiny_decoder, anchors, dtype):
    model = tiny_decoder(dtype=dtype)
    student = make_student(model, anchors)
    settings = TrainSettings(max_steps=60, seq_len=96, rows=24)
    result = train(model, student, TEXT, settings, progress=False)
    assert result.finished and result.steps == 60
    assert [step for step, _ in result.losses] == [20, 40, 60]
    first, *_, last = (loss for _, loss in result.losses)
    assert last < 0.8 * first


def test_runs_are_reproducible_and_the_model_stays_as_it_is(tiny_decoder):
    model = tiny_decoder()
    before = model.embedding.clone(), model.layers[1].qkv.clone()
    a, b = make_student(model), make_student(model)
    for student in (a, b):
        train(model, student, TEXT, SETTINGS, progress=False)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert torch.equal(model.embedding, before[0]) and torch.equal(model.layers[1].qkv, before[1])


def test_schedule_by_time(tiny_decoder):
    model = tiny_decoder()
    settings = TrainSettings(seconds=20.0, seq_len=96, rows=24)
    result = train(model, make_student(model), TEXT, settings, progress=False, clock=Clock(1.0))
    assert result.finished and result.steps == 19


def test_loss_that_is_no_number_ends_the_run(tiny_decoder):
    model = tiny_decoder()
    student = make_student(model)
    student.indexers[1].k_norm_bias.data[0] = torch.nan
    with pytest.raises(FloatingPointError, match="--learning-rate"):
        train(model, student, TEXT, SETTINGS, progress=False)


def test_short_text_is_refused(tiny_decoder):
    model = tiny_decoder()
    with pytest.raises(ValueError, match="--seq-len"):
        train(model, make_student(model), TEXT[:95], SETTINGS, progress=False)


# ---- checkpoints ----


@pytest.fixture
def stopped(tiny_decoder, tmp_path):
    """A run of 30 steps that ended after 12, because the time of its call was up."""
    model = tiny_decoder()
    student = make_student(model)
    settings = TrainSettings(**vars(SETTINGS) | {"seconds": 12.5})
    path = tmp_path / "checkpoint"
    options = {"checkpoint": path, "identity": {"selector": "dsa"}, "progress": False}
    result = train(model, student, TEXT, settings, clock=Clock(1.0), **options)
    assert not result.finished and result.steps == 12
    return model, student, path, options


def test_resume_goes_on_from_the_step(stopped, monkeypatch):
    model, student, path, options = stopped
    steps, rates = [], []

    def batch(text, settings, step):
        steps.append(step)
        return make_batch(text, settings, step)

    def rate(settings, done, since_start):
        rates.append((round(done * 30), since_start))
        return learning_rate(settings, done, since_start)

    monkeypatch.setattr(distil_train, "make_batch", batch)
    monkeypatch.setattr(distil_train, "learning_rate", rate)
    ends = []
    for _ in range(2):
        resumed = make_student(model)
        copy = path.with_name("copy")
        copy.write_bytes(path.read_bytes())
        result = train(
            model, resumed, TEXT, SETTINGS, resume=True, **options | {"checkpoint": copy}
        )
        assert result.finished and result.steps == 30
        ends.append(weights_of(resumed))
    assert steps == [*range(12, 30)] * 2
    assert rates == [(step, step - 12) for step in range(12, 30)] * 2
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    assert torch.equal(ends[0]["input_scale"], student.input_scale)  # of the very first batch


def test_checkpoint_holds_the_weights_in_bf16(stopped):
    model, student, path, _ = stopped
    tensors = load_file(path)
    for name, tensor in student.state_dict().items():
        expected = tensor if name == "input_scale" else tensor.bfloat16()
        assert torch.equal(tensors[name], expected), name
    assert (student.input_scale > 0).all()
    assert not path.with_name("checkpoint.part").exists()


def test_resume_by_time_has_the_rest_of_the_time(tiny_decoder, tmp_path):
    model, path = tiny_decoder(), tmp_path / "checkpoint"
    settings = TrainSettings(seconds=1000.0, seq_len=96, rows=24)

    class Interrupting(Clock):
        def __call__(self) -> float:
            if self.now == 400.0:
                self.now += 1
                raise KeyboardInterrupt
            return super().__call__()

    with pytest.raises(KeyboardInterrupt):
        train(
            model,
            make_student(model),
            TEXT,
            settings,
            checkpoint=path,
            progress=False,
            clock=Interrupting(100.0),
        )
    student = make_student(model)
    result = train(
        model,
        student,
        TEXT,
        settings,
        checkpoint=path,
        resume=True,
        progress=False,
        clock=Clock(100.0),
    )
    assert result.finished and 1000 <= result.seconds <= 1300
    assert 3 <= result.steps <= 12


@pytest.mark.parametrize("change", [{"seed": 5}, {"rows": 12}, {"max_steps": 40}])
def test_other_settings_are_refused(stopped, change):
    model, _, path, options = stopped
    settings = TrainSettings(**vars(SETTINGS) | change)
    name = next(iter(change))
    with pytest.raises(ValueError, match=f"{name}="):
        train(model, make_student(model), TEXT, settings, resume=True, **options)


def test_another_selector_a_damaged_file_and_none_are_refused(stopped):
    model, _, path, options = stopped

    def resume(**changes):
        train(model, make_student(model), TEXT, SETTINGS, resume=True, **options | changes)

    with pytest.raises(ValueError, match="selector='dsa', now it is 'nsa'"):
        resume(identity={"selector": "nsa"})
    with pytest.raises(FileNotFoundError, match="--checkpoint"):
        resume(checkpoint=path.with_name("none"))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="cannot be resumed from"):
        resume()
    save_file({"a": torch.zeros(1)}, path, {"format": "pt"})
    with pytest.raises(ValueError, match="lacks 'format'"):
        resume()


def test_a_checkpoint_of_the_real_size_is_below_16_mb(tmp_path):
    from minihisparse.model_config import ModelConfig

    config = ModelConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
    )
    student = DsaStudent(config, tuple(range(30)), 64)
    path = tmp_path / "checkpoint"
    distil_train.save_checkpoint(path, student, {"seed": 0}, 7, 1.5)
    assert 11e6 < path.stat().st_size < 16e6
    other = DsaStudent(config, tuple(range(30)), 64, seed=1)
    assert distil_train.load_checkpoint(path, other, json.loads('{"seed": 0}')) == (7, 1.5)
