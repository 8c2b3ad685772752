"""Guards: scores of the wrong head, key, request or rotation; a list that is not that of the best
positions, or lacks the first and the most recent ones; a newest key that is missing, or differs
from a prompt's; padding and unwritten memory that matter; answers that depend on the rest of the
batch, on the order of threads and blocks, or on how blocks share tiles; kernels that spill, or keep
the lengths they were captured with.

The oracle is the rule, request by request, in float64. Scores are compared with a tolerance; the
list must be exactly that of the kernel's own scores; keys are compared as in test_index_keys.py.
"""

import re
from functools import partial

import pytest
import torch
from rig import assert_same_bits, difference
from test_index_keys import BF16, DEVICES, E4M3, FP16, FP32, Layer, rotated
from test_kernels_compile import REGISTERS, SHARED_BYTES, machine_code, number, spilled_bytes
from test_top_k import compile_or_skip
from torch import Tensor

from minihisparse.kernels import lightning_indexer, simulator
from minihisparse.kernels.index_scores import SCORE_THREADS, score_kernel, tile_positions
from minihisparse.kernels.lightning_indexer import LightningIndexer

GARBAGE = 123456
SMOLLM2 = {"num_heads": 4, "head_dim": 64, "rope_dim": 32, "rope_theta": 1e5}
SMOLLM2 |= {"num_sinks": 4, "num_recent": 16, "top_k": 256}


class Rig(Layer):
    """Requests with keys of their own, in one layer of two; all that is not theirs is NaN."""

    def __init__(self, lens: list[int], device: str, *, padding=1, max_len=0, **options):
        self.lens, self.padding = lens, padding
        self.batch_rows = len(lens) + padding
        max_len = max(*lens, max_len, 1)
        num_rows = len(lens) + 2
        super().__init__(
            num_slots=3 + num_rows * max_len,
            device=device,
            max_requests=self.batch_rows + 1,
            max_model_len=max_len,
            **options,
        )
        self.rows = torch.randperm(num_rows, generator=self.generator)[: len(lens)]
        order = torch.randperm(num_rows, generator=self.generator)
        longest, last = int(self.rows[lens.index(max(lens))]), int(order.argmax())
        order[[longest, last]] = order[[last, longest]]  # its keys end where the memory does
        self.first_slot = (3 + order * max_len).to(device)
        for request, seq_len in enumerate(lens):
            slots = self.slots_of(request, seq_len - 1)  # the newest key is not there yet
            count = len(self.keys[slots])
            keys = self.normal(count, self.sizes["head_dim"])
            if self.scales is not None:
                self.scales[slots] = keys.abs().amax(1).to(device) / 448
                keys = keys / (keys.abs().amax(1, keepdim=True) / 448)
            self.keys[slots] = keys.to(self.state_dtype).to(device)
        self.p = self.new_product()
        for name, tensor in vars(self.indexer).items():
            if isinstance(tensor, Tensor) and name != "angles":
                tensor.fill_(torch.nan if tensor.is_floating_point() else GARBAGE)

    def new_product(self) -> Tensor:
        p = self.product(self.batch_rows)
        p[len(self.lens) :] = torch.nan
        return p

    def slots_of(self, request: int, seq_len: int) -> slice:
        first = int(self.first_slot[self.rows[request]])
        return slice(first, first + max(seq_len, 0))

    def batch(self) -> tuple[Tensor, Tensor, Tensor]:
        """What padded rows say is not to be trusted."""
        seq_lens = torch.tensor([*self.lens, *[77] * self.padding], dtype=torch.int32)
        rows = torch.cat([self.rows, torch.full((self.padding,), GARBAGE)])
        num_real = torch.tensor([len(self.lens)], dtype=torch.int32)
        return seq_lens.to(self.device), rows.to(self.device), num_real.to(self.device)

    def select_only(self) -> Tensor:
        state = self.keys, self.scales, self.first_slot
        return self.indexer.select(*state, self.p, self.gain, self.bias, *self.batch())

    def expected_scores(self, request: int, seq_len: int) -> tuple[Tensor, Tensor]:
        """float64 [S]: the rule with the state's keys; and how large what is summed is."""
        sizes, p = self.sizes, self.p[request].cpu().float()
        num_heads, d = sizes["num_heads"], sizes["head_dim"]
        q = p[: num_heads * d].view(1, num_heads, d)
        q = rotated(q, self.angles[seq_len - 1 : seq_len])[0].to(self.dtype).double()  # [H, d]
        w = p[(num_heads + 1) * d :][:num_heads].double() / (num_heads * d) ** 0.5  # [H]
        slots = self.slots_of(request, seq_len)
        k = self.keys[slots].cpu().double()  # [S, d]
        if self.scales is not None:
            k = k * self.scales[slots].cpu().double()[:, None]
        scores = (k @ q.T).relu() @ w
        return scores, (k.abs() @ q.abs().T) @ w.abs()

    def select(self) -> Tensor:
        """Selects, and checks keys, scores, lists, and what must not change; scores [R, N]."""
        before, sizes = self.snapshot(), self.sizes
        positions = self.select_only()
        assert positions.shape == (self.batch_rows, sizes["top_k"])
        real = torch.tensor([i for i, seq_len in enumerate(self.lens) if seq_len > 0])
        newest = torch.tensor([self.lens[i] - 1 for i in real])
        slots = self.first_slot.cpu()[self.rows[real]] + newest
        self.check(before, slots, *self.expected(self.p[real.to(self.device)], newest))
        all_scores, positions = self.indexer._scores.cpu().clone(), positions.cpu()
        for request, seq_len in enumerate(self.lens):
            ours = all_scores[request, :seq_len].clone()
            assert all_scores[request, seq_len:].isnan().all(), "scores behind the end"
            if seq_len <= sizes["top_k"]:
                assert positions[request].tolist() == [
                    i if i < seq_len else -1 for i in range(sizes["top_k"])
                ]
                continue
            forced = torch.zeros(seq_len, dtype=torch.bool)
            forced[: sizes["num_sinks"]] = True
            forced[seq_len - sizes["num_recent"] :] = True
            assert torch.equal(ours == torch.inf, forced)
            rule, magnitude = self.expected_scores(request, seq_len)
            rounding = 2e-6 if self.exact or self.dtype == FP32 else 4e-3  # of q, on a GPU
            delta = (ours.double() - rule).abs() / magnitude
            assert (delta[~forced] <= rounding).all(), (
                f"request {request}: {difference(ours[~forced], rule[~forced].float())}"
            )
            best = ours.sort(descending=True, stable=True).indices[: sizes["top_k"]]
            expected = best.sort().values.int()
            assert torch.equal(positions[request], expected), (
                f"request {request}: {difference(positions[request], expected)}"
            )
        assert all_scores[len(self.lens) :].isnan().all(), "scores of padding"
        assert (positions[len(self.lens) :] == -1).all(), "padding"
        assert (self.indexer.positions[self.batch_rows :] == GARBAGE).all(), "unused rows"
        return all_scores[: self.batch_rows]


