"""Stack distances: one pass over a trace, against a replay of plain LRU for each B there is.

Guards: a curve that is right in long contexts only, and wrong where a request outgrows B (the start
in the slots, the newest position that is used below B and not above); uses of one step that push
each other out; counts that pass from one request, row, layer or half of the trace to another.
"""

import pytest
import torch

from minihisparse import sizing
from minihisparse.replay import replay
from minihisparse.sizing import miss_curves, stack_distances
from minihisparse.trace import Trace


def random_trace(
    seed: int,
    *,
    steps: int = 40,
    layers: int = 2,
    rows: int = 2,
    top_k: int = 5,
    max_prompt: int = 30,
    newest: float = 0.8,
) -> Trace:
    """Rows in which requests end, begin again and pause. newest: how often it is selected."""
    generator = torch.Generator().manual_seed(seed)

    def chance() -> float:
        return float(torch.rand(1, generator=generator))

    positions = torch.full((steps, layers, rows, top_k), -1, dtype=torch.int32)
    seq_lens = torch.zeros(steps, rows, dtype=torch.int32)
    for row in range(rows):
        length, pause = int(chance() * max_prompt), 0
        for step in range(steps):
            if chance() < 0.05:
                length, pause = int(chance() * max_prompt), int(chance() * 3)
            if pause:
                pause -= 1
                continue
            length += 1
            seq_lens[step, row] = length
            for layer in range(layers):
                weight = torch.rand(length, generator=generator) / (1 + torch.arange(length) % 7)
                weight[-1] = 2 if chance() < newest else -1
                count = int(chance() * (min(top_k, length) + 1))
                chosen = weight.topk(count).indices.sort().values
                positions[step, layer, row, :count] = chosen.int()
    return Trace(positions, seq_lens)


def one_layer(steps: list[tuple[int, list[int]]]) -> Trace:
    """One request: its seq_len and selected positions in each step."""
    top_k = max(len(selected) for _, selected in steps)
    positions = torch.tensor([s + [-1] * (top_k - len(s)) for _, s in steps], dtype=torch.int32)
    seq_lens = torch.tensor([[length] for length, _ in steps], dtype=torch.int32)
    return Trace(positions[:, None, None], seq_lens)


def distances(steps: list[tuple[int, list[int]]]) -> list[list[int]]:
    found = stack_distances(one_layer(steps))[:, 0, 0].tolist()
    return [row[: len(selected)] for row, (_, selected) in zip(found, steps, strict=True)]


# ---- against brute force ----


@pytest.mark.parametrize("top_k", [1, 3, 8])
@pytest.mark.parametrize("max_prompt", [2, 14, 60])
@pytest.mark.parametrize("newest", [0.0, 0.5, 1.0])
def test_all_sizes_equal_a_replay_of_lru(top_k, max_prompt, newest):
    for seed in range(3):
        trace = random_trace(seed, top_k=top_k, max_prompt=max_prompt, newest=newest)
        found, curves = stack_distances(trace), miss_curves(trace)
        longest = int(trace.seq_lens.max())
        assert (found < trace.seq_lens[:, None, :, None].clamp(min=1)).all()
        assert curves.largest == max(longest, top_k) and curves.top_k == top_k
        for size in range(top_k, curves.largest + 1):
            result = replay(trace, "lru", size)
            assert torch.equal((found > size).sum((2, 3)), result.misses), (seed, size)
            assert curves.layer_misses()[:, size].tolist() == result.misses.sum(0).tolist()
            assert curves.miss_rate(size) == pytest.approx(result.miss_rate())
            assert curves.layer_miss_rates(size) == pytest.approx(result.layer_miss_rates())


def test_long_contexts():
    """Where no request is near B, and most positions have been used before."""
    trace = random_trace(5, steps=150, rows=1, top_k=16, max_prompt=400)
    curves = miss_curves(trace)
    for size in (16, 17, 31, 64, 100, 200, curves.largest):
        assert curves.layer_misses()[:, size].tolist() == (
            replay(trace, "lru", size).misses.sum(0).tolist()
        )


