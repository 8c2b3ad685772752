"""distil_masks: selections as masks are those that the engine's selectors make, query by query.

Guards: a table of scores that was measured with another selection than the one that ships; ties to
a higher position; pages or blocks that are not readable yet; a shared layer that selects.
"""

import pytest
import torch

from minihisparse.addon import Addon
from minihisparse.weights_scripts.distil_dsa import DsaStudent, Indexer
from minihisparse.weights_scripts.distil_masks import (
    dsa,
    mean_pooled,
    oracle,
    positions_of,
    quest,
    recent,
    selection_of,
    top_k_mask,
)
from minihisparse.weights_scripts.distil_model import dense_layers, dense_probabilities

ROWS = torch.tensor([0, 7, 31, 32, 47, 63, 64, 90, 95])
SMALL = {"index_n_heads": 3, "index_head_dim": 8, "rope_dim": 4, "num_sinks": 2, "num_recent": 5}


@pytest.fixture
def states(tiny_decoder):
    tokens = torch.randint(128, (96,), generator=torch.Generator().manual_seed(0))
    return list(dense_layers(tiny_decoder(), tokens, ROWS))


def best(scores: list[float], count: int) -> list[int]:
    """The highest scores' indices, ties to the lowest, ascending."""
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    return sorted(order[:count])


def chosen(mask: torch.Tensor) -> list[list[int]]:
    return [row.nonzero().flatten().tolist() for row in mask]


def test_top_k_mask_takes_the_lowest_of_equals():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 5, (50, 40), generator=generator).float()
    scores[::7, 3] = torch.inf
    allowed = torch.arange(40) <= torch.randint(0, 40, (50, 1), generator=generator)
    for top_k in (1, 8, 40, 60):
        mask = top_k_mask(scores, allowed, top_k)
        for row in range(50):
            some = scores[row][allowed[row]].tolist()  # the first ones, so indices are kept
            assert chosen(mask)[row] == best(some, top_k)


def test_positions_of():
    mask = torch.tensor([[1, 0, 1, 1, 0], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0]]).bool()
    expected = [[0, 2, 3, -1], [4, -1, -1, -1], [-1] * 4]
    assert positions_of(mask, 4).tolist() == expected
    assert positions_of(mask, 7).tolist() == [[*row, -1, -1, -1] for row in expected]
    assert positions_of(mask, 4).dtype == torch.int32


def test_oracle_holds_most_of_the_attention(states):
    for s in states:
        summed = dense_probabilities(s).sum(0)
        for row, got in zip(ROWS.tolist(), chosen(oracle(16)(s)), strict=True):
            index = ROWS.tolist().index(row)
            assert got == best(summed[index, : row + 1].tolist(), 16)


def test_recent(states):
    got = chosen(recent(16)(states[0]))
    for row, positions in zip(ROWS.tolist(), got, strict=True):
        assert positions == sorted({*range(min(4, row + 1)), *range(max(0, row - 11), row + 1)})


def test_quest_scores_pages_by_their_bounds(states):
    for s in states:
        got = chosen(quest(32, page_size=8)(s))
        for index, row in enumerate(ROWS.tolist()):
            last = row // 8
            shares = torch.zeros(last + 1)
            for head in range(6):
                q, k = s.q[index, head], s.k[: row + 1, head // 3]
                pages = [k[8 * p : 8 * p + 8] for p in range(last + 1)]
                bounds = torch.stack(
                    [torch.maximum(q * p.amax(0), q * p.amin(0)).sum() for p in pages]
                )
                shares += (bounds * 8**-0.5).softmax(0)
            shares[last] = torch.inf
            pages = best(shares.tolist(), 4)
            assert got[index] == [t for p in pages for t in range(8 * p, 8 * p + 8) if t <= row]


def test_mean_pooled_scores_whole_blocks(states):
    for s in states:
        got = chosen(mean_pooled(40, block_size=8)(s))
        for index, row in enumerate(ROWS.tolist()):
            last = row // 8
            shares = torch.zeros(last + 1)
            if last:
                for head in range(6):
                    means = s.k[: 8 * last, head // 3].view(last, 8, -1).mean(1)
                    shares[:last] += (means @ s.q[index, head] * 8**-0.5).softmax(0)
            for block in {0, max(0, last - 1), last}:
                shares[block] = torch.inf
            blocks = best(shares.tolist(), 5)
            assert got[index] == [t for b in blocks for t in range(8 * b, 8 * b + 8) if t <= row]


@pytest.mark.parametrize("anchors", [(0, 1, 2), (0, 2)])
def test_dsa_is_the_anchors_indexer(states, tiny_decoder, anchors):
    student = DsaStudent(tiny_decoder().config, anchors, 96, top_k=24, **SMALL)
    student.input_scale.fill_(1.0)
    name = "dsa" if len(anchors) == 3 else "dsa-shared"
    addon = Addon(name, student.settings, anchors, student.export())
    select = selection_of(addon, 96, torch.device("cpu"))
    for s in states:
        got = chosen(select(s))
        anchor = max(a for a in anchors if a <= s.layer)
        index = anchors.index(anchor)
        with torch.no_grad():
            tensors = student.indexers[index].tensors().items()
            rounded = Indexer({name: t.bfloat16().float() for name, t in tensors}, student.settings)
            scores = rounded.scores(states[anchor].x, ROWS, student._angles)
        for row, positions, score in zip(ROWS.tolist(), got, scores, strict=True):
            score[:2] = torch.inf
            score[max(0, row - 4) : row + 1] = torch.inf
            assert positions == best(score[: row + 1].tolist(), 24)


def test_dsa_reads_at_most_its_top_k(states, tiny_decoder):
    student = DsaStudent(tiny_decoder().config, (0, 1, 2), 96, top_k=8, **SMALL)
    addon = Addon("dsa", student.settings, (0, 1, 2), student.export())
    mask = dsa(addon, 96, torch.device("cpu"))(states[0])  # all scores are zero: input_scale is
    assert mask.sum(1).tolist() == [min(8, row + 1) for row in ROWS.tolist()]
    assert chosen(mask)[-1] == [0, 1, 2, 91, 92, 93, 94, 95]