# -- selection ----------------------------------------------------------------------------------

SHAPES = {
    "tiny": {},
    "smollm2": {**SMOLLM2, "top_k": 40},
    "smollm2_e4m3": {**SMOLLM2, "top_k": 40, "state_dtype": E4M3},
    "5_heads_fp16": {"num_heads": 5, "head_dim": 32, "dtype": FP16, "state_dtype": FP16},
    "64_heads": {"num_heads": 64, "head_dim": 128, "rope_dim": 64},
    "64_heads_e4m3": {"num_heads": 64, "head_dim": 128, "rope_dim": 64, "state_dtype": E4M3},
    "wide_keys": {"num_heads": 2, "head_dim": 128, "dtype": FP32, "state_dtype": FP32},
    "odd_rope": {"num_heads": 3, "rope_dim": 6, "dtype": FP32, "state_dtype": FP32},
    "narrow_keys": {"num_heads": 1, "rope_dim": 16, "num_sinks": 0, "state_dtype": E4M3},
    "all_forced": {"num_heads": 7, "num_sinks": 4, "num_recent": 12},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES)
def test_select(shape, device):
    """One position, K, one more, a tile and some more; none; padding."""
    options = SHAPES[shape]
    top_k = options.get("top_k", 16)
    lens = [1, top_k, top_k + 1, 0, 700, 1500]
    if device == "cpu":
        lens = [1, top_k, top_k + 1, 0, 150] if shape == "tiny" else [top_k + 1, 75]
        if shape.startswith("64"):
            lens = [20]
    rig = Rig(lens, device, padding=2, max_len=1600 if device == "cuda" else 160, **options)
    rig.select()
    if device == "cuda":
        rig.p = rig.new_product()
        rig.select()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("state_dtype", [BF16, E4M3])
