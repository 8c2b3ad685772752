"""The promise: HiSparse and full-HBM give the same bits, in every layer of every step.

Guards: a stale, misplaced or half-written record; another request's, layer's or step's; a host
backup that write-through forgot; the fast path (S <= B) and the step where it ends; prompts cut
into chunks; batch rows that touch each other. Two oracles share nothing with the caches: dense
attention over everything (`dense_reference.py`), and dense attention with a -inf mask made from
the selected positions: both caches together could be wrong in the same way.

Whatever nobody wrote is NaN. Compared are bits (level 1 of "exact"), except with the oracles and
between chunk sizes, which are other shapes: tolerance.
"""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from dense_reference import DenseRun, dense_logits
from rig import assert_near, assert_same_bits, bits
from torch import Tensor

from minihisparse import gpu_cache, runner
from minihisparse.assembly import make_runner
from minihisparse.batch import Batch
from minihisparse.config import HiSparseConfig
from minihisparse.gpu_cache import HiSparseCache
from minihisparse.model import Decoder
from minihisparse.runner import LayerResult, Runner

STEPS = 24
K, B = 16, 32
MAX_MODEL_LEN = 256
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Pair:
    """Both caches at the same work, compared after everything that they do."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        max_requests: int,
        seed: int = 0,
        kernels: bool | None = None,
        **hisparse: int,
    ) -> None:
        settings = {
            "selector": "quest",
            "hisparse": HiSparseConfig(**{"top_k": K, "page_size": 4} | hisparse),
            "max_model_len": MAX_MODEL_LEN,
            "max_running_requests": max_requests,
            "checked": True,
            "kernels": kernels,
        }
        self.decoder = decoder
        self.full = make_runner(decoder, cache="full", **settings)
        self.sparse = make_runner(decoder, cache="hisparse", **settings)
        self.host = self.sparse.cache.host
        for one in (self.full, self.sparse):
            for state in (*one.cache.records, one.selector.bounds):
                state.fill_(torch.nan)
        self.host.records.fill_(torch.nan)
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(self.host.num_pages, generator=generator).tolist()
        self.host._free.extend(order)  # no host row is right by accident
        for _ in order:
            self.host._free.popleft()
        self.rows: list[int] = []
        self.seq_lens: list[int] = []

    @property
    def runners(self) -> tuple[Runner, Runner]:
        return self.full, self.sparse

    def prefill(self, prompt: Tensor) -> Tensor:
        """Admits a request; the logits [V] of its prompt's end."""
        rows = [one.admit(len(prompt) + STEPS) for one in self.runners]
        assert rows[0] == rows[1]
        full, sparse = (
            one.prefill(rows[0], prompt.to(self.decoder.device)) for one in self.runners
        )
        self.rows.append(rows[0])
        self.seq_lens.append(len(prompt))
        assert_same_bits(sparse, full, "logits of the prompt")
        assert sparse.isfinite().all()
        self.check_state("after the prefill")
        return sparse

    def decode(self, token_ids: Sequence[int], padding: int = 0) -> tuple[Tensor, list[Tensor]]:
        """One step of all requests; logits [R, V], and the selected positions [R, K] per layer."""
        self.seq_lens = [length + 1 for length in self.seq_lens]
        device = self.decoder.device
        batch = Batch.make(self.rows, self.seq_lens, device, padding=padding)
        ids = torch.tensor([*token_ids, *[0] * padding], device=device)
        hidden = [one.embed(ids) for one in self.runners]
        selected = []
        for layer in range(self.full.num_layers):
            full, sparse = (
                one.decode_layer(layer, x, batch)
                for one, x in zip(self.runners, hidden, strict=True)
            )
            where = f"S {self.seq_lens}, layer {layer}"
            for name in ("positions", "attention", "hidden"):
                assert_same_bits(getattr(sparse, name), getattr(full, name), f"{where}, {name}")
            self.check_slots(layer, full, sparse, where)
            selected.append(sparse.positions[: len(self.rows)].clone())  # kernels overwrite it
            hidden = [full.hidden, sparse.hidden]
        full, sparse = (one.logits(x) for one, x in zip(self.runners, hidden, strict=True))
        assert_same_bits(sparse, full, f"S {self.seq_lens}, logits")
        assert sparse.isfinite().all()
        self.check_state(f"S {self.seq_lens}")
        return sparse[: len(self.rows)], selected

    def check_slots(self, layer: int, full: LayerResult, sparse: LayerResult, where: str) -> None:
        """Every slot holds the record of its position; a padded entry has none."""
        for i, row in enumerate(self.rows):
            positions, slots = sparse.positions[i], sparse.slots[i]
            used = positions >= 0
            assert torch.equal(used, slots >= 0), where
            assert torch.equal(full.slots[i], positions), where
            chosen = positions[used]
            assert (chosen[1:] > chosen[:-1]).all() and chosen[-1] == self.seq_lens[i] - 1, where
            actual = self.sparse.cache.records[layer][row, slots[used]]
            expected = self.full.cache.read(layer, row, chosen)
            assert_same_bits(actual, expected, f"{where}, records of request {i}")

    def check_state(self, where: str) -> None:
        """The whole history is in the host pool, and nothing beyond it; invariants hold."""
        self.check_integrity()
        assert_same_bits(self.sparse.selector.bounds, self.full.selector.bounds, where)
        for row, length in zip(self.rows, self.seq_lens, strict=True):
            rows = torch.tensor([row], device=self.decoder.device)
            owned = len(self.host._pages[row]) * self.host.page_size
            positions = torch.arange(owned, device=self.decoder.device)
            host_rows = self.host.host_rows_of(rows, positions[None])[0]
            for layer in range(self.full.num_layers):
                host = self.host.read(layer, host_rows)
                full = self.full.cache.read(layer, row, positions[:length])
                assert_same_bits(host[:length], full, f"{where}, layer {layer}, host")
                assert host[length:].isnan().all(), f"{where}, layer {layer}: beyond the newest"
                start, end = self.full.cache.slots.extent_of(row)
                beyond = self.full.cache.records[layer][start + length : end]
                assert beyond.isnan().all(), f"{where}, layer {layer}: beyond the newest, full"

    def release(self, index: int) -> None:
        for one in self.runners:
            one.release(self.rows[index])
        del self.rows[index], self.seq_lens[index]
        self.check_integrity()

    def check_integrity(self) -> None:
        for one in self.runners:
            one.cache.check_integrity()
            one.selector.extents.check_integrity()
            assert one.selector.extents.owners == one.cache.rows == set(self.rows)


