"""Made-up contexts and selections: the same in both caches, and as many misses as were asked for.

Guards: a fill that the two caches see differently, or that leaves a layer or the selector empty; a
window whose misses are hits, because it came back too soon; selections that change when a request
joins or leaves the batch; padding that selects; host numbers that a CUDA graph would freeze.
"""

import pytest
import torch
from bench_rig import SMALL, run_cli
from conftest import make_tiny_decoder
from rig import assert_same_bits

from minihisparse.assembly import make_runner
from minihisparse.batch import Batch
from minihisparse.config import HiSparseConfig
from minihisparse.runner import Runner
from minihisparse.synthetic import GivenSelections, fill, sliding_selections

CPU = torch.device("cpu")
K, B = 8, 16


def make_pair(**settings) -> list[Runner]:
    """FullCache and HiSparseCache, whose records are NaN until somebody writes them."""
    hisparse = HiSparseConfig(top_k=K, device_buffer_size=B, page_size=4)
    settings = {"max_model_len": 64, "max_running_requests": 2} | settings
    runners = [
        make_runner(
            make_tiny_decoder(), cache=cache, selector="quest", hisparse=hisparse, **settings
        )
        for cache in ("full", "hisparse")
    ]
    for runner in runners:
        for records in runner.cache.records:
            records.fill_(torch.nan)
    runners[1].cache.host.records.fill_(torch.nan)
    return runners


# ---- fill ----


@pytest.mark.parametrize("num_tokens", [1, B, B + 1, 45])
def test_both_caches_are_filled_alike(num_tokens):
    full, hisparse = make_pair()
    layers = []
    positions = torch.arange(num_tokens)
    for runner in (full, hisparse):
        runner.admit(7)  # so that the row that is filled is not the first one
        row = runner.admit(num_tokens + 1)
        logits = fill(runner, row, positions, progress=lambda: layers.append(1))
        assert row == 1 and logits.shape == (128,) and logits.isfinite().all()
    assert len(layers) == 2 * full.num_layers
    host = hisparse.cache.host
    rows = host.host_rows_of(torch.full_like(positions, row), positions)
    for layer in range(full.num_layers):
        on_device = full.cache.read(layer, row, positions)
        assert on_device.isfinite().all()
        assert 0.5 < on_device.std() < 2 and len(on_device.unique()) > 0.9 * on_device.numel()
        assert_same_bits(host.read(layer, rows), on_device, f"layer {layer}")
        other = (host.records[layer].isfinite()).all(dim=-1).sum()
        assert other == num_tokens  # nothing else was written
    assert_same_bits(hisparse.selector.bounds, full.selector.bounds)
    assert (full.selector.bounds != 0).any(dim=(1, 2, 3, 4)).all()
    hisparse.cache.check_integrity()


def test_two_fills_are_the_same():
    _, hisparse = make_pair()
    for _ in range(2):
        fill(hisparse, hisparse.admit(30), torch.arange(20))
    host, positions = hisparse.cache.host, torch.arange(20)
    rows = [host.host_rows_of(torch.full_like(positions, row), positions) for row in (0, 1)]
    assert_same_bits(host.read(1, rows[0]), host.read(2, rows[1]))


