"""Guards, on a GPU: what a simulator cannot show. Integers that overflow, memory that other blocks
see late, threads of a warp that run together, CUDA graphs, sizes of the paper, many launches.

The small cases are in test_resolver.py, which runs compiled where there is a GPU.
"""

import pytest
import torch
from kernel_rig import CPU, GARBAGE, KernelRig, Twin, ints, random_walk, selection

from minihisparse.kernels.resolver import Resolver

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")

PAPER = {"top_k": 2048, "num_slots": 4096, "record_bytes": 1152, "page_size": 16, "max_len": 6144}
PAPER_RUNS = {  # requests, steps, options
    "one_thread": (2, 1, {"rung": "one_thread"}),
    "one_block": (64, 3, {"rung": "one_block", "swap_in_block_size": 1024}),
    "one_block_256": (3, 3, {"rung": "one_block", "swap_in_block_size": 256}),
    "fused": (64, 10, {"swap_in_block_size": 1024, "blocks_per_request": 1}),
    "fused_512": (5, 3, {"swap_in_block_size": 512}),
    "fused_2_blocks": (64, 3, {"swap_in_block_size": 1024, "blocks_per_request": 2}),
    "fused_16_blocks": (2, 5, {"swap_in_block_size": 1024, "blocks_per_request": 16}),
    "fused_for_one_request": (1, 10, {"swap_in_block_size": None}),
    "fused_4_bytes_at_a_time": (3, 3, {"swap_in_block_size": 1024, "record_offset": 4}),
    "fused_skip_io": (8, 3, {"swap_in_block_size": None, "skip_io": True}),
    "fused_plan": (8, 3, {"swap_in_block_size": None, "record_plan": True}),
    "fused_checked": (8, 3, {"swap_in_block_size": None, "checked": True}),
    "fused_everything": (
        3,
        3,
        {"swap_in_block_size": 1024, "blocks_per_request": 3, "record_plan": True, "checked": True},
    ),
}