def tokens(count: int, seed: int = 0, vocab_size: int = 128) -> Tensor:
    return torch.randint(0, vocab_size, (count,), generator=torch.Generator().manual_seed(seed))


def run(pair: Pair, lengths: Sequence[int], steps: int = STEPS, padding: int = 0) -> None:
    for seed, length in enumerate(lengths):
        pair.prefill(tokens(length, seed))
    for step in range(steps):
        pair.decode(tokens(len(lengths), 1000 + step).tolist(), padding)


def counts(pair: Pair) -> tuple[int, int, int]:
    """Hits, misses, evictions of HiSparse, all layers."""
    hits, misses, evictions = pair.sparse.cache.counters.sum(0).tolist()
    return hits, misses, evictions


# ---- full against hisparse, to the bit ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 5, B - 1, B, B + 1, 3 * B + 5])
def test_alone(tiny_decoder, length, dtype):
    pair = Pair(tiny_decoder(DTYPES[dtype]), max_requests=1)
    run(pair, [length])
    hits, misses, _ = counts(pair)
    assert hits > 0
    if length + STEPS > B + 1:  # or the test would not have met Resolve
        assert misses > 0
    else:
        assert misses == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "lengths", [(1, B, 3 * B + 5), (B + 1, 5, B - 1), (2 * B, 2 * B + 3, 4 * B)], ids=str
)
def test_a_batch_of_different_lengths(tiny_decoder, lengths, dtype):
    pair = Pair(tiny_decoder(DTYPES[dtype]), max_requests=4)
    run(pair, lengths)
    assert min(counts(pair)) > 0


@pytest.mark.parametrize(
    "sizes",
    [
        {"top_k": 16, "device_buffer_size": 16},  # K == B: every slot may be displaced at once
        {"top_k": 16, "device_buffer_size": 32},
        {"top_k": 16, "device_buffer_size": 37, "page_size": 16},  # B is no multiple of a page
        {"top_k": 4, "device_buffer_size": 5, "page_size": 1},
        {"top_k": 2, "device_buffer_size": 2, "page_size": 1},
        {"top_k": 32, "device_buffer_size": 64, "page_size": 8},
        {"top_k": 24, "device_buffer_size": 24, "page_size": 3},
    ],
    ids=lambda sizes: "-".join(map(str, sizes.values())),
)
def test_sizes_of_cache_and_page(tiny_decoder, sizes):
    pair = Pair(tiny_decoder(), max_requests=3, **sizes)
    buffer = sizes["device_buffer_size"]
    run(pair, [buffer, buffer + 2, 100])
    assert counts(pair)[1] > 0 and counts(pair)[2] > 0
    assert pair.sparse.cache.device_buffer_size == buffer


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 6},  # MHA
        {"num_key_value_heads": 1},  # MQA
        {"num_hidden_layers": 5, "head_dim": 10},
        {"qkv_bias": True, "o_bias": True, "qk_norm": True, "tie_word_embeddings": True},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_shapes_of_the_model(tiny_decoder, changes):
    pair = Pair(tiny_decoder(**changes), max_requests=2)
    run(pair, [B - 2, 70])
    assert min(counts(pair)) > 0


