"""distil_evaluate: each measure is what it says, on a tiny model.

Guards: perplexity of the wrong tokens; a needle that counts though a digit is wrong; mass over
other positions than those selected; a trace that is not the add-on's; anchors counted twice; a
progress bar that never fills.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from dense_reference import dense_logits

from minihisparse.replay import replay
from minihisparse.weights_scripts.distil_commands import make_addon
from minihisparse.weights_scripts.distil_decode import decode, prefill
from minihisparse.weights_scripts.distil_dsa import DsaStudent
from minihisparse.weights_scripts.distil_evaluate import (
    EvaluateSettings,
    evaluate,
    num_passes,
)
from minihisparse.weights_scripts.distil_masks import positions_of, selection_of
from minihisparse.weights_scripts.distil_model import dense_layers, dense_probabilities
from minihisparse.weights_scripts.distil_sequences import Sequences
from minihisparse.weights_scripts.distil_train import TrainSettings, train

LENGTH, TOP_K = 120, 32
SETTINGS = EvaluateSettings(num_decode=30, num_free=6, warm_up=3)
SMALL = {"index_head_dim": 16, "rope_dim": 8, "num_recent": 8}


def random_ids(seed: int, length: int = LENGTH) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 128, length).astype(np.uint16)


def as_tensor(ids: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(ids.astype(np.int64))


def needle(model, changed: int | None = None) -> tuple[np.ndarray, int]:
    """A text that ends with 4 tokens that the dense model expects there, and one token more."""
    tokens = as_tensor(random_ids(9, LENGTH - 5))
    for _ in range(4):
        tokens = torch.cat([tokens, dense_logits(model, tokens)[-1:].argmax(-1)])
    tokens = torch.cat([tokens, torch.tensor([5])])
    if changed is not None:
        tokens[changed] = (tokens[changed] + 1) % 128
    return tokens.numpy().astype(np.uint16), 4


@pytest.fixture(scope="module")
def run(tiny_decoder):
    """One evaluation of an untrained shared indexer, and what went in."""
    model = tiny_decoder()
    student = DsaStudent(model.config, (0, 2), LENGTH, top_k=TOP_K, **SMALL)
    student.input_scale.fill_(1.0)
    addon = make_addon("dsa-shared", student, model, "tiny", {})
    texts = Sequences(
        natural=[random_ids(0), random_ids(1)],
        copy=[random_ids(2)],
        needles=[needle(model), needle(model, -2), needle(model, -5)],
        free=[random_ids(3, 90)],
    )
    stages = []
    scores, trace = evaluate(model, addon, texts, SETTINGS, stages.append)
    return SimpleNamespace(
        model=model, addon=addon, texts=texts, scores=scores, trace=trace, stages=stages
    )


def test_every_column_has_every_measure(run):
    assert list(run.scores) == ["dense", "oracle", "addon", "quest", "mean-pooled", "recent"]
    for name, measures in run.scores.items():
        assert {"ppl", "copy", "needles"} <= measures.keys()
        assert ("mass" in measures) == (name != "dense")
    assert {"lru_2k", "fifo_2k", "random_2k", "belady_2k", "lru_4k", "lru_1k"} <= run.scores[
        "addon"
    ].keys()
    assert len(run.stages) == num_passes(run.texts, SETTINGS)
    assert list(dict.fromkeys(run.stages)) == ["natural", "copy", "needles", "replay", "free"]


def test_dense_perplexity_is_the_models(run):
    for texts, measure in ((run.texts.natural, "ppl"), (run.texts.copy, "copy")):
        losses = []
        for ids in map(as_tensor, texts):
            log_p = dense_logits(run.model, ids).log_softmax(-1)
            losses += [-float(log_p[i - 1, ids[i]]) for i in range(LENGTH - 29, LENGTH)]
        expected = math.exp(sum(losses) / len(losses))
        assert abs(run.scores["dense"][measure] / expected - 1) < 1e-4


def test_a_needle_counts_only_if_all_digits_are_right(run):
    assert run.scores["dense"]["needles"] == 1


def test_mass_is_of_dense_attention(run):
    rows = torch.arange(LENGTH - 30, LENGTH)
    shares = []
    for ids in map(as_tensor, run.texts.natural):
        for states in dense_layers(run.model, ids, rows):
            p = dense_probabilities(states).mean(0)
            for index, row in enumerate(rows.tolist()):
                shares.append(float(p[index, :4].sum() + p[index, row - 27 : row + 1].sum()))
    recent = run.scores["recent"]["mass"]
    assert abs(recent - sum(shares) / len(shares)) < 1e-4
    others = [measures["mass"] for measures in run.scores.values() if "mass" in measures]
    assert run.scores["oracle"]["mass"] == max(others) < 1


def test_trace_holds_the_addons_selections(run):
    positions = []
    select = selection_of(run.addon, LENGTH, run.model.device)
    ids = as_tensor(run.texts.natural[1])
    text = prefill(run.model, ids[: LENGTH - 30], LENGTH)
    watch = lambda states, mask: positions.append(positions_of(mask, TOP_K))  # noqa: E731
    decode(run.model, text, ids[LENGTH - 30 :], LENGTH - 30, select, watch)
    assert torch.equal(run.trace.positions[:, :, 1], torch.stack(positions, dim=1))
    assert run.trace.seq_lens.tolist() == [[length] * 2 for length in range(91, 121)]
    assert torch.equal(run.trace.positions[:, 0], run.trace.positions[:, 1])  # shared


def test_locality_is_the_replay_of_the_anchors(run):
    trace = type(run.trace)(run.trace.positions[:, [0, 2]], run.trace.seq_lens)
    scores = run.scores["addon"]
    assert scores["lru_2k"] == replay(trace, "engine", 2 * TOP_K).miss_rate(3)
    assert scores["lru_1k"] == replay(trace, "engine", TOP_K).miss_rate(3)
    assert scores["belady_2k"] == replay(trace, "belady", 2 * TOP_K).miss_rate(3)
    assert scores["belady_2k"] < scores["lru_2k"] < scores["lru_1k"]


def test_an_addon_that_reads_everything_is_dense(tiny_decoder):
    model = tiny_decoder()
    student = DsaStudent(model.config, (0, 1, 2), LENGTH, top_k=128, **SMALL)
    student.input_scale.fill_(1.0)
    addon = make_addon("dsa", student, model, "tiny", {})
    texts = Sequences([random_ids(0)], [random_ids(2)], [needle(model)], [random_ids(3, 90)] * 2)
    scores, _ = evaluate(model, addon, texts, SETTINGS)
    for measure in ("ppl", "copy", "needles"):
        assert scores["addon"][measure] == scores["dense"][measure]
    assert abs(scores["addon"]["mass"] - 1) < 1e-5
    assert scores["addon"]["free_tokens_until_difference"] == 6
    assert scores["addon"]["free_share_equal"] == 1


@pytest.mark.gpu
def test_train_and_evaluate_on_a_gpu(tiny_decoder):
    """In bf16, with the kernels between the products: near what a CPU gives in fp32."""
    settings = TrainSettings(max_steps=60, seq_len=LENGTH, rows=24)
    sequences = Sequences(
        [random_ids(0)], [random_ids(2)], [needle(tiny_decoder())], [random_ids(3, 90)]
    )
    found = []
    for model in (tiny_decoder(), tiny_decoder(dtype=torch.bfloat16, device="cuda")):
        student = DsaStudent(
            model.config, (0, 2), LENGTH, device=model.device, top_k=TOP_K, **SMALL
        )
        result = train(model, student, random_ids(7, 4000), settings, progress=False)
        addon = make_addon("dsa-shared", student, model, "tiny", {})
        found.append((result.losses, evaluate(model, addon, sequences, SETTINGS)[0]))
    (losses, scores), (gpu_losses, gpu_scores) = found
    assert [loss for _, loss in gpu_losses] == pytest.approx([loss for _, loss in losses], rel=0.05)
    for name in scores:
        assert gpu_scores[name]["ppl"] == pytest.approx(scores[name]["ppl"], rel=0.1), name
    assert gpu_scores["addon"]["mass"] == pytest.approx(scores["addon"]["mass"], rel=0.05)
