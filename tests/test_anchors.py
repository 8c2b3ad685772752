"""Guards: groups that leave a layer without an anchor, or go over the end of the model; a shared
layer that reads something else than its anchor selected, unnoticed; a selector that is asked where
it has no state.
"""

import pytest
import torch
from addon_rig import tiny_addon
from torch import Tensor

from minihisparse.anchors import (
    anchor_of_layers,
    anchors_of_every,
    anchors_of_pattern,
    check_shared,
)
from minihisparse.assembly import make_runner
from minihisparse.batch import Batch
from minihisparse.config import HiSparseConfig
from minihisparse.indexer import DSASelector
from minihisparse.model import Decoder
from minihisparse.runner import Runner
from minihisparse.selector import Selector
from minihisparse.synthetic import GivenSelections, fill

K, CONTEXT, LAYERS = 8, 40, 5
ANCHORS = (0, 2)  # (0, 0, 2, 2, 2)


# -- declared how -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "anchors, num_layers, anchor_of",
    [
        ([0], 1, (0,)),
        ([0], 4, (0, 0, 0, 0)),
        ((0, 1, 2), 3, (0, 1, 2)),
        ((0, 2), 5, (0, 0, 2, 2, 2)),
        ([0, 3, 4], 6, (0, 0, 0, 3, 4, 4)),
    ],
)
def test_anchor_of_layers(anchors, num_layers, anchor_of):
    assert anchor_of_layers(anchors, num_layers) == anchor_of


@pytest.mark.parametrize(
    "freq, num_layers, anchors", [(1, 3, [0, 1, 2]), (2, 5, [0, 2, 4]), (3, 6, [0, 3]), (9, 4, [0])]
)
def test_anchors_of_every(freq, num_layers, anchors):
    assert anchors_of_every(freq, num_layers) == anchors


@pytest.mark.parametrize("pattern, anchors", [("FSSFF", [0, 3, 4]), ("FFF", [0, 1, 2]), ("F", [0])])
def test_anchors_of_pattern(pattern, anchors):
    assert anchors_of_pattern(pattern, len(pattern)) == anchors


@pytest.mark.parametrize(
    "anchors, message",
    [
        ([], r"anchors \[\]: layer 0 is none"),
        ([1, 2], r"anchors \[1, 2\]: layer 0 is none"),
        ([2, 0], "layer 0 is none"),
        ([-1, 0], "layer 0 is none"),
        ([0, 2, 1], r"anchors \[0, 2, 1\]: must be layer numbers that ascend"),
        ([0, 2, 2], "must be layer numbers that ascend"),
        ([0, 1.0], "must be layer numbers that ascend"),
        ([0, "2"], "must be layer numbers that ascend"),
        ([False, 1], "must be layer numbers that ascend"),
        ([0, 5], r"anchors \[0, 5\]: the model's layers are 0\.\.4"),
    ],
)
def test_anchors_that_are_none(anchors, message):
    with pytest.raises(ValueError, match=message):
        anchor_of_layers(anchors, LAYERS)


@pytest.mark.parametrize("freq", [0, -1])
def test_a_frequency_below_one(freq):
    with pytest.raises(ValueError, match=f"index_topk_freq {freq} is less than 1"):
        anchors_of_every(freq, LAYERS)


@pytest.mark.parametrize(
    "pattern, message",
    [
        ("FSSF", "'FSSF' has 4 letters, the model 5 layers"),
        ("FSSFSS", "'FSSFSS' has 6 letters, the model 5 layers"),
        ("", "'' has 0 letters, the model 5 layers"),
        ("FSXFS", "'FSXFS': letters are F and S"),
        ("fssfs", "letters are F and S"),
    ],
)
def test_patterns_that_are_none(pattern, message):
    with pytest.raises(ValueError, match=message):
        anchors_of_pattern(pattern, LAYERS)


def test_a_pattern_that_begins_with_a_shared_layer():
    with pytest.raises(ValueError, match="layer 0 is none"):
        anchor_of_layers(anchors_of_pattern("SFSFS", LAYERS), LAYERS)


def test_check_shared():
    of_anchor = torch.tensor([[1, 4, 6], [0, 5, -1]], dtype=torch.int32)
    check_shared(3, 2, of_anchor.clone(), of_anchor)
    other = of_anchor.clone()
    other[1, 1] = 7
    message = "layer 3, row 1: position 7 is selected at index 1, .* anchor, layer 2, has 5"
    with pytest.raises(ValueError, match=message):
        check_shared(3, 2, other, of_anchor)


# -- through a runner -------------------------------------------------------------------------


@pytest.fixture
def model(tiny_decoder) -> Decoder:
    return tiny_decoder(num_hidden_layers=LAYERS)


