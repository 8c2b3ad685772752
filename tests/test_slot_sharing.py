"""Slots shared out among layers: against all ways to share few, and where one layer roams.

Guards: a split that is no better than equal layers; a curve that is flat first, whose layer gets
nothing; layers in lockstep with different B; slots out of nowhere; a gain that is measured on what
the sizes were made for.
"""

from itertools import product

import pytest
import torch

from minihisparse.replay import replay
from minihisparse.sizing import MissCurves
from minihisparse.slot_sharing import compare_per_layer, find_layer_groups, share_slots
from minihisparse.trace import Trace


def curves_of(*by_layer: list[int], top_k: int = 0) -> MissCurves:
    """Misses at B = top_k, top_k + 1, ... of each layer."""
    misses = torch.tensor(by_layer)
    before = misses[:, :1].expand(-1, top_k)
    misses = torch.cat([before, misses], dim=1)[None]
    return MissCurves(misses, misses[:, :, 0], top_k)


def misses_of(curves: MissCurves, sizes) -> int:
    return sum(int(layer[b]) for layer, b in zip(curves.layer_misses(), sizes, strict=True))


def roaming_trace(seed: int, reach: list[int], steps: int = 120, top_k: int = 8) -> Trace:
    """Each layer's picks change by one a step and stay among reach[layer] positions of 1,000."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.empty(steps, len(reach), 1, top_k, dtype=torch.int32)
    for layer, count in enumerate(reach):
        places = torch.randperm(1000, generator=generator)[:count]
        picks = places[:top_k].tolist()
        for step in range(steps):
            others = [p for p in places.tolist() if p not in picks]
            out = int(torch.randint(top_k, (1,), generator=generator))
            picks[out] = others[int(torch.randint(len(others), (1,), generator=generator))]
            positions[step, layer, 0] = torch.tensor(sorted(picks))
    return Trace(positions, torch.arange(1001, 1001 + steps, dtype=torch.int32)[:, None])


# ---- share_slots ----


def test_convex_curves_are_shared_out_optimally():
    generator = torch.Generator().manual_seed(0)
    for top_k in (0, 2):
        falls = torch.randint(0, 50, (3, 6), generator=generator).sort(descending=True).values
        misses = torch.cat([falls.sum(1, keepdim=True), -falls], 1).cumsum(1)
        curves = curves_of(*misses.tolist(), top_k=top_k)
        sizes_of_layer = range(top_k, top_k + 7)
        for extra in range(19):
            total = 3 * top_k + extra
            sizes = share_slots(curves, total)
            assert sum(sizes) <= total and min(sizes) >= top_k
            best = min(
                misses_of(curves, split)
                for split in product(sizes_of_layer, repeat=3)
                if sum(split) <= total
            )
            assert misses_of(curves, sizes) == best


def test_a_curve_that_is_flat_first_gets_its_share():
    """Three slots more save 90 in the first layer, one slot alone 1; the second saves 10 a slot."""
    curves = curves_of([90, 89, 88, 0], [30, 20, 10, 0])
    assert share_slots(curves, 3) == [3, 0]
    assert share_slots(curves, 5) == [3, 2]


def test_slots_that_save_nothing_are_not_given():
    assert share_slots(curves_of([5, 0, 0, 0], [7, 7, 7, 7]), 6) == [1, 0]


def test_layers_in_lockstep_have_one_size():
    """A slot for the pair costs two, and saves in both."""
    curves = curves_of([20, 10, 0], [20, 10, 0], [15, 0, 0])
    groups = [[0, 1], [2]]
    assert share_slots(curves, 1, groups) == [0, 0, 1]
    assert share_slots(curves, 2, groups) == [0, 0, 1]  # one is left, less than the pair needs
    assert share_slots(curves, 3, groups) == [1, 1, 1]
    assert share_slots(curves, 99, groups) == [2, 2, 1]


def test_what_is_left_of_a_large_group_goes_to_others():
    curves = curves_of([90, 0], [90, 0], [90, 0], [10, 0])
    assert share_slots(curves, 2, [[0, 1, 2], [3]]) == [0, 0, 0, 1]


def test_what_cannot_be_shared_out_is_refused():
    curves = curves_of([5, 0], [7, 0], top_k=4)
    with pytest.raises(ValueError, match="--total-slots 7 is less than K = 4 for each of 2 layers"):
        share_slots(curves, 7)
    for groups in ([[0]], [[0, 1], [1]], [[0, 2], [1]]):
        with pytest.raises(ValueError, match="expected each of 2 layers in one of them"):
            share_slots(curves, 9, groups)


# ---- traces ----


def test_lockstep_is_found_in_the_selections():
    """Of a trace that does not say which layers share."""
    trace = roaming_trace(0, [20, 20, 20, 20])
    positions = trace.positions.clone()
    positions[:, 1] = positions[:, 0]
    positions[:-1, 3] = positions[:-1, 2]  # not in the last step
    assert find_layer_groups(Trace(positions, trace.seq_lens)) == ([[0, 1], [2], [3]], False)
    assert find_layer_groups(trace) == ([[0], [1], [2], [3]], False)


def test_lockstep_is_what_the_trace_declares():
    """Not what happens to be equal: layers 0 and 1 are, and each selects for itself."""
    trace = roaming_trace(0, [20, 20, 20])
    positions = trace.positions[:, [0, 0, 1, 1, 2]]
    for anchor_of, groups in (
        ("[0, 1, 2, 2, 4]", [[0], [1], [2, 3], [4]]),
        ("[0, 0, 2, 2, 4]", [[0, 1], [2, 3], [4]]),
        ("null", [[0], [1], [2], [3], [4]]),
    ):
        metadata = {"settings": f'{{"anchor_of": {anchor_of}}}'}
        declared = Trace(positions, trace.seq_lens, metadata)
        assert find_layer_groups(declared) == (groups, True)
    wrong = Trace(positions, trace.seq_lens, {"settings": '{"anchor_of": [0, 0, 0, 3, 4]}'})
    with pytest.raises(ValueError, match="layer 2 uses the selection of layer 0, but their pos"):
        find_layer_groups(wrong)


def test_groups_of_the_trace_are_the_default():
    trace = roaming_trace(3, [12, 40])
    shared = Trace(trace.positions[:, [0, 0, 1]], trace.seq_lens)
    sizes = compare_per_layer(shared, shared, 60).sizes
    assert sizes[0] == sizes[1] < sizes[2]


def test_a_split_gains_on_another_trace():
    """The third layer roams among 64 positions, the others among 12; half of 4 * 20 slots would do
    for these.
    """
    reach = [12, 12, 64, 12]
    found = compare_per_layer(roaming_trace(1, reach), roaming_trace(2, reach), 80)
    assert found.sizes[2] > 30 > max(found.sizes[:2] + found.sizes[3:])
    assert sum(found.sizes) == found.total <= 80 and found.uniform_size == 20
    other = roaming_trace(2, reach)
    assert found.uniform == replay(other, "engine", 20).miss_rate()
    assert found.per_layer == replay(other, "engine", found.sizes).miss_rate()
    assert found.saved == 1 - found.per_layer / found.uniform > 0.1
    assert found.own <= found.per_layer * 1.05


def test_equal_layers_gain_nothing():
    found = compare_per_layer(roaming_trace(1, [30, 30]), roaming_trace(2, [30, 30]), 40)
    assert abs(found.saved) < 0.1


def test_warm_up_is_left_out():
    sized, measured = roaming_trace(1, [30, 12]), roaming_trace(2, [30, 12])
    found = compare_per_layer(sized, measured, 40, warmup_steps=50)
    assert found.uniform == replay(measured, "engine", 20).miss_rate(50)


def test_traces_of_other_models_are_refused():
    with pytest.raises(ValueError, match="2 layers with K = 8 and of 3 with K = 8"):
        compare_per_layer(roaming_trace(1, [30, 30]), roaming_trace(1, [30] * 3), 40)