@pytest.mark.parametrize("warmup_steps", [0, 7])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_parts_and_warm_up(parts, warmup_steps):
    trace = random_trace(3, steps=37)
    curves = miss_curves(trace, parts=parts, warmup_steps=warmup_steps)
    bounds = [warmup_steps + (37 - warmup_steps) * part // parts for part in range(parts + 1)]
    for size in (5, 9, 20):
        result = replay(trace, "lru", size)
        for part, (first, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
            misses, hits = result.misses[first:end].sum(0), result.hits[first:end].sum(0)
            assert curves.misses[part, :, size].tolist() == misses.tolist()
            assert curves.selected[part].tolist() == (misses + hits).tolist()
            rate = int(misses.sum()) / int((misses + hits).sum())
            assert curves.miss_rate(size, part) == pytest.approx(rate)
        assert curves.miss_rate(size) == pytest.approx(result.miss_rate(warmup_steps))


def test_threads_change_nothing():
    trace, threads = random_trace(8, layers=5), torch.get_num_threads()
    one = miss_curves(trace)
    try:
        torch.set_num_threads(3)
        assert torch.equal(miss_curves(trace).misses, one.misses)
    finally:
        torch.set_num_threads(threads)


# ---- by hand ----


def test_reuse_after_others():
    """A prompt of 9: nothing is resident below B = 9. A step's positions are used in their order,
    so after the first step 1 is the most recent; what a step uses does not push itself out.
    """
    steps = [(10, [0, 1]), (11, [2]), (12, [0]), (13, [0, 1, 2])]
    first = [[9, 9], [9]]
    assert distances(steps[:2]) == first
    assert distances(steps) == [*first, [3], [1, 3, 2]]


def test_the_newest_is_a_hit_at_every_size():
    assert distances([(10, [9]), (11, [10])]) == [[0], [0]]


def test_the_newest_of_a_step_before_misses_until_it_has_a_slot():
    """Position 9 came at S = 10: up to B = 9 it was beside the slots, from 10 on it has slot 9."""
    assert distances([(10, [9]), (11, [9])]) == [[0], [10]]
    assert distances([(10, []), (11, [9])]) == [[], [10]]


def test_never_used_positions_of_the_prompt_go_from_the_lowest():
    """At B = 4 slots hold 0..3. Position 4, used at S = 6, takes 0's; then 0 takes 1's."""
    steps = [(5, [3]), (6, [3, 4]), (7, [0])]
    assert distances(steps)[2] == [5]
    assert distances([*steps[:2], (7, [1])])[2] == [4]
    assert replay(one_layer([*steps[:2], (7, [1])]), "lru", 4).misses.sum() == 1  # 4 alone


def test_padding_and_rows_without_a_request():
    trace = Trace(
        torch.tensor([[[[0, 1], [-1, -1]]]], dtype=torch.int32),
        torch.tensor([[3, 0]], dtype=torch.int32),
    )
    assert stack_distances(trace).tolist() == [[[[2, 2], [-1, -1]]]]
    assert miss_curves(trace).selected.tolist() == [[2]]


# ---- limits ----


def test_curves_end_at_the_engines_largest_size(monkeypatch):
    trace = random_trace(1)
    whole = miss_curves(trace)
    monkeypatch.setattr(sizing, "MAX_DEVICE_BUFFER_SIZE", 12)
    cut = miss_curves(trace)
    assert cut.largest == 12 and torch.equal(cut.misses, whole.misses[..., :13])
    assert torch.equal(cut.selected, whole.selected)


@pytest.mark.parametrize("size", [4, 1000])
def test_sizes_outside_are_refused(size):
    curves = miss_curves(random_trace(1))
    with pytest.raises(ValueError, match=rf"--device-buffer-size {size} is not in 5\.\."):
        curves.miss_rate(size)
    with pytest.raises(ValueError, match=f"--device-buffer-size {size} is not in"):
        curves.layer_miss_rates(size)


@pytest.mark.parametrize("warmup_steps", [-1, 39, 40])
def test_too_few_steps_are_refused(warmup_steps):
    with pytest.raises(ValueError, match=f"--warmup-steps {warmup_steps} of 40 steps"):
        miss_curves(random_trace(1), parts=2, warmup_steps=warmup_steps)


def test_nothing_selected():
    trace = Trace(torch.full((2, 1, 1, 3), -1, dtype=torch.int32), torch.tensor([[4], [5]]).int())
    assert miss_curves(trace).miss_rate(3) == 0.0