def runner_with(
    model: Decoder, selector: Selector, cache: str, checked: bool = True, prefetch: bool = True
) -> Runner:
    return make_runner(
        model,
        cache=cache,
        selector=selector,
        hisparse=HiSparseConfig(
            top_k=K, device_buffer_size=16, page_size=4, enable_layer_prefetch=prefetch
        ),
        max_model_len=64,
        max_running_requests=2,
        checked=checked,
    )


def step(runner: Runner, rows: list[int], seq_len: int) -> list[Tensor]:
    """One decode step; per layer the positions [R, K] that its attention has read."""
    batch = Batch.make(rows, [seq_len] * len(rows), "cpu")
    hidden = runner.embed(torch.arange(len(rows)) + seq_len)
    positions = []
    for layer in range(runner.num_layers):
        result = runner.decode_layer(layer, hidden, batch)
        hidden = result.hidden
        positions.append(result.positions.clone())
    return positions


@pytest.mark.parametrize(
    "cache, prefetch", [("full", False), ("hisparse", False), ("hisparse", True)]
)
def test_shared_layers_read_what_their_anchor_selected(model, monkeypatch, cache, prefetch):
    """And are never asked; anchors select, each for itself."""
    addon = tiny_addon(model, "dsa-shared", ANCHORS)
    selector = DSASelector(addon, model, top_k=K, max_requests=2, max_model_len=64)
    assert selector.anchor_of == (0, 0, 2, 2, 2)
    runner = runner_with(model, selector, cache, prefetch=prefetch)
    assert (runner.prefetcher is not None) == prefetch
    rows = [runner.admit(60) for _ in range(2)]
    for seed, row in enumerate(rows):
        ids = torch.randint(128, (CONTEXT,), generator=torch.Generator().manual_seed(seed))
        runner.prefill(row, ids)
    asked, select = [], selector.select

    def note(layer, *args):
        asked.append(layer)
        return select(layer, *args)

    monkeypatch.setattr(selector, "select", note)
    seen = set()
    for seq_len in range(CONTEXT + 1, CONTEXT + 6):
        positions = step(runner, rows, seq_len)
        for layer, anchor in enumerate(selector.anchor_of):
            assert torch.equal(positions[layer], positions[anchor])
        assert not torch.equal(positions[0], positions[2])
        seen |= {tuple(row) for row in positions[0].tolist()}
    assert len(seen) > 5  # selections change
    assert asked == [0, 2] * 5


def test_every_layer_of_dsa_selects(model):
    """Anchors that are all the layers are no sharing, so no prefetch either."""
    selector = DSASelector(tiny_addon(model), model, top_k=K, max_requests=1, max_model_len=64)
    assert selector.anchor_of is None
    runner = runner_with(model, selector, "hisparse")
    assert runner.prefetcher is None
    row = runner.admit(60)
    runner.prefill(row, torch.arange(CONTEXT))
    positions = step(runner, [row], CONTEXT + 1)
    assert len({tuple(p[0].tolist()) for p in positions}) == LAYERS


def given(same: bool, anchor_of: tuple[int, ...] | None) -> GivenSelections:
    """Random selections of two steps, the same in layers of a group, or in the second step not:
    layer 3 has another position at index 5.
    """
    generator = torch.Generator().manual_seed(0)
    positions = torch.empty(2, LAYERS, 2, K, dtype=torch.int32)
    for index in torch.cartesian_prod(torch.arange(2), torch.arange(LAYERS), torch.arange(2)):
        chosen = 2 * torch.randperm(CONTEXT // 2, generator=generator)[:K]
        positions[tuple(index)] = chosen.sort().values.int()
    positions[:, 1] = positions[:, 0]
    positions[:, 3:] = positions[:, 2:3]
    if not same:
        positions[1, 3, 1, 5] += 1
    return GivenSelections(positions, CONTEXT, torch.device("cpu"), anchor_of)


@pytest.mark.parametrize(
    "cache, prefetch", [("full", False), ("hisparse", False), ("hisparse", True)]
)
def test_checked_mode_finds_a_layer_that_would_select_otherwise(model, cache, prefetch):
    groups = (0, 0, 2, 2, 2)

    def run(same: bool, anchor_of, checked: bool) -> list[Tensor]:
        selector = given(same, anchor_of)
        runner = runner_with(model, selector, cache, checked, prefetch)
        rows = [runner.admit(60) for _ in range(2)]
        for row in rows:
            fill(runner, row, torch.arange(CONTEXT))
        step(runner, rows, CONTEXT + 1)
        positions = step(runner, rows, CONTEXT + 2)
        if selector.anchor_of is None:
            assert torch.equal(torch.stack(positions), selector.positions[1])
        return positions

    run(True, groups, checked=True)
    run(False, None, checked=True)  # nothing is shared
    positions = run(False, groups, checked=False)  # nobody looks: the anchor's
    assert torch.equal(positions[3], positions[2])
    with pytest.raises(ValueError, match=r"layer 3, row 1: .* at index 5, .* anchor, layer 2, has"):
        run(False, groups, checked=True)
