"""Guards: blocks that are compressed before they are whole, from another request's sums, or
otherwise in chunks than at once; heads that are mixed up; a window or a forced block that is left
out, or that makes the list longer than K; a branch that reads another's positions; padding that
writes.

The reference compresses, ranks and attends request by request in float64, with loops over heads,
blocks and positions, from the whole history of keys and values.
"""

import math

import pytest
import torch
from conftest import make_tiny_decoder
from rig import assert_near, assert_same_bits
from torch import Tensor

from minihisparse.addon import SIZES, Addon, fingerprint, write_addon
from minihisparse.assembly import make_runner
from minihisparse.attention import decode_attention, gated_attention
from minihisparse.batch import Batch
from minihisparse.config import HiSparseConfig
from minihisparse.model import AttentionInputs, Decoder
from minihisparse.nsa import LARGEST_LOGIT, NSASelector, tensor_name, weight_shapes

LAYER = 1  # of three: the others must stay as they are
SETTINGS = {
    "block_size": 4,
    "window": 6,
    "num_first_blocks": 1,
    "num_last_blocks": 2,
    "top_k": 24,
}
KERNELS = [False, True]


def nsa_addon(model: Decoder, seed: int = 0, **changes: float) -> Addon:
    """Random weights: no two heads, places or branches are alike."""
    settings, c = SETTINGS | changes, model.config
    generator = torch.Generator().manual_seed(seed)
    shapes = weight_shapes(
        c.num_attention_heads,
        c.num_key_value_heads,
        c.head_dim,
        c.hidden_size,
        settings["block_size"],
    )
    tensors = {
        tensor_name(layer, name): torch.randn(shape, generator=generator)
        / (shape[-1] ** 0.5 if name.endswith("weight") else 1.0)
        for layer in range(c.num_hidden_layers)
        for name, shape in shapes.items()
    }
    metadata = {name: str(getattr(c, name)) for name in SIZES}
    metadata |= {"model": "tiny", "weights_fingerprint": fingerprint(model)}
    return Addon("nsa", settings, tuple(range(c.num_hidden_layers)), tensors, metadata)


def make_selector(model: Decoder, addon: Addon | None = None, **changes) -> NSASelector:
    """All state NaN, so that whatever nobody wrote shows. The last request row has the first
    blocks: no block is right by accident.
    """
    options = {"top_k": 24, "max_requests": 3, "max_model_len": 96, "kernels": False} | changes
    selector = NSASelector(addon or nsa_addon(model), model, **options)
    selector.records.fill_(torch.nan)
    selector.sums.fill_(torch.nan)
    for row in reversed(range(options["max_requests"])):
        selector.admit(row, options["max_model_len"])
    return selector


def history(model: Decoder, seed: int, length: int) -> AttentionInputs:
    """Inputs of a request's positions, standard normal."""
    c, generator = model.config, torch.Generator().manual_seed(seed)
    shapes = (c.hidden_size,), (c.num_attention_heads, c.head_dim), (c.record_width,)
    return AttentionInputs(
        *(torch.randn(length, *s, generator=generator).to(model.dtype) for s in shapes)
    )


def part(inputs: AttentionInputs, first: int, end: int) -> AttentionInputs:
    return AttentionInputs(*(tensor[first:end] for tensor in inputs))


def newest(histories: list[AttentionInputs], padding: int = 0) -> AttentionInputs:
    """The last token of each; padded rows bring NaN."""
    rows = [part(h, len(h.x) - 1, len(h.x)) for h in histories]
    rows += [AttentionInputs(*(torch.full_like(t, torch.nan) for t in rows[0]))] * padding
    return AttentionInputs(*(torch.cat(tensors) for tensors in zip(*rows, strict=True)))


# -- the reference ----------------------------------------------------------------------------


