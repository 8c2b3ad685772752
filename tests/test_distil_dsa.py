"""distil_dsa: the indexer's formula, the loss, and what is exported.

Guards: RoPE on other dims or interleaved; relu after the sum; sinks or recent positions left in the
loss (retrieval is lost, plain text does not show it); a group's layers missing in the target; one
layer's loss that changes another's weights; an export without the inputs' scale.
"""

import math

import pytest
import torch
from rig import assert_near

from minihisparse.rope import rope_angles
from minihisparse.weights_scripts.distil_dsa import (
    SETTINGS,
    TENSORS,
    DsaStudent,
    Indexer,
    forced,
    tensor_name,
)
from minihisparse.weights_scripts.distil_model import dense_layers, dense_probabilities

SMALL = {"index_n_heads": 3, "index_head_dim": 8, "rope_dim": 4, "num_sinks": 2, "num_recent": 5}
ROWS = torch.tensor([9, 20, 21, 47])


def random_indexer(hidden: int = 48, seed: int = 0) -> Indexer:
    generator = torch.Generator().manual_seed(seed)
    indexer = Indexer.random(hidden, SETTINGS | SMALL, generator)
    for norm in (indexer.k_norm_weight, indexer.k_norm_bias):
        norm.data += 0.3 * torch.randn(8, generator=generator)
    return indexer


def score_by_hand(indexer: Indexer, x: torch.Tensor, t: int, s: int) -> float:
    """I[t, s] from the definition, in Python numbers."""
    x = x.double()
    wq, wk, w = (m.double() for m in (indexer.wq, indexer.wk, indexer.weights_proj))

    def rope(vector: list[float], position: int) -> list[float]:
        out = list(vector)
        for j in range(2):  # rope_dim 4: pairs (0, 2) and (1, 3)
            angle = position * SETTINGS["rope_theta"] ** (-2 * j / 4)
            a, b = vector[j], vector[j + 2]
            out[j] = a * math.cos(angle) - b * math.sin(angle)
            out[j + 2] = b * math.cos(angle) + a * math.sin(angle)
        return out

    k = (wk @ x[s]).tolist()
    mean = sum(k) / 8
    variance = sum((value - mean) ** 2 for value in k) / 8
    gain, bias = indexer.k_norm_weight.tolist(), indexer.k_norm_bias.tolist()
    k = [
        (v - mean) / math.sqrt(variance + 1e-6) * g + b
        for v, g, b in zip(k, gain, bias, strict=True)
    ]
    k = rope(k, s)
    total = 0.0
    for head in range(3):
        q = rope((wq[8 * head : 8 * head + 8] @ x[t]).tolist(), t)
        match = max(0.0, sum(a * b for a, b in zip(q, k, strict=True)))
        total += float(w[head] @ x[t]) / math.sqrt(3 * 8) * match
    return total


@torch.no_grad()
def test_scores_are_the_definition():
    x = torch.randn(48, 48, generator=torch.Generator().manual_seed(1))
    indexer = random_indexer()
    angles = rope_angles(64, 4, SETTINGS["rope_theta"])
    got = indexer.scores(x, ROWS, angles)
    expected = [[score_by_hand(indexer, x, t, s) for s in range(48)] for t in ROWS.tolist()]
    assert_near(got, torch.tensor(expected), 1e-4)
    assert got.abs().max() > 0.3


def divergence_by_hand(scores, target, row: int) -> float:
    """sum_s p log(p / mass / softmax(I)), over positions that are neither sinks nor recent."""
    left = [s for s in range(row + 1) if s >= 2 and s <= row - 5]
    p = [float(target[s]) for s in left]
    mass = sum(p)
    biggest = max(float(scores[s]) for s in left)
    z = sum(math.exp(float(scores[s]) - biggest) for s in left)
    log_q = [float(scores[s]) - biggest - math.log(z) for s in left]
    return sum(a * (math.log(a / mass) - b) for a, b in zip(p, log_q, strict=True))


@pytest.mark.parametrize("anchors", [(0, 1, 2), (0, 2), (0,)])
def test_loss_is_the_divergence_from_the_group_mean(tiny_decoder, anchors):
    model = tiny_decoder()
    tokens = torch.randint(128, (48,), generator=torch.Generator().manual_seed(2))
    student = DsaStudent(model.config, anchors, 64, seed=3, **SMALL)
    states = list(dense_layers(model, tokens, ROWS))
    losses = [student.loss(s) for s in states]
    ends = [*anchors[1:], 3]
    assert [i + 1 for i, loss in enumerate(losses) if loss is not None] == ends
    for index, (anchor, end) in enumerate(zip(anchors, ends, strict=True)):
        group = [dense_probabilities(s).mean(0) for s in states[anchor:end]]
        target = torch.stack(group).mean(0)
        x = states[anchor].x
        scale = float(x.pow(2).mean() ** -0.5)
        assert abs(float(student.input_scale[index]) - scale) < 1e-5
        angles = rope_angles(64, 4, SETTINGS["rope_theta"])
        with torch.no_grad():
            scores = student.indexers[index].scores(x, ROWS, angles, scale)
        by_hand = [
            divergence_by_hand(scores[i], target[i], row) for i, row in enumerate(ROWS.tolist())
        ]
        assert_near(losses[end - 1].detach(), torch.tensor(sum(by_hand) / 4), 1e-5)
    losses[ends[0] - 1].backward()  # the first anchor's
    touched = [p.grad is not None for p in student.indexers[0].parameters()]
    others = [p.grad is None for indexer in student.indexers[1:] for p in indexer.parameters()]
    assert all(touched) and all(others)


def test_a_perfect_student_has_no_loss_and_a_row_without_choice_counts_nothing(tiny_decoder):
    model = tiny_decoder()
    rows = torch.tensor([3, 30])  # of row 3, everything is a sink or recent
    tokens = torch.arange(48)
    student = DsaStudent(model.config, (0, 1, 2), 64, **SMALL)
    (states, *_) = dense_layers(model, tokens, rows)
    target = dense_probabilities(states).mean(0)
    student.indexers[0].scores = lambda *_: target.clamp(min=1e-30).log()
    assert abs(float(student.loss(states))) < 1e-6


def test_forced_positions():
    rows = torch.tensor([0, 3, 10])
    states = next(iter_states(rows))
    got = [row.nonzero().flatten().tolist() for row in forced(states, SETTINGS | SMALL)]
    assert got == [[0], [0, 1, 2, 3], [0, 1, 6, 7, 8, 9, 10]]


def iter_states(rows):
    from conftest import make_tiny_decoder

    return dense_layers(make_tiny_decoder(), torch.arange(12), rows)


@torch.no_grad()
def test_export_has_the_scale_folded_in(tiny_decoder):
    config = tiny_decoder().config
    student = DsaStudent(config, (0, 2), 64, **SMALL)
    student.input_scale.copy_(torch.tensor([0.5, 2.0]))
    tensors = student.export()
    assert sorted(tensors) == sorted(tensor_name(i, name) for i in (0, 2) for name in TENSORS)
    x = torch.randn(48, 48, generator=torch.Generator().manual_seed(4))
    angles = rope_angles(64, 4, SETTINGS["rope_theta"])
    for index, layer in enumerate((0, 2)):
        own = {name: tensors[tensor_name(layer, name)] for name in TENSORS}
        assert all(tensor.dtype == torch.bfloat16 for tensor in own.values())
        got = Indexer(own, student.settings).scores(x, ROWS, angles)
        expected = student.indexers[index].scores(
            x, ROWS, angles, float(student.input_scale[index])
        )
        assert_near(got, expected, 0.03 * float(expected.abs().max()))