def test_a_request_that_grows(state_dtype, device):
    """Key by key it writes the bytes that a prompt's keys have, and selects from them."""
    rig = Rig([12], device, padding=0, max_len=40, num_heads=2, state_dtype=state_dtype)
    other = Layer(num_slots=40, device=device, num_heads=2, state_dtype=state_dtype)
    products = []
    for seq_len in range(12, 20):
        rig.lens = [seq_len]
        rig.p = rig.new_product()
        products.append(rig.x_of(rig.p))
        rig.select()
        rig.indexer._scores.fill_(torch.nan)
    p = other.product(8)
    p[:, 32:48] = torch.cat(products).to(device)
    other.indexer.write_prompt(other.keys, other.scales, 5, 11, p, rig.gain, rig.bias)
    slots = rig.slots_of(0, 19)
    assert_same_bits(rig.keys[slots][11:].cpu(), other.keys[16:24].cpu())
    if state_dtype == E4M3:
        assert_same_bits(rig.scales[slots][11:].cpu(), other.scales[16:24].cpu())


@pytest.mark.parametrize("device", DEVICES)
def test_equal_scores(device):
    """Ties go to the lowest position; the first and the most recent ones are there all the same."""
    rig = Rig([90], device)
    rig.keys[rig.slots_of(0, 89)] = 0.5
    rig.select()
    assert rig.indexer.positions[0].tolist() == [*range(13), 87, 88, 89]


@pytest.mark.parametrize("device", DEVICES)
def test_a_nan_is_selected_last(device):
    """NaN in a key shows in its score alone."""
    rig = Rig([60], device, num_heads=1, dtype=FP32, state_dtype=FP32)
    rig.keys[rig.slots_of(0, 60)][20, 3] = torch.nan
    rig.select_only()
    assert rig.indexer._scores[0, :60].isnan().nonzero().tolist() == [[20]]
    assert 20 not in rig.indexer.positions[0].tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_bits_do_not_depend_on_the_batch(device):
    """Alone, or with others: the same scores, the same list."""
    rig = Rig([90, 20, 130], device, **{**SMOLLM2, "top_k": 32})
    together, list_together = rig.select(), rig.indexer.positions[2].clone()
    rig.lens, rig.rows, rig.batch_rows, rig.padding = rig.lens[2:], rig.rows[2:], 1, 0
    rig.p = rig.p[2:3]
    rig.indexer._scores.fill_(torch.nan)
    rig.indexer.positions.fill_(GARBAGE)
    assert_same_bits(rig.select()[0], together[2])
    assert torch.equal(rig.indexer.positions[0], list_together)


@pytest.mark.parametrize("blocks", [1, 8])
def test_shares_of_blocks(blocks, monkeypatch):
    """Blocks that take turns at tiles, in an order that differs from seed to seed."""
    sizes = {"num_heads": 1, "head_dim": 32, "dtype": FP32, "state_dtype": FP32}
    lens = [3 * tile_positions("fp32", 32) + 3, 64, 65, 10]
    rigs = [Rig(lens, "cpu", **sizes) for _ in range(2)]
    first, original = rigs[0].select(), simulator.run
    monkeypatch.setattr(lightning_indexer, "SCORE_BLOCKS", blocks)
    for seed, resident_blocks in ((0, None), (1, 2)):
        run = partial(original, seed=seed, resident_blocks=resident_blocks)
        monkeypatch.setattr(simulator, "run", run)
        assert_same_bits(rigs[1].select(), first)
        assert torch.equal(rigs[1].indexer.positions, rigs[0].indexer.positions)


# -- on a GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    "lens, options",
    [
        ([8192], {}),
        ([8192 - 61 * i for i in range(128)], {}),
        ([8192 - 61 * i for i in range(32)], {"top_k": 2048, "state_dtype": E4M3}),
        ([1_000_001], {"top_k": 2048}),
        ([131_072, 5, 65_536, 100_001], {"top_k": 2048, "num_heads": 64, "head_dim": 128}),
    ],
    ids=["one", "batch", "batch_e4m3", "a_million", "deepseek"],
)
def test_models(lens, options):
    rig = Rig(lens, "cuda", **SMOLLM2 | options)
    for _ in range(3):
        rig.select()