@pytest.mark.parametrize("lengths", [(3 * B,), (B - 1, 50)], ids=str)
def test_padded_rows_change_nobody(tiny_decoder, lengths):
    """A CUDA graph runs at a fixed batch size: rows of length 0 that point at row 0."""
    pair = Pair(tiny_decoder(), max_requests=2)
    run(pair, lengths, padding=2)


def test_a_row_is_taken_over_by_another_request(tiny_decoder):
    """Pages and slots of a request that left still hold its records; the next one must not."""
    pair = Pair(tiny_decoder(), max_requests=2)
    run(pair, [90, 40], steps=6)
    extents = pair.full.cache.slots.extent_of(0), pair.full.selector.extents.extent_of(0)
    of_records, of_pages = (slice(*extent) for extent in extents)
    pair.release(0)
    for records in pair.full.cache.records:  # nothing may be read of what the row had before
        records[of_records] = torch.nan
    for records in pair.sparse.cache.records:
        records[0] = torch.nan
    for one in pair.runners:
        one.selector.bounds[:, of_pages] = torch.nan
    owned = {page for pages in pair.host._pages.values() for page in pages}
    free = [page for page in range(pair.host.num_pages) if page not in owned]
    pages = pair.host.records.view(pair.full.num_layers, pair.host.num_pages, 4, -1)
    pages[:, free] = torch.nan
    pair.prefill(tokens(50, 7))
    assert pair.rows == [1, 0]
    for step in range(STEPS - 6):
        pair.decode(tokens(2, 2000 + step).tolist())
    assert min(counts(pair)) > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_simulated_kernels(tiny_decoder, dtype):
    """On a CPU too everything in a step can be done by kernels: the caches give the same bits."""
    pair = Pair(tiny_decoder(DTYPES[dtype], num_hidden_layers=2), max_requests=3, kernels=True)
    run(pair, [B - 1, 2 * B + 5], steps=3, padding=1)
    assert min(counts(pair)[:2]) > 0