class Reference:
    """One request's newest query, in float64."""

    def __init__(
        self, model: Decoder, addon: Addon, inputs: AttentionInputs, layer: int = LAYER
    ) -> None:
        c, s = model.config, addon.settings
        self.heads, self.kv_heads, self.dim = (
            c.num_attention_heads,
            c.num_key_value_heads,
            c.head_dim,
        )
        self.size, self.window, self.settings = s["block_size"], s["window"], s
        self.length = len(inputs.x)
        self.x, self.q = inputs.x.double(), inputs.q[-1].double()
        self.vectors = inputs.records.double().view(self.length, 2 * self.kv_heads, self.dim)
        names = "pool.weight", "place", "proj.weight", "gate.weight", "gate.bias"
        self.pool, self.place, self.proj, self.gate, self.bias = (
            addon.tensors[tensor_name(layer, name)].to(model.dtype).double() for name in names
        )

    def record(self, block: int) -> Tensor:
        """The compressed K and V of a complete block, [2 * Hkv, D]."""
        out = []
        for j in range(2 * self.kv_heads):
            total, norm = torch.zeros(self.dim, dtype=torch.float64), 0.0
            for place in range(self.size):
                t = block * self.size + place
                logit = float(self.x[t] @ self.pool[j]) + float(self.place[place, j])
                weight = math.exp(max(-LARGEST_LOGIT, min(LARGEST_LOGIT, logit)))
                total, norm = total + weight * self.vectors[t, j], norm + weight
            out.append(self.proj[j] @ (total / norm))
        return torch.stack(out)

    def attend(self, head: int, keys: list[Tensor], values: list[Tensor]) -> tuple[list, Tensor]:
        """Softmax weights, and the output, zero if there are no keys."""
        if not keys:
            return [], torch.zeros(self.dim, dtype=torch.float64)
        scores = torch.stack([self.q[head] @ key for key in keys]) / math.sqrt(self.dim)
        weights = scores.softmax(0)
        return weights.tolist(), sum(w * v for w, v in zip(weights, values, strict=True))

    def run(self, top_k: int) -> tuple[list[int], Tensor, float]:
        """Positions with -1 at the end, the attention output [Hq, D], and the score between the
        last block that is selected and the first that is not.
        """
        group = self.heads // self.kv_heads
        records = [self.record(b) for b in range(self.length // self.size)]
        num_blocks = -(-self.length // self.size)
        shares, compressed = [0.0] * num_blocks, []
        for head in range(self.heads):
            k, v = head // group, self.kv_heads + head // group
            weights, out = self.attend(head, [r[k] for r in records], [r[v] for r in records])
            compressed.append(out)
            for block, weight in enumerate(weights):
                shares[block] += weight
        first, last = self.settings["num_first_blocks"], self.settings["num_last_blocks"]
        forced = {b for b in range(num_blocks) if b < first or b >= num_blocks - last}
        others = sorted(set(range(num_blocks)) - forced, key=lambda b: (-shares[b], b))
        room = top_k // self.size - len(forced)
        blocks = forced | set(others[:room])
        margin = math.inf
        if len(others) > room > 0:
            margin = shares[others[room - 1]] - shares[others[room]]
        selected = [p for p in range(self.length) if p // self.size in blocks]
        window = list(range(max(0, self.length - self.window), self.length))
        gates = torch.sigmoid(self.gate @ self.x[-1] + self.bias).view(self.heads, 3)
        outputs = []
        for head in range(self.heads):
            k, v = head // group, self.kv_heads + head // group
            branches = [compressed[head]]
            for read in (selected, window):
                keys, values = ([self.vectors[p, j] for p in read] for j in (k, v))
                branches.append(self.attend(head, keys, values)[1])
            outputs.append(sum(g * out for g, out in zip(gates[head], branches, strict=True)))
        positions = sorted({*selected, *window})
        return positions + [-1] * (top_k - len(positions)), torch.stack(outputs), margin


def attend(selector: NSASelector, inputs: AttentionInputs, histories: list, batch: Batch):
    """Positions and the gated output of a step, over records that lie where the positions say."""
    selector.write(LAYER, inputs, batch)
    positions = selector.select(LAYER, inputs, batch)
    branches = selector.branches(LAYER, inputs, positions, batch)
    records = torch.cat([h.records for h in histories])
    starts = torch.zeros(len(positions), dtype=torch.int64)
    lengths = torch.tensor([len(h.x) for h in histories])
    starts[1 : len(histories)] = lengths[:-1].cumsum(0)

    def attend_slots(slots: Tensor) -> Tensor:
        return decode_attention(inputs.q, records, slots, starts)

    return positions, gated_attention(attend_slots, positions, branches)


# -- compression ------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [[30], [1] * 30, [4, 8, 18], [3, 1, 5, 7, 14], [13, 2, 15]])
def test_a_prompt_in_chunks(tiny_decoder, chunks):
    """Wherever a chunk begins and ends, inside a block or at its edge."""
    model = tiny_decoder()
    selector, inputs = make_selector(model), history(model, 0, 30)
    first = 0
    for chunk in chunks:
        selector.write_prompt(LAYER, 1, first, part(inputs, first, first + chunk))
        first += chunk
    expected = Reference(model, nsa_addon(model), inputs)
    start = selector.extents.extent_of(1)[0]
    for block in range(7):
        got = selector.records[LAYER, start + block].view(4, 8)
        assert_near(got, expected.record(block), 1e-5)
    assert selector.records[[0, 2]].isnan().all() and selector.sums[[0, 2]].isnan().all()
    touched = ~selector.records[LAYER].isnan().all(dim=1)
    assert touched.nonzero().flatten().tolist() == list(range(start, start + 8))


@pytest.mark.parametrize("prompt", [0, 3, 4, 13])
def test_token_by_token_is_the_same_as_at_once(tiny_decoder, prompt):
    """And a row's former request leaves nothing behind."""
    model = tiny_decoder()
    selector, inputs = make_selector(model), history(model, 1, 30)
    selector.write_prompt(LAYER, 1, 0, history(model, 9, 6))
    if prompt:
        selector.write_prompt(LAYER, 1, 0, part(inputs, 0, prompt))
    for length in range(prompt + 1, 31):
        batch = Batch.make([1], [length], "cpu")
        selector.write(LAYER, part(inputs, length - 1, length), batch)
    at_once = make_selector(model)
    at_once.write_prompt(LAYER, 1, 0, inputs)
    start, end = selector.extents.extent_of(1)
    for one in (selector, at_once):
        one.records[:, end:] = 0
    assert_near(
        selector.records[LAYER, start : start + 8], at_once.records[LAYER, start : start + 8], 1e-5
    )
    assert_near(selector.sums[LAYER, 1], at_once.sums[LAYER, 1], 1e-4)


def test_a_huge_logit_stays_finite(tiny_decoder):
    model = tiny_decoder()
    addon = nsa_addon(model)
    addon.tensors[tensor_name(LAYER, "place")][:] = torch.tensor([1e4, -1e4, 1e4, -1e4])
    selector, inputs = make_selector(model, addon), history(model, 0, 8)
    selector.write_prompt(LAYER, 1, 0, inputs)
    start = selector.extents.extent_of(1)[0]
    expected = Reference(model, addon, inputs)
    assert_near(selector.records[LAYER, start + 1].view(4, 8), expected.record(1), 1e-5)


# -- selection and attention ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "changes, kernels",
    [
        ({}, False),
        ({}, True),
        ({"window": 8}, False),
        ({"window": 1, "num_last_blocks": 1}, False),
        ({"block_size": 8, "num_first_blocks": 0, "window": 16}, False),
        ({"num_first_blocks": 2, "window": 5}, False),
    ],
    ids=str,
)
def test_every_query_reads_and_gives_what_the_reference_does(tiny_decoder, dtype, changes, kernels):
    """Three requests of different lengths, and a padded row, over steps across block edges."""
    model = tiny_decoder(dtype)
    addon = nsa_addon(model, **changes)
    for name, tensor in addon.tensors.items():
        addon.tensors[name] = tensor.to(dtype).float()
    selector = make_selector(model, addon, kernels=kernels, max_requests=4)
    lengths, rows = [70, 23, 2], [2, 0, 1]
    whole = [history(model, seed, length + 9) for seed, length in enumerate(lengths)]
    for row, length, inputs in zip(rows, lengths, whole, strict=True):
        selector.write_prompt(LAYER, row, 0, part(inputs, 0, length))
    clear = 0
    for step in range(1, 5 if kernels else 10):
        histories = [part(h, 0, n + step) for h, n in zip(whole, lengths, strict=True)]
        batch = Batch.make(rows, [n + step for n in lengths], "cpu", padding=1)
        inputs = newest(histories, padding=1)
        positions, output = attend(selector, inputs, histories, batch)
        assert positions.dtype == torch.int32 and positions.shape == (4, 24)
        assert positions[3].tolist() == [-1] * 24
        for index, one in enumerate(histories):
            expected, attention, margin = Reference(model, addon, one).run(24)
            if margin > (1e-5 if dtype == torch.float32 else 0.05):
                clear += 1
                assert positions[index].tolist() == expected
                tolerance = 1e-5 if dtype == torch.float32 else 0.03
                assert_near(output[index], attention, tolerance)
    assert clear >= (8 if kernels else 15)
    assert not selector.records[LAYER, : selector.extents.num_units].isinf().any()


def test_equal_scores_go_to_the_lowest_block(tiny_decoder):
    model = tiny_decoder()
    selector, inputs = make_selector(model), history(model, 0, 80)
    inputs.q.zero_()
    selector.write_prompt(LAYER, 0, 0, part(inputs, 0, 79))
    batch = Batch.make([0], [80], "cpu")
    positions, _ = attend(selector, newest([inputs]), [inputs], batch)
    assert positions[0].tolist() == [*range(16), *range(72, 80)]


@pytest.mark.parametrize("length", [77, 78, 79, 80])
def test_the_window_and_the_blocks_fill_k_and_no_more(tiny_decoder, length):
    """With a window as long as the newest blocks, the rest of a block that moved out is read."""
    model = tiny_decoder()
    selector, inputs = make_selector(model, nsa_addon(model, window=8)), history(model, 0, length)
    inputs.q.zero_()
    selector.write_prompt(LAYER, 0, 0, part(inputs, 0, length - 1))
    batch = Batch.make([0], [length], "cpu")
    positions, _ = attend(selector, newest([inputs]), [inputs], batch)
    assert positions[0].tolist() == [*range(16), *range(length - 8, length)]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 23, 24])
def test_up_to_k_positions_all_are_read(tiny_decoder, length):
    model = tiny_decoder()
    selector, inputs = make_selector(model), history(model, 0, length)
    if length > 1:
        selector.write_prompt(LAYER, 0, 0, part(inputs, 0, length - 1))
    batch = Batch.make([0], [length], "cpu")
    positions, output = attend(selector, newest([inputs]), [inputs], batch)
    assert positions[0].tolist() == [*range(length), *[-1] * (24 - length)]
    assert_near(output[0], Reference(model, nsa_addon(model), inputs).run(24)[1], 1e-5)


def test_padding_writes_nothing(tiny_decoder):
    """Not even where padded rows carry a length and a row, as in a graph's warm-up."""
    model = tiny_decoder()
    selector, inputs = make_selector(model), history(model, 0, 10)
    for row in range(3):
        selector.write_prompt(LAYER, row, 0, inputs)
    records, sums = selector.records.clone(), selector.sums.clone()
    rows, lengths = torch.tensor([0, 1]), torch.tensor([11, 7], dtype=torch.int32)
    batch = Batch(rows, lengths, torch.tensor([0], dtype=torch.int32), 0, 11, 0)
    positions, output = attend(selector, part(inputs, 0, 2), [inputs] * 2, batch)
    assert (positions == -1).all() and (output == 0).all()
    assert_same_bits(selector.records[:, :-1], records[:, :-1])
    assert_same_bits(selector.sums[:, :-1], sums[:, :-1])


# -- sizes and errors -------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_size_is_what_is_taken(tiny_decoder, dtype, kernels):
    model = tiny_decoder(dtype)
    addon = nsa_addon(model)
    options = {"top_k": 24, "max_model_len": 90, "kernels": kernels}
    for rows in (1, 3):
        selector = NSASelector(addon, model, max_requests=rows, **options)
        size = NSASelector.size(addon, dtype=dtype, **options)
        units = rows * size.units(90)
        total = size.fixed_bytes + rows * size.row_bytes + units * size.unit_bytes
        assert selector.state_bytes == total


@pytest.mark.parametrize(
    "changes, top_k, message",
    [
        ({}, 22, "whole blocks of 4"),
        ({}, 8, "at least 12 for the 3 blocks"),
        ({"window": 9}, 24, "window of 9"),
        ({"window": 0}, 24, "window of 0"),
        ({"num_last_blocks": 0, "window": 1}, 24, "in its 0"),
    ],
)
def test_settings_that_do_not_fit(tiny_decoder, changes, top_k, message):
    model = tiny_decoder()
    with pytest.raises(ValueError, match=message):
        NSASelector(
            nsa_addon(model, **changes), model, top_k=top_k, max_requests=1, max_model_len=64
        )


def test_a_tensor_that_is_missing(tiny_decoder):
    model, addon = tiny_decoder(), nsa_addon(tiny_decoder())
    del addon.tensors[tensor_name(2, "place")]
    with pytest.raises(ValueError, match=r"lacks the tensor model.layers.2.self_attn.nsa.place"):
        NSASelector(addon, model, top_k=24, max_requests=1, max_model_len=64)


# -- at work ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", KERNELS)
def test_both_caches_give_the_same_bits(tiny_decoder, tmp_path, kernels):
    """And the first layer's attention is the reference's: the branches read the right slots."""
    model = tiny_decoder()
    addon, path = nsa_addon(model), tmp_path / "addon"
    write_addon(path, addon)
    settings = {
        "selector": "nsa",
        "selector_weights": path,
        "hisparse": HiSparseConfig(top_k=24, device_buffer_size=32, page_size=4),
        "max_model_len": 96,
        "max_running_requests": 2,
        "checked": True,
        "kernels": kernels,
    }
    runners = [make_runner(model, cache=cache, **settings) for cache in ("full", "hisparse")]
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(128, (n,), generator=generator) for n in (61, 30)]
    for runner in runners:
        for state in (runner.selector.records, runner.selector.sums):
            state.fill_(torch.nan)
        for prompt in tokens:
            runner.prefill(runner.admit(96), prompt)
    for _ in range(1 if kernels else 12):
        new = torch.randint(128, (2,), generator=generator)
        tokens = [torch.cat([t, new[i : i + 1]]) for i, t in enumerate(tokens)]
        batch = Batch.make([0, 1], [len(t) for t in tokens], "cpu")
        hidden = [runner.embed(new) for runner in runners]
        for layer in range(3):
            results = [
                runner.decode_layer(layer, h, batch)
                for runner, h in zip(runners, hidden, strict=True)
            ]
            for name in ("positions", "attention", "hidden"):
                assert_same_bits(*(getattr(result, name) for result in results), name)
            hidden = [result.hidden for result in results]
            if layer:
                continue
            for row, ids in enumerate(tokens):
                inputs = model.attention_inputs(0, model.embed(ids), torch.arange(len(ids)))
                expected = Reference(model, addon, inputs, layer=0).run(24)
                assert results[0].positions[row].tolist() == expected[0]
                assert_near(results[0].attention[row], expected[1], 1e-4)