@pytest.mark.gpu
def test_a_state_of_more_than_2_gib():
    num_slots = 2**31 // 64 + 1000  # twice as many bytes
    layer = Layer(num_slots=2, device="cuda", **SMOLLM2, max_model_len=700)
    keys = torch.zeros(num_slots, 64, dtype=BF16, device="cuda")
    keys[-700:] = torch.randn(700, 64, device="cuda").to(BF16)
    p = layer.product(1)
    ints = {"dtype": torch.int32, "device": "cuda"}
    batch = torch.tensor([700], **ints), torch.tensor([0], device="cuda"), torch.ones(1, **ints)
    rest = p, layer.gain, layer.bias, *batch
    first_slot = torch.tensor([num_slots - 700], device="cuda")
    far = layer.indexer.select(keys, None, first_slot, *rest).clone()
    near = layer.indexer.select(keys[-700:].clone(), None, first_slot * 0, *rest)
    assert torch.equal(near, far) and (far >= 0).all()
    assert keys[-1].any() and not keys[:-700].any()


@pytest.mark.gpu
@pytest.mark.parametrize("state_dtype", [BF16, E4M3])
def test_graph_replay(state_dtype):
    """Captured with requests of no length; then they come, grow and go."""
    lens = [5000, 100, 900, 255]
    rig = Rig(lens, "cuda", padding=2, max_len=8192, **SMOLLM2, state_dtype=state_dtype)
    static = [torch.zeros_like(tensor) for tensor in rig.batch()]
    p, rows = torch.zeros_like(rig.p), rig.rows
    layer = rig.first_slot, p, rig.gain, rig.bias
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        positions = rig.indexer.select(rig.keys, rig.scales, *layer, *static)
    for step in range(20):
        rig.lens = [seq_len + step for seq_len in lens[: 2 + step % 3]]
        rig.padding, rig.rows = rig.batch_rows - len(rig.lens), rows[: len(rig.lens)]
        p.copy_(rig.new_product())
        eager, scales = rig.keys.clone(), None if rig.scales is None else rig.scales.clone()
        expected = rig.indexer.select(eager, scales, *layer, *rig.batch()).clone()
        for held, new in zip(static, rig.batch(), strict=True):
            held.copy_(new)
        positions.fill_(GARBAGE)
        graph.replay()
        assert torch.equal(positions, expected)
        assert_same_bits(rig.keys.cpu(), eager.cpu())


# -- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"head_dim": 48}, "head_dim=48 must be one of (16, 32, 64, 128)"),
        ({"num_heads": 0}, "num_heads=0 in 1..64"),
        ({"num_heads": 65}, "num_heads=65 in 1..64"),
        ({"rope_dim": 7}, "rope_dim=7 must be even"),
        ({"rope_dim": 66}, "rope_dim=66 must be even, and in 2..head_dim=64"),
        ({"num_recent": 0}, "num_recent=0 at least 1"),
        ({"num_sinks": 241}, "both together at most top_k=256"),
        ({"top_k": 9000}, "top_k=9000"),
        ({"max_requests": 0}, "max_requests=0"),
        ({"max_model_len": 0}, "max_model_len=0"),
        ({"dtype": torch.float64}, "float64"),
        ({"state_dtype": FP32}, "state_dtype=torch.float32 is neither torch.bfloat16 nor"),
    ],
)
def test_sizes_that_are_refused(changes, message):
    sizes = SMOLLM2 | {"max_requests": 2, "max_model_len": 9, "dtype": BF16, "state_dtype": BF16}
    with pytest.raises(ValueError, match=re.escape(message)):
        LightningIndexer(**sizes | {"device": torch.device("cpu")} | changes)


def test_tensors_that_are_refused():
    rig = Rig([5], "cpu", num_heads=3)
    changed = {
        r"keys is torch.bfloat16 \(18, 8\)": {"keys": rig.keys[:, :8]},
        r"keys is torch.float16 \(18, 16\)": {"keys": rig.keys.half()},
        "keys must be contiguous": {"keys": rig.keys[::2]},
        "scales must be given for float8_e4m3fn alone": {"scales": rig.all_scales[1]},
        r"p is torch.float32 \(2, 68\), expected torch.bfloat16": {"p": rig.p.float()},
        "at least 67 columns": {"p": rig.p[:, :66]},
        "give W an even number of rows": {"p": rig.p[:, :67]},
        r"p has 4 rows, more than self.max_requests=3": {"p": torch.cat([rig.p, rig.p])},
        r"gain is torch.bfloat16 \(15,\)": {"gain": rig.gain[:15]},
        r"bias is torch.float32 \(16,\)": {"bias": rig.bias.float()},
        r"seq_lens is \(1,\), expected \(2,\)": {"seq_lens": rig.batch()[0][:1]},
        r"req_pool_indices is \(1,\)": {"req_pool_indices": rig.batch()[1][:1]},
    }
    names = "keys", "scales", "first_slot", "p", "gain", "bias"
    good = {name: getattr(rig, name) for name in names}
    good |= zip(("seq_lens", "req_pool_indices", "num_real_reqs"), rig.batch(), strict=True)
    for message, change in changed.items():
        with pytest.raises(ValueError, match=message):
            rig.indexer.select(**good | change)
    with pytest.raises(TypeError, match="first_slot must be torch.int64"):
        rig.indexer.select(**good | {"first_slot": rig.first_slot.int()})
    rig = Rig([5], "cpu", state_dtype=E4M3)
    for scales in (None, rig.scales[:-1], rig.scales.double()):
        with pytest.raises(ValueError, match="scales"):
            rest = rig.first_slot, rig.p, rig.gain, rig.bias, *rig.batch()
            rig.indexer.select(rig.keys, scales, *rest)