@pytest.mark.parametrize("num_tokens", [B // 2, 100, 700])
def test_verify_says_exact(capsys, monkeypatch, tiny_folder, num_tokens):
    monkeypatch.setattr(Runner, "prefill", None)  # nobody needs it
    argv = ["--model", tiny_folder, "--synthetic-context", num_tokens, "--max-new-tokens", 6]
    run = run_cli(capsys, "verify", *argv, *SMALL)
    assert run.code == 0 and run.report["exact"] is True and run.report["max_abs_diff"] == 0.0
    assert run.report["steps"] == 5
    assert run.table[-1] == "exact: 1 requests, 5 decode steps, all bits equal"
    assert (run.report["cache"]["misses"] > 0) == (num_tokens > B)
    record_bytes, num_layers = 32 * 4, 2
    tokens = num_tokens + 6
    assert run.report["memory"]["full_kv_bytes"] == tokens * num_layers * record_bytes


@pytest.mark.parametrize(
    "more", [["--prompt", "a"], ["--prompt-file", "x"], ["--prompt-tokens", "3"], []]
)
def test_verify_takes_a_context_or_a_prompt(capsys, tiny_folder, more):
    number = 0 if not more else 100
    argv = ["--model", tiny_folder, "--synthetic-context", number, *more]
    error = run_cli(capsys, "verify", *argv, *SMALL).error
    assert error == "--synthetic-context takes a number above 0, and no prompt beside it"


def test_beyond_the_models_limit(capsys, tiny_folder):
    """1,024 positions are what the tiny model was made for."""
    context = ["--model", tiny_folder, "--synthetic-context", 1100, "--max-new-tokens", 3, *SMALL]
    for more in ([], ["--max-model-len", 1200]):
        error = run_cli(capsys, "verify", *context, *more).error
        assert "1024" in error and "--allow-beyond-model-limit" in error
        run = run_cli(capsys, "verify", *context, *more, "--allow-beyond-model-limit")
        assert run.code == 0 and run.report["exact"] is True
        assert "positions from 1024 on are beyond what the model was made for" in run.err


def test_a_limit_that_is_not_needed_changes_nothing(capsys, tiny_folder):
    argv = ["--model", tiny_folder, "--synthetic-context", 50, "--max-new-tokens", 3, *SMALL]
    run = run_cli(capsys, "verify", *argv, "--allow-beyond-model-limit")
    assert run.code == 0 and "beyond" not in run.err


def test_how_far_beyond_must_be_said(capsys, tiny_folder):
    """Where only the prompt could tell, which is read later."""
    argv = ["--model", tiny_folder, "--prompt", "a", *SMALL, "--allow-beyond-model-limit"]
    error = run_cli(capsys, "verify", *argv).error
    assert error == "--allow-beyond-model-limit: say how far, with --max-model-len"


# ---- selections ----


def make_sliding(**changes) -> torch.Tensor:
    sizes = {"num_steps": 20, "num_layers": 3, "num_requests": 2, "top_k": K, "num_misses": 3}
    return sliding_selections(**(sizes | {"context_len": K + B, "seed": 0} | changes))


@pytest.mark.parametrize("num_misses", [0, 1, 3, K])
def test_sliding_selections(num_misses):
    """Each step keeps all but num_misses of the last one's, and the new ones are none of the last
    B that were there: LRU has evicted them.
    """
    positions = make_sliding(num_misses=num_misses)
    assert positions.shape == (20, 3, 2, K) and positions.dtype == torch.int32
    assert positions.min() >= 0 and positions.max() < K + B
    assert (positions.diff(dim=-1) > 0).all()  # ascending, unique
    for layer in range(3):
        for request in range(2):
            steps = [set(step) for step in positions[:, layer, request].tolist()]
            recent: list[int] = []  # positions, the last that was selected first
            for before, step in zip([set(), *steps], steps, strict=False):
                if before:
                    assert len(step - before) == num_misses
                    assert not (step - before) & set(recent[:B])
                recent = [*step, *(p for p in recent if p not in step)]
    assert len({tuple(p.flatten().tolist()) for p in positions.unbind(1)}) == 3  # layers differ
    assert not torch.equal(positions[:, :, 0], positions[:, :, 1])


def test_sliding_selections_are_the_same_for_a_seed():
    assert torch.equal(make_sliding(), make_sliding())
    assert not torch.equal(make_sliding(), make_sliding(seed=1))


def test_more_than_the_context_is_refused():
    with pytest.raises(ValueError, match="top_k=8 is more than the context has, 7 positions"):
        make_sliding(context_len=7)


CONTEXT, STEPS, LAYERS, REQUESTS = 30, 4, 2, 3


def make_given() -> GivenSelections:
    """No two steps, layers, requests are given the same; -1 at the end."""
    s, ly, r = (
        torch.arange(n).view(shape)
        for n, shape in ((STEPS, (-1, 1, 1, 1)), (LAYERS, (-1, 1, 1)), (REQUESTS, (-1, 1)))
    )
    positions = (5 * s + 2 * ly + r + torch.arange(10)).int()
    positions[..., 8:] = -1
    return GivenSelections(positions, CONTEXT, CPU)


def graph_batch(rows: list[int], seq_lens: list[int], num_real: int) -> Batch:
    """As a CUDA graph has it: no host numbers."""
    return Batch(
        torch.tensor(rows),
        torch.tensor(seq_lens, dtype=torch.int32),
        torch.tensor([num_real], dtype=torch.int32),
    )


def test_a_request_is_given_its_own_selections():
    """By its request row and its own length, wherever it is in the batch and whoever came first;
    again from the start after the last step, and from the first request after the last one.
    """
    given = make_given()
    assert given.top_k == 10 and given.state_bytes == STEPS * LAYERS * REQUESTS * 10 * 4
    rows, steps = [4, 0, 2], [0, 3, 5]
    batch = graph_batch(rows, [CONTEXT + 1 + step for step in steps], 3)
    for layer in range(LAYERS):
        chosen = given.select(layer, None, batch)
        assert chosen.dtype == torch.int32
        for at, (row, step) in enumerate(zip(rows, steps, strict=True)):
            expected = given.positions[step % STEPS, layer, row % REQUESTS]
            assert chosen[at].tolist() == expected.tolist()
    assert_same_bits(given.select(1, None, batch), chosen)  # it keeps no count


def test_only_positions_that_a_request_has():
    """A shorter request, as in a warm-up, and padding."""
    chosen = make_given().select(0, None, graph_batch([0, 0], [5, 0], 1))
    assert chosen.tolist() == [[0, 1, 2, 3, 4] + 5 * [-1], 10 * [-1]]


def test_given_selections_in_a_runner():
    """They take the selector's place: both caches still agree, to the bit."""
    outputs = []
    for runner in make_pair():
        sliding = make_sliding(context_len=30, num_requests=2)
        runner.use_selector(GivenSelections(sliding, 30, CPU))
        rows = [runner.admit(40), runner.admit(40)]
        for row in rows:
            fill(runner, row, torch.arange(30))
        logits = [
            runner.decode(torch.tensor([5, 6]), Batch.make(rows, [31 + t, 31 + t], CPU))
            for t in range(5)
        ]
        for row in rows:
            runner.release(row)
        outputs.append(torch.stack(logits))
    assert outputs[0].isfinite().all()
    assert_same_bits(*outputs)