def test_simulated_kernels_do_what_torch_does(tiny_decoder):
    """The same selections, and the logits within the tolerance of another order of sums."""
    decoder, lengths = tiny_decoder(num_hidden_layers=2), [3 * B + 5, 7]
    pairs = [Pair(decoder, max_requests=3, kernels=kernels) for kernels in (False, True)]
    for seed, length in enumerate(lengths):
        plain, simulated = (pair.prefill(tokens(length, seed)) for pair in pairs)
        assert_same_bits(simulated, plain, "logits of the prompt")
    for step in range(3):
        plain, simulated = (pair.decode([step, step + 1], padding=1) for pair in pairs)
        assert_same_bits(torch.stack(simulated[1]), torch.stack(plain[1]), "positions")
        assert_near(simulated[0], plain[0], 2e-5, f"step {step}, logits")
    assert counts(pairs[1]) == counts(pairs[0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [(3 * B + 5,), (1, B, 3 * B + 5), (B - 1, B + 1)], ids=str)
def test_on_a_gpu(tiny_decoder, lengths, dtype):
    pair = Pair(tiny_decoder(DTYPES[dtype], device="cuda"), max_requests=4)
    run(pair, lengths)
    assert min(counts(pair)) > 0


def test_the_whole_context_length(tiny_decoder):
    """The last position of the last page: nothing is one too small."""
    decoder = tiny_decoder()
    pair = Pair(decoder, max_requests=1, page_size=8)
    pair.prefill(tokens(MAX_MODEL_LEN - STEPS))
    for step in range(STEPS):
        pair.decode([step])
    assert pair.seq_lens == [MAX_MODEL_LEN]


def test_decode_is_its_layers(tiny_decoder):
    """`Runner.decode` is the loop that everybody else writes out."""
    decoder = tiny_decoder()
    pair = Pair(decoder, max_requests=2)
    whole = make_runner(
        decoder,
        cache="hisparse",
        selector="quest",
        hisparse=HiSparseConfig(top_k=K, page_size=4),
        max_model_len=MAX_MODEL_LEN,
        max_running_requests=2,
    )
    for seed, length in enumerate([20, 80]):
        pair.prefill(tokens(length, seed))
        whole.prefill(whole.admit(length + STEPS), tokens(length, seed))
    for step in range(STEPS):
        logits, _ = pair.decode([step, step + 1])
        batch = Batch.make(pair.rows, pair.seq_lens, "cpu")
        assert_same_bits(whole.decode(torch.tensor([step, step + 1]), batch), logits, "decode")


# ---- against oracles that know no cache ----


@pytest.mark.parametrize("length", [1, 17, 63, 64, 100])
def test_dense_attention_when_everything_is_selected(tiny_decoder, length):
    """top_k >= context: the sparse model is the dense one."""
    decoder = tiny_decoder()
    ids = tokens(length + STEPS)
    expected = dense_logits(decoder, ids)
    assert expected.std() > 0.3  # or the tolerance would mean nothing
    pair = Pair(decoder, max_requests=1, top_k=128, device_buffer_size=128)
    assert_near(pair.prefill(ids[:length]), expected[length - 1], 2e-5, "prompt")
    for position in range(length, len(ids)):
        logits, _ = pair.decode([int(ids[position])])
        assert_near(logits[0], expected[position], 2e-5, f"position {position}")
    assert counts(pair)[1] == 0


@pytest.mark.parametrize("length", [1, B - 1, B + 1, 100])
@pytest.mark.parametrize("top_k", [4, 16])
def test_masked_attention_over_the_selected_positions(tiny_decoder, length, top_k):
    """Attention reads the selected positions, all of them, and no others."""
    decoder = tiny_decoder()
    pair = Pair(decoder, max_requests=1, top_k=top_k, device_buffer_size=B)
    ids = tokens(length + STEPS)
    oracle = MaskedRun(decoder)
    expected = oracle.forward(ids[:length])[-1]
    assert_near(pair.prefill(ids[:length]), expected, 2e-5, "prompt")
    dense = dense_logits(decoder, ids)
    far_from_dense = 0.0
    for position in range(length, len(ids)):
        logits, selected = pair.decode([int(ids[position])])
        expected = oracle.decode(ids[position], [s[0] for s in selected])
        assert_near(logits[0], expected, 2e-5, f"position {position}")
        far_from_dense = max(far_from_dense, (logits[0] - dense[position]).abs().max().item())
    assert far_from_dense > 1e-2  # something was left out


class MaskedRun(DenseRun):
    """DenseRun whose decode steps see some positions only."""

    def decode(self, token_id: Tensor, selected: Sequence[Tensor]) -> Tensor:
        """One token, and per layer the positions [K] that it may see -> logits [V]."""
        decoder, position = self.decoder, torch.tensor([self.seq_len])
        self.seq_len += 1
        hidden = decoder.embed(token_id[None])
        for layer, positions in enumerate(selected):
            _, q, records = decoder.attention_inputs(layer, hidden, position)
            k, v = records.view(len(q), 2, -1, q.shape[2]).unbind(1)
            self.keys[layer].append(k.clone())
            self.values[layer].append(v.clone())
            group = q.shape[1] // k.shape[1]
            keys, values = (
                torch.cat(x[layer]).repeat_interleave(group, dim=1)
                for x in (self.keys, self.values)
            )
            scores = torch.einsum("hd,shd->hs", q[0], keys) / q.shape[-1] ** 0.5
            hidden_from = torch.ones(self.seq_len, dtype=torch.bool)
            hidden_from[positions[positions >= 0].long()] = False
            weights = scores.masked_fill(hidden_from, -torch.inf).softmax(dim=-1)
            attention = torch.einsum("hs,shd->hd", weights, values)
            hidden = decoder.attention_output(layer, hidden, attention[None])
        return decoder.logits(hidden)[0]


# ---- prefill in chunks ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [1, 7, 32, 50])
def test_chunks_of_the_prompt(tiny_decoder, monkeypatch, chunk, dtype):
    """Chunks that do not divide the prompt, of one token, and of the prompt's size."""
    decoder, length = tiny_decoder(DTYPES[dtype]), 50
    one_chunk = Pair(decoder, max_requests=1)
    expected = one_chunk.prefill(tokens(length))
    monkeypatch.setattr(runner, "PREFILL_CHUNK", chunk)
    pair = Pair(decoder, max_requests=1)
    tolerance = {"fp32": 2e-5, "fp16": 2e-2, "bf16": 2e-1}[dtype]
    assert_near(pair.prefill(tokens(length)), expected, tolerance, "logits")
    for layer in range(pair.full.num_layers):
        cut, whole = (p.full.cache.records[layer][0, :length] for p in (pair, one_chunk))
        assert_near(cut, whole, tolerance, f"layer {layer}, records")
    for step in range(4):
        pair.decode([step])


def test_the_shipped_chunk_is_crossed(tiny_decoder):
    """A prompt of more than one chunk with the constant as it is."""
    decoder, length = tiny_decoder(), runner.PREFILL_CHUNK + 9
    ids = tokens(length)
    settings = {"selector": "quest", "max_model_len": length + 8, "max_running_requests": 1}
    settings["hisparse"] = HiSparseConfig(top_k=K, device_buffer_size=B)
    for kind in ("full", "hisparse"):
        one = make_runner(decoder, cache=kind, **settings)
        logits = one.prefill(one.admit(length + 8), ids)
        assert_near(logits, dense_logits(decoder, ids)[-1], 2e-5, kind)


# ---- these tests can fail ----


def wrong_slot(resolution):
    """The last selected position but one gets the slot of its neighbour."""
    slots = resolution.slots.clone()
    slots[:, 1] = slots[:, 0]
    return resolution._replace(slots=slots)


def no_fetch(resolution):
    return resolution._replace(fetch=torch.zeros_like(resolution.fetch))


def one_fetch_forgotten(resolution):
    fetch = resolution.fetch.clone()
    for row in fetch:
        row[row.nonzero()[:1, 0]] = False
    return resolution._replace(fetch=fetch)


@pytest.mark.parametrize("fault", [wrong_slot, no_fetch, one_fetch_forgotten])
def test_a_broken_resolve_is_found(tiny_decoder, monkeypatch, fault):
    right = gpu_cache.resolve_torch
    monkeypatch.setattr(gpu_cache, "resolve_torch", lambda *a, **k: fault(right(*a, **k)))
    pair = Pair(tiny_decoder(), max_requests=1)
    with pytest.raises(AssertionError, match="differ"):
        run(pair, [3 * B])


def test_a_broken_resolve_is_found_by_bits_alone(tiny_decoder, monkeypatch):
    """A wrong slot is in the attention output, not only in the checks of slots."""
    right = gpu_cache.resolve_torch
    monkeypatch.setattr(gpu_cache, "resolve_torch", lambda *a, **k: wrong_slot(right(*a, **k)))
    monkeypatch.setattr(Pair, "check_slots", lambda *_: None)
    monkeypatch.setattr(Pair, "check_state", lambda *_: None)
    pair = Pair(tiny_decoder(), max_requests=1)
    with pytest.raises(AssertionError, match="attention: .* differ"):
        run(pair, [3 * B])


def test_a_forgotten_host_backup_is_found(tiny_decoder, monkeypatch):
    """Without write-through a record is right until it is evicted and fetched again."""

    def without_host(self, layer, records, batch):
        write, self.host.write = self.host.write, lambda *_: None
        try:
            right(self, layer, records, batch)
        finally:
            self.host.write = write

    right = HiSparseCache.write_through
    monkeypatch.setattr(HiSparseCache, "write_through", without_host)
    pair = Pair(tiny_decoder(), max_requests=1)
    with pytest.raises(AssertionError, match="host"):
        run(pair, [3 * B])


def test_layers_that_share_their_host_rows_are_found(tiny_decoder, monkeypatch):
    """vLLM #57019: a layer that overwrites another's records, invisible with equal layers."""
    host_pool = type(Pair(tiny_decoder(), max_requests=1).host)
    read, write = host_pool.read, host_pool.write
    monkeypatch.setattr(host_pool, "read", lambda self, _, rows: read(self, 0, rows))
    monkeypatch.setattr(host_pool, "write", lambda self, _, rows, x: write(self, 0, rows, x))
    pair = Pair(tiny_decoder(), max_requests=1)
    with pytest.raises(AssertionError, match="host"):
        pair.prefill(tokens(3 * B))


def test_steps_differ(tiny_decoder):
    """The tokens, selections and logits of a run are not all alike, or bits would prove little."""
    pair = Pair(tiny_decoder(), max_requests=1)
    pair.prefill(tokens(3 * B))
    logits, selected = zip(*(pair.decode([step]) for step in range(8)), strict=True)
    assert all((a - b).abs().max() > 0.1 for a, b in pairwise(logits))
    assert len({tuple(bits(s[0]).flatten().tolist()) for step in selected for s in step}) > 8