def test_no_requests():
    rig = Rig([5], "cpu")
    none = [tensor[:0] for tensor in rig.batch()[:2]]
    num_real = torch.zeros(1, dtype=torch.int32)
    rest = rig.p[:0], rig.gain, rig.bias, *none, num_real
    assert rig.indexer.select(rig.keys, None, rig.first_slot, *rest).shape == (0, 16)


def test_device_bytes():
    sizes = SMOLLM2 | {"max_requests": 3, "dtype": BF16, "state_dtype": E4M3}
    indexer = LightningIndexer(**sizes, max_model_len=8190, device=torch.device("cpu"))
    scratch = 3 * (8192 * 4 + 4 + 256 * 4)  # scores, lens, the answer
    assert indexer.device_bytes == 8190 * 32 * 4 + scratch + indexer._top_k.device_bytes


# -- machine code -------------------------------------------------------------------------------

CASES = [(cc, "bf16", "bf16", 4, 64) for cc in SHARED_BYTES]
CASES += [(cc, "bf16", "e4m3", 4, 64) for cc in ((7, 5), (9, 0), (12, 0))]
CASES += [((9, 0), "bf16", "e4m3", 64, 128), ((9, 0), "fp32", "fp32", 3, 16)]


@pytest.mark.parametrize("cc, dtype, state, num_heads, head_dim", CASES)
def test_machine_code(cc, dtype, state, num_heads, head_dim, tmp_path):
    sizes = {"dtype": dtype, "state": state, "num_heads": num_heads, "head_dim": head_dim}
    kernel = score_kernel(**sizes, rope_dim=head_dim // 2, num_sinks=4, num_recent=16, top_k=256)
    code = compile_or_skip(kernel, cc)
    registers = number(r"Used (\d+) registers", code.log)
    shared = sum(map(int, re.findall(r"\.shared \.align \d+ \.b8 \w+\[(\d+)\]", code.ptx)))
    name = f"sm_{cc[0]}{cc[1]} index_scores {dtype} {state} {num_heads} x {head_dim}"
    print(f"\n{name}: {registers} registers, shared {shared}", end="")
    assert spilled_bytes(code) == 0
    assert number(r"(\d+) bytes stack frame", code.log) == 0
    # So many blocks at least run at once.
    assert registers * SCORE_THREADS <= REGISTERS // (3 if cc >= (9, 0) else 2)
    assert shared <= 48 * 1024
    assert not re.findall(r"\.f64\b", code.ptx), "float64"
    assert not re.findall(r"\.local\b", code.ptx), "local memory"
    assert re.findall(r"ld\.shared\.v4\.f32", code.ptx)
    # The first keys are under way before the barrier, the next ones before these are multiplied.
    per_lane = min(
        4, (head_dim if state == "e4m3" else head_dim * (2 + 2 * (state == "fp32"))) // 16
    )
    before, _, after = code.ptx.partition("bar.sync")
    assert before.count("ld.global.v4.u32") == after.count("ld.global.v4.u32") == per_lane
    assert after.rindex("ld.global.v4.u32") < after.index("fma.rn.f32")
    if cc == (9, 0):
        sass = machine_code(code.cubin, tmp_path)
        assert not re.findall(r"\b(?:LDL|STL|DADD|DMUL|DFMA|DSETP)\b", sass)
        assert len(re.findall(r"\bLDG\.E\.128", sass)) == 2 * per_lane
        assert re.findall(r"\bLDS\.128", sass)