def decode(rig: KernelRig, num_steps: int) -> None:
    """Steps of all request rows, growing; most of a selection was selected before."""
    rng, top_k, num_rows = rig.rng, rig.top_k, len(rig.uids)
    [layer] = rig.layers
    rows = rng.sample(range(num_rows), num_rows)
    lens = [rng.randint(layer.num_slots, rig.max_len - num_steps) for _ in rows]
    lens[0] = layer.num_slots + 1
    if num_rows > 2:
        lens[1:3] = layer.num_slots - num_steps // 2, top_k // 2  # one grows across B
    for row, seq_len in zip(rows, lens, strict=True):
        rig.random_state(row, seq_len)
    chosen = [set(rng.sample(range(seq_len), min(top_k, seq_len))) for seq_len in lens]
    for step in range(num_steps):
        positions = []
        for index, seq_len in enumerate(lens):
            some, keep = chosen[index], rng.choice((0.5, 0.9, 1.0))
            kept = [position for position in some if rng.random() < keep][: top_k - 1]
            rest = rng.sample(range(seq_len), min(top_k - len(kept), seq_len))
            some = sorted({*kept, *rest, seq_len - 1})[-top_k:]
            chosen[index] = set(some)
            positions.append(some + [-1] * (top_k - len(some)))
        if step == 1:
            rng.shuffle(positions[0])
            positions[0][0] = positions[0][top_k // 2]
        rig.resolve(rows, lens, positions)
        lens = [seq_len + 1 for seq_len in lens]


@pytest.mark.parametrize("run", PAPER_RUNS)
def test_the_papers_sizes(run):
    """K = 2048, B = 4096, 1,152 bytes per record; every byte and every entry, after every step."""
    num_rows, num_steps, options = PAPER_RUNS[run]
    decode(KernelRig(GPU, num_rows=num_rows, seed=num_rows, **PAPER | options), num_steps)


@pytest.mark.parametrize("top_k, num_slots", [(8192, 32_767), (4096, 4096), (1, 32_767)])
def test_the_largest_sizes(top_k, num_slots):
    rig = KernelRig(
        GPU,
        top_k=top_k,
        num_slots=num_slots,
        num_rows=3,
        max_len=40_000,
        record_bytes=16,
        swap_in_block_size=1024,
        page_size=7,
        seed=1,
    )
    decode(rig, 3)


def test_more_shared_memory_than_the_chip_has():
    sizes = {"top_k": 16_384, "num_slots": 16_384, "swap_in_block_size": 1024}
    rig = KernelRig(GPU, **sizes, num_rows=1, max_len=9, record_bytes=4)
    message = r"resolve_fused needs \d+ bytes of shared memory per block, .* has \d+ left for it"
    with pytest.raises(ValueError, match=f"^{message}$"):
        rig.resolve([0], [9], [[-1] * 16_384])
    with pytest.raises(ValueError, match=f"^top_k=16384: {message}; lower --top-k$"):
        rig.resolver.load()


@pytest.mark.parametrize("tiles", [33, 64, 65])
def test_many_positions_per_thread(tiles):
    """Each thread keeps a bit per position: right, or refused, when it has no bits left."""
    top_k = 32 * (tiles - 1) + 5
    sizes = {"top_k": top_k, "num_slots": top_k + 40, "num_rows": 3, "max_len": 3 * top_k}
    if tiles > 64:
        with pytest.raises(ValueError, match="swap_in_block_size=32"):
            KernelRig(GPU, **sizes, record_bytes=4, swap_in_block_size=32)
        return
    decode(KernelRig(GPU, **sizes, record_bytes=4, swap_in_block_size=32, seed=tiles), 3)


@pytest.mark.parametrize("rung", ["one_block", "fused"])
def test_calls_of_different_sizes_take_turns(rung):
    """Layers of one cache, and two caches: each launch asks for its own shared memory."""
    sizes = {"max_len": 5000, "num_rows": 2, "record_bytes": 16, "swap_in_block_size": 1024}
    large = KernelRig(GPU, top_k=2048, num_slots=[4096, 2048, 3072], rung=rung, **sizes)
    small = KernelRig(GPU, top_k=100, num_slots=200, rung=rung, **sizes)
    for layer in (0, 1, 2, 0, 2, 1, 0):
        for rig, at in ((large, layer), (small, 0)):
            rig.random_state(1, 4900, at)
            positions = sorted(rig.rng.sample(range(4900), rig.top_k))
            rig.resolve([1], [4900], [positions], layer=at)


@pytest.mark.parametrize("blocks", [1, 8])
def test_more_blocks_than_run_at_once(blocks):
    """800 blocks of 1,024 threads: those that wait must not keep out those they wait for."""
    rig = KernelRig(
        GPU,
        top_k=64,
        num_slots=128,
        num_rows=100,
        max_len=400,
        record_bytes=64,
        swap_in_block_size=1024,
        blocks_per_request=blocks,
    )
    decode(rig, 10)


def test_one_kernel_runs_compiled_and_simulated():
    """In one process, on tensors of either device, in turns."""
    rigs = [KernelRig(device, seed=2, top_k=5, num_slots=9) for device in (GPU, CPU)]
    for rig in rigs:
        rig.random_state(1, 50)
    for seq_len in (50, 51):
        positions = [3, seq_len - 1, 17, 8, 3]
        slots = [rig.resolve([1], [seq_len], [positions]) for rig in rigs]
        assert slots[0] == slots[1]
    for on_gpu, simulated in zip(rigs[0].twins, rigs[1].twins, strict=True):
        assert torch.equal(on_gpu.actual_bytes.cpu(), simulated.actual_bytes)


def test_vector_14_random_walk():
    """10,000 calls: of three layers, requests that come and go, everything compared each time."""
    rig = KernelRig(
        GPU,
        top_k=6,
        num_slots=[10, 8, 12],
        num_rows=5,
        max_requests=6,
        max_len=60,
        record_bytes=20,
        seed=7,
    )
    seen = random_walk(rig, 3_334)
    assert min(seen.values()) > 80 and seen["calls"] >= 10_000, seen
    assert all((layer.counters.actual > 3_000).all() for layer in rig.layers)


# -- CUDA graphs ------------------------------------------------------------------------------


def assert_same_memory(a: KernelRig, b: KernelRig) -> None:
    """The device's side of both, fences included; answers and plans are compared elsewhere."""
    torch.cuda.synchronize()
    for one, other in zip(a.twins, b.twins, strict=True):
        if one not in (a.answer, *a.plan):
            assert torch.equal(one.actual_bytes, other.actual_bytes), one.name
    assert not b.resolver._handover.any()


GRAPH_RUNS = {
    "one_thread": {"rung": "one_thread"},
    "one_block": {"rung": "one_block", "swap_in_block_size": 64},
    "fused": {"blocks_per_request": 1},
    "fused_4_blocks": {"blocks_per_request": 4, "swap_in_block_size": 64},
    "fused_plan": {"record_plan": True},
    "fused_skip_io": {"skip_io": True, "record_plan": True},
}


@pytest.mark.parametrize("run", GRAPH_RUNS)
def test_vector_11_graph_replay(run):
    """Captured once, replayed 200 times with other requests, lengths and selections each time.

    An eager twin does the same and is compared with the oracle; the graph's tables, records,
    counters and plans are then compared with the twin's.
    """
    sizes = {"top_k": 6, "num_slots": [10, 8], "num_rows": 4, "max_requests": 6}
    sizes |= {"max_len": 48, "record_bytes": 20, "seed": 5} | GRAPH_RUNS[run]
    eager, graphed = KernelRig(GPU, **sizes), KernelRig(GPU, **sizes)
    num_layers, num_requests, rng = len(eager.layers), 6, eager.rng
    positions = torch.zeros(num_layers, num_requests, 6, dtype=torch.int32, device=GPU)
    seq_lens = torch.zeros(num_requests, dtype=torch.int32, device=GPU)
    rows = torch.zeros(num_requests, dtype=torch.int64, device=GPU)
    num_real_reqs = torch.zeros(1, dtype=torch.int32, device=GPU)
    answers = torch.zeros_like(positions)
    plans = [[torch.zeros_like(part) for part in graphed.resolver.miss_plan] for _ in answers]

    def all_layers() -> None:
        for layer in range(num_layers):
            batch = positions[layer], seq_lens, rows, num_real_reqs
            answers[layer].copy_(graphed.resolver.resolve(*batch, **graphed.arguments(layer)))
            for copy, part in zip(plans[layer], graphed.resolver.miss_plan, strict=True):
                copy.copy_(part)

    all_layers()  # compiles and loads; with no real request, nothing else happens
    assert_same_memory(eager, graphed)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_layers()

    for step in range(200):
        for row in range(4):
            if row not in eager.lens and rng.random() < 0.4:
                length = rng.choice((1, 7, 8, 9, 10, 11, rng.randint(1, 40)))
                eager.join(row, length)
                graphed.join(row, length)
            elif row in eager.lens and (eager.lens[row] == 48 or rng.random() < 0.02):
                eager.leave(row)
                graphed.leave(row)
        real = rng.sample(sorted(eager.lens), rng.randint(0, len(eager.lens)))
        eager.grow(real)
        graphed.grow(real)
        padding = num_requests - len(real)
        batch_rows = real + [rng.randrange(4) for _ in range(padding)]
        batch_lens = [eager.lens[row] for row in real] + [rng.choice((0, 30))] * padding
        chosen = [
            [selection(eager, layer, row) for row in real] + [[GARBAGE] * 6] * padding
            for layer in range(num_layers)
        ]
        positions.copy_(ints(chosen))
        seq_lens.copy_(ints(batch_lens))
        rows.copy_(ints(batch_rows, torch.int64))
        num_real_reqs.copy_(ints([len(real)]))
        graph.replay()
        for layer in range(num_layers):
            slots = eager.resolve(
                batch_rows, batch_lens, chosen[layer], num_real=len(real), layer=layer
            )
            assert answers[layer].tolist() == slots, f"step {step}, layer {layer}"
            if eager.record_plan:
                right = [part.tolist() for part in eager.resolver.miss_plan]
                found = [part.tolist() for part in plans[layer]]
                assert found[2] == right[2]
                for index, count in enumerate(right[2]):
                    assert found[0][index][:count] == right[0][index][:count]
                    assert found[1][index][:count] == right[1][index][:count]
        assert_same_memory(eager, graphed)
        graphed.answer.forgive()
        graphed.answer.check("after a replay")  # its fences


def test_what_a_capture_refuses():
    """Checked calls, which wait; nothing is changed. After `load`, no launch is needed before."""
    rig = KernelRig(GPU, checked=True, top_k=7, num_slots=11)
    batch = [ints([[0] * 7]), ints([9]), ints([1], torch.int64), ints([1])]
    batch = [tensor.to(GPU) for tensor in batch]
    with pytest.raises(RuntimeError, match="checked waits for the kernel, which a CUDA graph"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            batch[0].add_(0)
            rig.resolver.resolve(*batch, **rig.arguments())
    rig.check()
    rig = KernelRig(GPU, top_k=7, num_slots=13, blocks_per_request=2)
    rig.resolver.load()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        answer = rig.resolver.resolve(*batch, **rig.arguments())
    rig.check()
    graph.replay()
    assert answer.tolist() == [[0] * 7]


@pytest.mark.parametrize("blocks", [1, 3, 8])
def test_many_calls_in_a_row_without_a_wait(blocks):
    """The next launch starts where the last one ends, and finds its handover words at 0."""
    sizes = {"top_k": 256, "num_slots": 512, "num_rows": 3, "max_len": 2000, "record_bytes": 128}
    sizes |= {"swap_in_block_size": 256, "blocks_per_request": blocks, "seed": 6}
    eager, graphed = KernelRig(GPU, **sizes), KernelRig(GPU, **sizes)
    rows, lens = [2, 0, 1], [1500, 1900, 300]
    for rig in (eager, graphed):
        for row, seq_len in zip(rows, lens, strict=True):
            rig.random_state(row, seq_len)
    steps = [
        [[eager.rng.randrange(seq_len // (1 + step % 3)) for _ in range(256)] for seq_len in lens]
        for step in range(50)
    ]
    on_gpu = ints(steps).to(GPU)
    batch = ints(lens).to(GPU), ints(rows, torch.int64).to(GPU), ints([3]).to(GPU)
    answers = torch.zeros_like(on_gpu)
    idle = on_gpu[0], batch[0], batch[1], torch.zeros_like(batch[2])
    graphed.resolver.resolve(*idle, **graphed.arguments())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for positions, answer in zip(on_gpu, answers, strict=True):
            answer.copy_(graphed.resolver.resolve(positions, *batch, **graphed.arguments()))
    graph.replay()
    assert answers.tolist() == [eager.resolve(rows, lens, positions) for positions in steps]
    assert_same_memory(eager, graphed)


# -- memory that only a GPU distinguishes -----------------------------------------------------


def test_a_pageable_host_pool_is_refused():
    rig = KernelRig(GPU)
    given = rig.arguments() | {"host_records": torch.zeros(99, 16, dtype=torch.uint8)}
    batch = [ints([[1, 2, 3]]), ints([9]), ints([1], torch.int64), ints([1])]
    batch = [tensor.to(GPU) for tensor in batch]
    for rung in ("one_thread", "one_block", "fused"):
        resolver = Resolver(
            max_requests=3,
            top_k=3,
            device_buffer_size=4,
            record_bytes=16,
            req_to_host_pool=rig.table.actual,
            page_size=3,
            rung=rung,
        )
        with pytest.raises(ValueError, match="host_records is in pageable host memory"):
            resolver.resolve(*batch, **given)
        with pytest.raises(ValueError, match="host_records must be in host memory, got device cu"):
            resolver.resolve(*batch, **given | {"host_records": rig.layers[0].records.actual[0]})
        for name in ("device_buffer_tokens", "lru_slots", "records"):
            with pytest.raises(
                ValueError, match=f"{name} is on cpu, the other arguments are on cu"
            ):
                resolver.resolve(*batch, **rig.arguments() | {name: given[name].cpu()})
        for place, name in enumerate(("seq_lens", "req_pool_indices", "num_real_reqs"), 1):
            moved = [tensor.cpu() if i == place else tensor for i, tensor in enumerate(batch)]
            with pytest.raises(ValueError, match=f"{name} is on cpu, the other arguments are on"):
                resolver.resolve(*moved, **rig.arguments())
        with pytest.raises(ValueError, match="is on cuda:0, the other arguments are on cpu"):
            resolver.resolve(*(tensor.cpu() for tensor in batch), **rig.arguments())
    rig.check()


def test_pinned_memory_of_either_kind():
    """torch's pinned allocator, and memory registered in place as HostPool does."""
    from minihisparse.host_store import HostPool

    pool = HostPool(
        num_layers=2,
        record_width=8,
        num_pages=10,
        page_size=4,
        max_requests=2,
        max_pages_per_request=5,
        dtype=torch.float32,
        device=GPU,
    )
    pool.records.copy_(torch.arange(pool.records.numel()).view_as(pool.records))
    pool.allocate(0, 20)
    pool.allocate(1, 17)
    for host in (pool.records[1], pool.records[1].clone().pin_memory()):
        resolver = Resolver(
            max_requests=1,
            top_k=3,
            device_buffer_size=4,
            record_bytes=32,
            req_to_host_pool=pool.req_to_host_pool,
            page_size=4,
        )
        records = torch.zeros(2, 5, 8, device=GPU)
        slots = resolver.resolve(
            *(
                t.to(GPU)
                for t in (ints([[13, 2, 9]]), ints([17]), ints([1], torch.int64), ints([1]))
            ),
            device_buffer_tokens=torch.full((2, 4), -1, dtype=torch.int32, device=GPU),
            lru_slots=torch.arange(4, dtype=torch.int16, device=GPU).repeat(2, 1),
            host_records=host,
            records=records,
            counters=torch.zeros(3, dtype=torch.int64, device=GPU),
        )
        assert slots.tolist() == [[0, 1, 2]]
        requests, positions = ints([1], torch.int64).to(GPU), ints([13, 2, 9]).to(GPU)
        host_rows = pool.host_rows_of(requests, positions).cpu()
        assert torch.equal(records[1, :3].cpu(), pool.records[1][host_rows])


def test_twins_notice_what_is_written_beside_a_tensor():
    """The fences work on the device too."""
    twin = Twin("a tensor", ints([1, 2, 3]), GPU, offset=4)
    twin.check()
    twin.actual_bytes[1024 + 4 + 12] = 0
    with pytest.raises(pytest.fail.Exception, match="bytes beside a tensor"):
        twin.check()