@pytest.mark.gpu
def test_graph_replay():
    """Captured without requests; then 1 to 3 of them take part in a step. Beside it, torch on a
    CPU.
    """
    model, reference = make_tiny_decoder(device="cuda"), make_tiny_decoder()
    addon = nsa_addon(reference)
    ours, other = make_selector(model, addon, kernels=True), make_selector(reference, addon)
    lengths, rows = [70, 23, 5], [2, 0, 1]
    whole = [history(reference, seed, length + 20) for seed, length in enumerate(lengths)]
    for row, length, inputs in zip(rows, lengths, whole, strict=True):
        other.write_prompt(LAYER, row, 0, part(inputs, 0, length))
        on_gpu = AttentionInputs(*(tensor.cuda() for tensor in part(inputs, 0, length)))
        ours.write_prompt(LAYER, row, 0, on_gpu)
    static = AttentionInputs(*(torch.zeros(3, *t.shape[1:], device="cuda") for t in whole[0]))
    req_rows = torch.zeros(3, dtype=torch.int64, device="cuda")
    seq_lens, num_real = (torch.zeros(n, dtype=torch.int32, device="cuda") for n in (3, 1))

    def run() -> list[Tensor]:
        batch = Batch(req_rows, seq_lens, num_real)
        ours.write(LAYER, static, batch)
        positions = ours.select(LAYER, static, batch)
        return [positions, *ours.branches(LAYER, static, positions, batch)]

    with torch.inference_mode():
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = run()
        for step in range(24):
            count = 1 + step % 3
            for index in range(count):
                lengths[index] += lengths[index] < len(whole[index].x)
            histories = [part(whole[i], 0, lengths[i]) for i in range(count)]
            batch = Batch.make(rows[:count], lengths[:count], "cpu", padding=3 - count)
            inputs = newest(histories, padding=3 - count)
            for held, new in zip(static, inputs, strict=True):
                held.copy_(new)
            for held, new in zip((seq_lens, req_rows, num_real), batch.tensors, strict=True):
                held.copy_(new)
            graph.replay()
            other.write(LAYER, inputs, batch)
            positions = other.select(LAYER, inputs, batch)
            expected = [positions, *other.branches(LAYER, inputs, positions, batch)]
            for got, wanted in zip(results, expected, strict=True):
                assert_near(got[:count].cpu().float(), wanted[:count].float(), 1e-4)
            assert (results[0][count:] == -1).all()
            for row in rows:
                assert_near(ours.sums[LAYER, row].cpu(), other.sums[LAYER, row], 1e-3)
