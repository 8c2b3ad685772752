# %% [markdown]
# # 8. Hiding the rest
#
# - **Question**: must attention wait for the bus, or can records come while something else runs?
# - **Minutes**: 30
# - **Needs**: a CPU; the figure needs the extra `plots`; with a GPU, one section more runs
# - **Previous**: 07_teaching_a_model_where_to_look
#
# In chapter 6 all times add up: a layer selects, fetches, then attends, and nothing overlaps. What
# is fetched is little, but the step waits for all of it. Some models (and the selector
# `dsa-shared`) let several layers read the same positions. Then the first of them can decide for
# the others, and their records can be on the way before it is their turn: **plan, then IO**.

# %%
import time
from typing import NamedTuple

import torch
from torch import Tensor

from minihisparse.anchors import anchor_of_layers, anchors_of_pattern
from minihisparse.assembly import make_runner
from minihisparse.batch import Batch
from minihisparse.bench_engine import free_memory
from minihisparse.bench_table import compare_with_no_io
from minihisparse.config import HiSparseConfig
from minihisparse.decode_step import DecodeStep
from minihisparse.gpu_cache import HiSparseCache
from minihisparse.host_store import HostPool
from minihisparse.kernels.resolve import resolve_oracle
from minihisparse.model import Decoder
from minihisparse.model_config import ModelConfig
from minihisparse.plots import COLOURS, new_figure, save
from minihisparse.prefetcher import Prefetcher
from minihisparse.runner import Runner
from minihisparse.synthetic import GivenSelections, fill, sliding_selections

# %% [markdown]
# ## Why the IO is exposed
#
# One layer of a decode step, on one stream:
#
#     norm, q k v, write-through | select | Resolve: decide, then fetch | attention, mlp
#
# Each part needs the one before. The selection needs this layer's query, so the bus has nothing to
# do until it is made, and attention has nothing to do until the bus is done. If the next layer's
# selection were known now, its records could be fetched under this layer's attention and mlp. Can
# it be guessed?
#
# The obvious guess: it will be the one that this layer just made. What counts is not how much two
# selections have in common. Most of a selection is in slots already; the guess has to name what is
# *not*. So we stop the engine before each layer and look into its slots. (A tiny model with random
# weights: its numbers mean nothing. Run this on your model before you believe any.)

# %%
CONTEXT, STEPS = 240, 24
tiny = ModelConfig(64, 32, 48, 6, 4, 2, 8, max_position_embeddings=512)
quest = make_runner(
    Decoder.random(tiny, seed=8),
    cache="hisparse",
    selector="quest",
    hisparse=HiSparseConfig(top_k=32, device_buffer_size=64, page_size=4),
    max_model_len=CONTEXT + STEPS,
    max_running_requests=1,
)
generator = torch.Generator().manual_seed(8)
ids = torch.randint(64, (CONTEXT + STEPS,), generator=generator)
row = quest.admit(CONTEXT + STEPS)
quest.prefill(row, ids[: CONTEXT - 1])
quest.decode(ids[CONTEXT - 1 : CONTEXT], Batch.make([row], [CONTEXT], "cpu"))  # fills the slots
quest.cache.reset_counters()

# %%
overlaps, misses, guessed, useful = [], 0, 0, 0
for S in range(CONTEXT + 1, CONTEXT + STEPS + 1):
    batch, before = Batch.make([row], [S], "cpu"), None
    hidden = quest.embed(ids[S - 1 : S])
    for layer in range(tiny.num_hidden_layers):
        there = {*quest.cache.tables(layer)[0][row].tolist(), S - 1}
        result = quest.decode_layer(layer, hidden, batch)
        hidden, picks = result.hidden, {*result.positions[0].tolist()} - {-1}
        if before is not None:
            overlaps.append(len(before & picks) / len(before | picks))  # Jaccard
            misses += len(picks - there)
            guessed += len(before - there)
            useful += len((before - there) & picks)
        before = picks
print(f"Jaccard of neighbouring layers: {sum(overlaps) / len(overlaps):.2f} (1: equal)")
print(f"{misses} misses; the guess would fetch {guessed} records, {useful} of them are wanted")

# %% [markdown]
# A wrong guess is worse than none: it takes the bus and a slot from somebody. (The paper tried this
# on a trained model, and it did not pay: what neighbours have in common was resident already.)
#
# ## Layers that share
#
# Nothing needs to be guessed where a model was trained to let layers share: an **anchor** selects,
# and the **shared layers** after it read the same positions. Its config says which: a letter per
# layer, `F` selects (full), `S` shares.

# %%
PATTERN = "FSSFSS"
ANCHOR_OF = anchor_of_layers(anchors_of_pattern(PATTERN, len(PATTERN)), len(PATTERN))


def shared_layers(anchor: int, anchor_of: tuple[int, ...]) -> list[int]:
    return [layer for layer, of in enumerate(anchor_of) if of == anchor != layer]


groups = {anchor: shared_layers(anchor, ANCHOR_OF) for anchor in sorted({*ANCHOR_OF})}
print(f"{PATTERN}: anchor of each layer {ANCHOR_OF}; anchor -> shared layers {groups}")

# %% [markdown]
# ## Lockstep
#
# The same selection is not yet the same *misses*. Those depend on what is in the slots, and that on
# all selections before. But if two layers have made the same selections since the request came, the
# replacement rule has had the same input every time. So their tables are equal: every position is
# in the same slot, and the order of eviction is the same.
#
# To see it, we need caches without a model. Records are numbers that say where they belong:
# `1000 * layer + position`. Selections are made up: the newest position, and others, the older the
# rarer.

# %%
K, B, MAX_LEN = 4, 8, 64


def make_cache(anchor_of: tuple[int, ...] | None, num_layers: int) -> HiSparseCache:
    """For two request rows, of which row 0 is taken and has a prompt of K tokens."""
    cpu, sizes = torch.device("cpu"), {"num_layers": num_layers, "record_width": 2}
    pages = {"page_size": 4, "num_pages": 32, "max_pages_per_request": 16}
    host = HostPool(**sizes, **pages, max_requests=2, dtype=torch.float32, device=cpu)
    options = {"max_requests": 2, "top_k": K, "device_buffer_size": B, "anchor_of": anchor_of}
    cache = HiSparseCache(host=host, device=cpu, **options)
    for records in [host.records, *cache.records]:
        records.fill_(torch.nan)  # what nobody wrote shows
    cache.admit(MAX_LEN)
    for layer in range(num_layers):
        cache.write_prompt(layer, 0, records_of(layer, torch.arange(K)))
    return cache


def records_of(layer: int, positions: Tensor) -> Tensor:
    return (1000.0 * layer + positions)[:, None].repeat(1, 2)


# %%
def make_picks(S: int, generator: torch.Generator) -> Tensor:
    """[1, K] int32, ascending."""
    age = torch.arange(S - 1, 0, -1)
    others = torch.multinomial(1 / age, K - 1, generator=generator)
    return torch.cat([others.sort().values, torch.tensor([S - 1])]).int()[None]


def write_newest(cache: HiSparseCache, layer: int, S: int) -> Batch:
    """Write-through of position S - 1 in one layer; the batch of this step."""
    batch = Batch.make([0], [S], "cpu")
    cache.write_through(layer, records_of(layer, torch.tensor([S - 1])), batch)
    return batch


def tables_of(cache: HiSparseCache, layer: int) -> list[list[int]]:
    """Positions in the slots of row 0, and its LRU order: copies."""
    return [table[0].tolist() for table in cache.tables(layer)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """The same bytes: here NaN equals NaN."""
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


# %% [markdown]
# First two layers that know nothing of each other. Each resolves for itself.

# %%
LENGTHS = range(K + 1, K + 41)  # past B, where slots begin to be refilled
generator.manual_seed(1)
HISTORY = {S: make_picks(S, generator) for S in LENGTHS}

alone, in_step, filled = make_cache(None, num_layers=2), [], []
for S, picks in HISTORY.items():
    for layer in (0, 1):
        alone.resolve(layer, picks, write_newest(alone, layer, S))
    in_step.append(tables_of(alone, 0) == tables_of(alone, 1))
    filled.append([records.clone() for records in (*alone.records, alone.host.records)])
print(f"equal after {sum(in_step)} of {len(in_step)} steps; the last one leaves")
for layer in (0, 1):
    tokens, lru_slots = tables_of(alone, layer)
    first = alone.records[layer][0, :B, 0].int().tolist()
    print(f"layer {layer}: positions {tokens}, LRU {lru_slots}, records {first}")

# %% [markdown]
# The tables are equal, the records are not. So one table is enough for both, and one Resolve. Its
# **miss plan** (which host rows go into which slots) is the plan of the whole group: host rows and
# slots have the same numbers in every layer. A shared layer *replays* it: it copies, and decides
# nothing. Equal tables that are stored twice could get out of step by an abort, or a bug; a table
# that is stored once cannot.


# %%
def share(copy_first: bool = False) -> tuple[HiSparseCache, dict, list[bool]]:
    """The cache, the plans by S, and in which steps all records equal those of `alone`."""
    cache, plans, equal = make_cache((0, 0), num_layers=2), {}, []
    for (S, picks), expected in zip(HISTORY.items(), filled, strict=True):
        batch = write_newest(cache, 0, S)
        plans[S] = resolve_oracle(picks[0].tolist(), S, *tables_of(cache, 0))[1]
        cache.resolve(0, picks, batch)  # decides, and fetches for layer 0
        if not copy_first:
            write_newest(cache, 1, S)
        cache.replay(1, batch)  # NEW: fetches for layer 1 what was fetched for layer 0
        if copy_first:
            write_newest(cache, 1, S)
        equal.append(same([*cache.records, cache.host.records], expected))
    return cache, plans, equal


sharing, plans, same_bytes = share()
print(f"the same bytes everywhere after {sum(same_bytes)} of {len(same_bytes)} steps")
print(f"bytes of tables: {alone.metadata_bytes} for two layers, {sharing.metadata_bytes} shared")

# %% [markdown]
# ## One step in slow motion
#
# Stop between plan and IO. The table already says what layer 1's slots *will* hold. The integrity
# check (every slot equals its host row) calls that an error.


# %%
def complaint_about(cache: HiSparseCache) -> str | None:
    try:
        cache.check_integrity()
    except AssertionError as error:
        return str(error)


def wrong_slots(cache: HiSparseCache, layer: int) -> dict[int, tuple[int, int]]:
    """slot -> the position that the table says, the record that is there."""
    tokens, found = tables_of(cache, layer)[0], cache.records[layer][0, :B, 0].tolist()
    pairs = enumerate(zip(tokens, found, strict=True))
    return {s: (p, int(x)) for s, (p, x) in pairs if p >= 0 and x != 1000 * layer + p}


S = LENGTHS[-1] + 1
batch = write_newest(sharing, 0, S)
old = torch.tensor([[0, 1, 2, S - 1]], dtype=torch.int32)
plan = resolve_oracle(old[0].tolist(), S, *tables_of(sharing, 0))[1]
sharing.resolve(0, old, batch)
write_newest(sharing, 1, S)
between = complaint_about(sharing), wrong_slots(sharing, 1)
sharing.replay(1, batch)
print("plan:", *plan)
print(f"between: {between[0]}; slot -> (position, record): {between[1]}")
print("afterwards:", complaint_about(sharing) or "no complaint")

# %% [markdown]
# Between the two, nothing may read layer 1's slots. Attention and mlp of layer 0 do not. That is
# the room in which a copy can hide.
#
# ## Two streams
#
# The copies go to a **side stream**. An event after Resolve tells it that the plan is there (fork);
# an event after each copy tells the main stream that a layer's records are there (wait).
#
#     main   Resolve 0 | attention, mlp 0 | q k v 1 | wait | attention, mlp 1 | q k v 2 | wait | ...
#                    |                                 ^                                   ^
#     side           '-> copy for 1 -------------------'-> copy for 2 ---------------------'
#
# How long does a step take? Give each part a time; a stream does one thing after the other.


# %%
class Times(NamedTuple):
    """Microseconds of one layer."""

    compute: float  # all but selection, Resolve and IO
    before: float  # the part of it that comes before the selection
    select: float
    resolve: float
    io: float  # the layer's missed records on the bus


class Bar(NamedTuple):
    stream: str
    layer: int
    what: str
    start: float
    end: float


# %%
def time_line(mode: str, us: Times, anchor_of: tuple[int, ...]) -> list[Bar]:
    """hisparse: all layers resolve. prefetch: anchors do. no-io: the same, with no copies."""
    bars, now, io, copied = [], 0.0, 0.0 if mode == "no-io" else us.io, {}

    def until(end: float, what: str) -> float:
        bars.append(Bar("main", layer, what, now, end))
        return end

    for layer, anchor in enumerate(anchor_of):
        start, now = now, now + us.before
        if layer == anchor:
            now = until(now + us.select, "select")
        if layer == anchor or mode == "hisparse":
            now = until(now + us.resolve + io, "resolve")
        elif mode == "prefetch":
            now = until(max(now, copied[layer]), "wait")
        if layer == anchor and mode == "prefetch":
            side = now  # the fork; all copies before have been waited for
            for shared in shared_layers(anchor, anchor_of):
                bars.append(Bar("side", shared, "copy", side, side + io))
                side = copied[shared] = side + io
        now += us.compute - us.before
        bars.append(Bar("main", layer, "compute", start, now))
    return bars


def step_us(mode: str, us: Times, anchor_of: tuple[int, ...]) -> float:
    return max(bar.end for bar in time_line(mode, us, anchor_of))


# %% [markdown]
# **The times are made up**, here and in the tables below. One group, event by event:

# %%
MODES = ("hisparse", "prefetch", "no-io")
made_up = Times(compute=40, before=10, select=10, resolve=5, io=50)
for bar in sorted(time_line("prefetch", made_up, ANCHOR_OF[:3]), key=lambda bar: bar[3:]):
    if bar.what != "compute":
        print(
            f"{bar.start:4g} to {bar.end:3g} us, {bar.stream} stream: layer {bar.layer} {bar.what}"
        )
print("step:", {mode: step_us(mode, made_up, ANCHOR_OF[:3]) for mode in MODES})

# %% [markdown]
# ## When is a copy hidden?
#
# The step without IO (the *no-IO oracle*) is the shortest that any prefetch can reach. **Exposed
# IO** is what a step takes longer. With prefetch, in a group of `G` layers:
#
# - The anchor's own IO is always exposed: nobody knew its selection earlier.
# - Between two waits there is the compute of one layer. A copy that takes no longer is hidden. Of a
#   longer one, the rest is exposed, in each of the `G - 1` shared layers.


# %%
def exposed(mode: str, us: Times, anchor_of: tuple[int, ...]) -> float:
    return step_us(mode, us, anchor_of) - step_us("no-io", us, anchor_of)


def exposed_by_formula(us: Times, num_layers: int, group: int) -> float:
    """With prefetch, and groups of equal size."""
    return num_layers // group * (us.io + (group - 1) * max(0.0, us.io - us.compute))


L = 12
grouped = {size: anchor_of_layers([*range(0, L, size)], L) for size in (1, 2, 3, 4, 6, 12)}
for io in (30, 60):
    us = made_up._replace(io=io)
    found = {size: exposed("prefetch", us, anchor_of) for size, anchor_of in grouped.items()}
    print(f"io {io}, compute {us.compute}: of {L * io} us exposed, by size of groups: {found}")

# %% [markdown]
# `io` grows with the batch and with what misses: R * misses * record_bytes / link. Compute grows
# too, but part of it (reading the weights) is paid once per step. So a copy is hidden in small
# batches, and sticks out in large ones. Put in your numbers:

# %%
MISSES, RECORD_BYTES, LINK = 36, 4096, 50.0  # misses per request and layer; GB/s


def times(num_requests: float, link: float = LINK) -> Times:
    io = num_requests * MISSES * RECORD_BYTES / link / 1e3
    return Times(40 + 0.5 * num_requests, 10 + 0.1 * num_requests, 10, 5, io)


shares = {}  # R -> of the oracle's throughput: hisparse, prefetch
print("  R  compute    io  step, us: hisparse  prefetch  no-io  of the oracle: hisparse  prefetch")
for R in (1, 4, 8, 16, 32, 128):
    us = times(R)
    steps = [step_us(mode, us, grouped[4]) for mode in MODES]
    shares[R] = [steps[2] / step for step in steps[:2]]
    line = f"{R:3}{us.compute:9.0f}{us.io:6.0f}{steps[0]:20.0f}{steps[1]:10.0f}{steps[2]:7.0f}"
    print(line + f"{shares[R][0]:25.0%}{shares[R][1]:10.0%}")

# %% [markdown]
# The anchors set a floor. The paper's model (its Figure 8) has 21 anchors and 57 shared layers. For
# 8 clients it reports 7.7 ms of exposed IO per token and 3.0 with prefetch; for 256, 22.0 and 11.2.

# %%
floor = 21 / (21 + 57)
reported = {8: 3.0 / 7.7, 256: 11.2 / 22.0}
for clients, share_left in reported.items():
    print(
        f"{clients} clients: {share_left:.0%} is still exposed; the anchors alone are {floor:.0%}"
    )

# %% [markdown]
# ## Hazard 1: the plan is overwritten
#
# There is one plan, and the next anchor's Resolve overwrites it. By then all copies must have read
# it. Waiting for every shared layer sees to that. What if one `wait` is forgotten? On a GPU that
# copy runs at some time; here at the worst one, right after the next Resolve. `Prefetcher` and
# cache refuse that. To see it all the same, we lie to them.

# %%
refused = []


def step_of(cache: HiSparseCache, S: int, generator, forgotten: int | None = None) -> None:
    """A step of six layers, as in the engine. forgotten: a layer that nobody waits for."""
    prefetcher = Prefetcher(cache)
    for layer, anchor in enumerate(ANCHOR_OF):
        batch = write_newest(cache, layer, S)
        if layer == anchor:
            cache.resolve(layer, make_picks(S, generator), batch)
            try:
                prefetcher.start(layer, batch)
            except RuntimeError as error:
                refused.append(str(error))
                cache._resolved = ANCHOR_OF[forgotten]
                cache.replay(forgotten, batch)  # the side stream gets to it now
                cache._resolved = layer
                prefetcher = Prefetcher(cache)  # one that has not seen anything
                prefetcher.start(layer, batch)
        elif layer != forgotten:
            prefetcher.wait(layer)


# %%
def walk(fault_at: int | None) -> dict[int, tuple[str | None, dict]]:
    """S -> what the integrity check says, and the wrong slots of layer 2."""
    cache, found = make_cache(ANCHOR_OF, num_layers=6), {}
    generator = torch.Generator().manual_seed(3)
    for S in LENGTHS:
        step_of(cache, S, generator, forgotten=2 if S == fault_at else None)
        found[S] = complaint_about(cache), wrong_slots(cache, 2)
    return found


FAULT = 25
broken, cured = walk(FAULT), walk(None)
print("refused:", *refused)
for S in range(FAULT - 1, FAULT + 8):
    print(f"S = {S}: {broken[S][0] or 'fine'}  {broken[S][1] or ''}")

# %% [markdown]
# In braces: slot, the position it should hold, the record it has (layer 2's are 2000 and more).
# Some slots were never filled; others were filled with the position that layer 3's slot of that
# number was to get. All are layer 2's own records of wrong positions: finite, and plausible. The
# next steps do not repair that: the table says that the position is there, so it is a hit, and a
# hit is not fetched. It ends when the slot is given to another position.
#
# ## Hazard 2: write-through runs beside the copy
#
# Each shared layer writes its newest record while the copy into it may be under way. Two writers in
# one cache, and no order between them. It is safe if neither touches what the other does:
#
# - While `S <= B` position p is in slot p, nothing is ever missing, and the plan is empty.
# - Later the newest record goes to slot B. Plans fill slots below B only.
# - Its host row is that of position S - 1, which is found in slot B. So it never misses, and no
#   plan reads its host row.
#
# Look at all plans of `share`, then run it in the other order.

# %%
copies = [(S, fetch) for S, plan in plans.items() for fetch in plan]
meet = [(S, fetch) for S, fetch in copies if S <= B or fetch.slot == B or fetch.position == S - 1]
other_order = share(copy_first=True)[2]
print(f"{len(copies)} copies, {len(meet)} meet the newest record")
print(f"copy first: the same bytes after {sum(other_order)} of {len(other_order)} steps")

# %% [markdown]
# A third hazard is none: a copy overwrites slots that the attention of the *last* step has read.
# That attention is on the main stream before the fork, so it has ended.
#
# ## All of it, in the engine
#
# A tiny model with `FSSFSS` in its config, and two requests, one of which outgrows its slots on the
# way. Three engines decode: all KV on the device, HiSparse without and with prefetch. Tokens,
# logits, tables and records must have the same bits.


# %%
def make_engine(mode: str, model: Decoder, selections: Tensor, context: int, **setup) -> Runner:
    """selections [steps, L, requests, K]: the first is for a request of context + 1 tokens."""
    prefetch = False if mode == "hisparse" else None  # None: where layers share
    return make_runner(
        model,
        cache="full" if mode == "full" else "hisparse",
        selector=GivenSelections(selections, context, model.device, model.config.anchor_of),
        hisparse=HiSparseConfig(**setup, enable_layer_prefetch=prefetch),
        max_model_len=context + len(selections),
        max_running_requests=selections.shape[2],
        skip_io=mode == "no-io",
    )


tiny_shared = ModelConfig(256, 32, 48, len(PATTERN), 4, 2, 8, index_topk_pattern=PATTERN)
model = Decoder.random(tiny_shared, seed=9)
generator.manual_seed(9)
prompts = [torch.randint(256, (n,), generator=generator) for n in (B - 3, B + 5)]
lengths = [S for S in range(B - 2, MAX_LEN + 1) for _ in range(len(PATTERN) * len(prompts))]
given = torch.cat([make_picks(S, generator) for S in lengths]).view(-1, len(PATTERN), 2, K)


# %%
def decode_all(engine: Runner) -> list[Tensor]:
    """Logits of each of 40 steps, and the token ids they lead to."""
    host = [engine.cache.host.records] if engine.cache.host else []
    for records in [*engine.cache.records, *host]:
        records.fill_(torch.nan)
    rows = [engine.admit(MAX_LEN) for _ in prompts]
    logits = [torch.stack([engine.prefill(*x) for x in zip(rows, prompts, strict=True)])]
    for step in range(1, 41):
        lengths = [len(prompt) + step for prompt in prompts]
        logits.append(engine.decode(logits[-1].argmax(1), Batch.make(rows, lengths, "cpu")))
        if host:
            engine.cache.check_integrity(lengths)
    return [*logits, torch.stack([x.argmax(1) for x in logits])]


# %%
engines = {
    mode: make_engine(mode, model, given, B - 3, top_k=K, device_buffer_size=B, page_size=4)
    for mode in ("full", "hisparse", "prefetch")
}
right, *answers = [decode_all(engine) for engine in engines.values()]
one, other = engines["hisparse"].cache, engines["prefetch"].cache
equal = {"tokens, logits": all(same(right, answer) for answer in answers)}
both = [[*cache.records, cache.host.records] for cache in (one, other)]
equal["slots, host rows"] = same(*both)
for name in ("device_buffer_tokens", "lru_slots", "counters"):
    equal[name] = same([getattr(one, name)], [getattr(other, name)])
print("prefetch:", {mode: engine.prefetcher is not None for mode, engine in engines.items()})
print("equal:", equal, "misses:", int(other.counters[:, 1].sum()))

# %% [markdown]
# ## On a GPU
#
# The same modes, measured: a random model with layers of Qwen3-1.7B's shape, in groups of four, and
# selections with 7% misses. `compare_with_no_io` says what `bench decode` would. The time line
# comes from events around the parts of each layer, which the graph records too. (Each costs a
# little, so these steps are longer than the others.)


# %%
def watch(runner: Runner) -> list[tuple]:
    """(what, layer, start, end) of each part of the step that ran last, or was captured last."""
    spans, on_gpu = [], runner.model.device.type == "cuda"

    def now():
        if not on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True, external=True)
        event.record()  # on the current stream
        return event

    def put_around(owner, name: str, what: str, call) -> None:
        def timed(layer: int, *args):
            if (what, layer) == ("compute", 0):
                spans.clear()
            start = now()
            result = call(layer, *args)
            spans.append((what, layer, start, now()))
            return result

        setattr(owner, name, timed)

    put_around(runner, "decode_layer", "compute", runner.decode_layer)
    put_around(runner, "_select", "select", runner._select)
    put_around(runner.cache, "resolve", "resolve", runner.cache.resolve)
    if runner.prefetcher and not runner.cache.skip_io:
        put_around(runner.cache, "replay", "copy", runner.cache.replay)
        put_around(runner.prefetcher, "wait", "wait", runner.prefetcher.wait)
    return spans


# %%
def bars_of(spans: list[tuple]) -> list[Bar]:
    zero = next(start for what, layer, start, _ in spans if (what, layer) == ("compute", 0))

    def us(when) -> float:
        seconds = isinstance(zero, float)
        return 1e6 * (when - zero) if seconds else 1e3 * zero.elapsed_time(when)

    stream = {"copy": "side"}
    return [Bar(stream.get(x, "main"), layer, x, us(a), us(b)) for x, layer, a, b in spans]


def measure(mode: str, model: Decoder, top_k: int, context: int, R: int, num_steps: int, *, bars):
    """Milliseconds of a mean step but the first two, which fill slots; or the bars of the last."""
    free_memory(model.device)  # of the one before
    sizes = {"num_layers": model.config.num_hidden_layers, "num_requests": R, "top_k": top_k}
    window = {"context_len": context, "num_misses": round(0.07 * top_k), "seed": 8}
    selections = sliding_selections(**sizes, **window, num_steps=num_steps)
    runner = make_engine(mode, model, selections, context, top_k=top_k)
    spans = watch(runner) if bars else []
    step, seconds = DecodeStep(runner, progress=False, sizes=[R]), []
    rows = [runner.admit(context + num_steps) for _ in range(R)]
    for row in rows:
        fill(runner, row, torch.zeros(context, dtype=torch.int64))
    for i in range(1, num_steps + 1):
        start = time.perf_counter()
        float(step([7] * R, rows, [context + i] * R).sum())  # waits for the step
        seconds.append(time.perf_counter() - start)
    return bars_of(spans) if bars else 1e3 * sum(seconds[2:]) / len(seconds[2:])


# %%
def compare_modes(model: Decoder, top_k: int, context: int, batches, num_steps: int) -> list[dict]:
    """A row per batch and mode, with what `compare_with_no_io` asks for; prints them."""
    rows = []
    for R in batches:
        for mode in ("full", *MODES):
            ms = measure(mode, model, top_k, context, R, num_steps, bars=False)
            print(f"R = {R:3} {mode:9}{ms:8.3f} ms/step{1e3 * R / ms:9.0f} tok/s")
            row = {"mode": mode, "input_len": context, "concurrency": R, "running_mean": R}
            rows.append(row | {"step_ms": {"mean": ms}, "decode_tokens_per_second": 1e3 * R / ms})
    compare_with_no_io(rows)
    return rows


# %%
lines, setting = {mode: time_line(mode, made_up, ANCHOR_OF) for mode in MODES}, "made-up times"
if torch.cuda.is_available():
    bf16 = torch.cuda.get_device_capability() >= (8, 0)
    numbers = {"dtype": torch.bfloat16 if bf16 else torch.float16, "drawn_on": "cuda"}
    qwen3 = ModelConfig(32000, 2048, 6144, 12, 16, 8, 128, 1e-6, 4096, index_topk_freq=4)
    large = Decoder.random(qwen3, seed=0, device="cuda", **numbers)
    compare_modes(large, 512, 2048, (1, 8, 32), 40)
    lines = {mode: measure(mode, large, 512, 2048, 32, 8, bars=True) for mode in MODES}
    setting = f"{torch.cuda.get_device_name()}, 32 requests"
else:
    print("skipped: torch finds no CUDA device")

for mode, bars in lines.items():
    parts = {"step": max(bar.end for bar in bars)}
    for bar in bars:
        if bar.what != "compute":
            parts[bar.what] = parts.get(bar.what, 0.0) + bar.end - bar.start
    print(f"{setting}, {mode}, us:", {what: round(us, 1) for what, us in parts.items()})

# %% [markdown]
# ## Figure
#
# The first layers of a step: measured on a GPU, of made-up times without one.


# %%
COLOUR_OF = dict(zip(("resolve", "copy", "compute", "select"), COLOURS, strict=True))
COLOUR_OF["wait"] = "0.8"


def draw(lines: dict[str, list[Bar]], setting: str, num_layers: int = 8):
    figure, ticks = new_figure(10, 4), []
    axes = figure.subplots()
    for what, colour in COLOUR_OF.items():
        axes.plot([], [], color=colour, linewidth=8, label=what)
    for mode, bars in lines.items():
        for stream in sorted({bar.stream for bar in bars}):
            for bar in bars:
                if bar.stream == stream and bar.layer < num_layers:
                    style = {"color": COLOUR_OF[bar.what], "zorder": 1 + (bar.what != "compute")}
                    axes.barh(len(ticks), bar.end - bar.start, left=bar.start, **style)
            ticks.append(f"{mode}, {stream} stream")
    axes.set_yticks(range(len(ticks)), ticks)
    axes.invert_yaxis()
    axes.set_xlabel("microseconds from the start of layer 0")
    figure.legend(loc="outside lower center", ncols=5, frameon=False)
    figure.suptitle(f"The first layers of a decode step\n{setting}")
    return figure


data = {"config": setting, "lines": {mode: [*map(list, bars)] for mode, bars in lines.items()}}
try:
    print(save(draw(lines, setting), data, "out/08_time_line.png"))
except ImportError as error:
    print("no figure:", error)

# %% [markdown]
# ## What you know now
#
# A guess about the next layer fetches what nobody wants; a shared selection needs no guess. Layers
# in lockstep need one table, one Resolve and one plan, and a plan can be carried out while other
# work runs. Exposed remain the anchors' own IO, and of each copy what takes longer than a layer. It
# is exact because nothing is predicted, and safe because of who waits for what.

# %%
assert misses == int(quest.cache.counters[1:, 1].sum()) and useful <= min(misses, guessed)
assert all(in_step) and all(same_bytes)
assert "layer 1, request row 0: a slot differs" in between[0] and not complaint_about(sharing)
assert between[1] == {f.slot: (f.position, 1000 + f.evicted) for f in plan}
for io in (0, 10, 40, 41, 100, 1000):
    for group, anchor_of in grouped.items():
        us = made_up._replace(io=io)
        assert exposed("prefetch", us, anchor_of) == exposed_by_formula(us, L, group)
        assert exposed("hisparse", us, anchor_of) == L * io + (L - L // group) * us.resolve
assert all(sync < ahead <= 1 for sync, ahead in shares.values()) and floor < min(reported.values())
assert len(refused) == 1 and "waited for the records of layers [2]" in refused[0]
assert not any(what for what, _ in cured.values())
wrong = {S: what for S, (what, _) in broken.items() if what}
assert min(wrong) == FAULT and FAULT + 1 in wrong and all("layer 2" in x for x in wrong.values())
assert copies and not meet and all(other_order)
assert all(equal.values()) and other.has_shared_layers and not one.has_shared_layers
print("chapter 8: all asserts hold")

# %% [markdown]
# ## Exercises
#
# 1. Two layers resolve for themselves, and select the same but in one step. Are their tables equal
#    again some steps later? Are at least the same positions resident? What follows for a replay?
# 2. In the table over R, up to which R is a copy hidden? What does a link of 200 GB/s change? Which
#    share of the oracle's throughput is left if R is very large?

# %% [markdown]
# ## Answers
#
# 1. See below. Which positions are resident soon depends on the latest selections only, but in
#    which slots they are depends on all of them. A replay would fill slots in which the layer's own
#    table has something else.
# 2. Up to io = compute: R * misses * record_bytes / link = 40 + 0.5 R. If R is large, only what
#    grows with R counts.


# %%
def one_step_apart(seed: int, num_steps: int = 36) -> tuple[list[bool], list[bool]]:
    """After each step from that one on: are the tables equal, are the same positions resident?"""
    cache, generator = make_cache(None, num_layers=2), torch.Generator().manual_seed(seed)
    tables, resident = [], []
    for S in range(K + 1, K + 21 + num_steps):
        picks = [make_picks(S, generator)] * 2
        if S == K + 20:
            picks[1] = make_picks(S, generator)
        for layer in (0, 1):
            cache.resolve(layer, picks[layer], write_newest(cache, layer, S))
        if S >= K + 20:
            one, other = tables_of(cache, 0), tables_of(cache, 1)
            tables.append(one == other)
            resident.append({*one[0]} == {*other[0]})
    return tables, resident


def answer_2(link: float) -> tuple[float, float]:
    """R at which a copy takes as long as a layer's compute (infinite if none does), and the share
    of the oracle's throughput for very many requests.
    """
    more_us, us = times(1, link).io - 0.5, times(1e9, link)
    share = step_us("no-io", us, grouped[4]) / step_us("prefetch", us, grouped[4])
    return 40 / more_us if more_us > 0 else float("inf"), share


# %%
tables, resident = one_step_apart(seed=4)
print(f"{len(tables)} steps: tables equal in {sum(tables)}, the same resident in {sum(resident)}")
limits = {link: answer_2(link) for link in (50.0, 200.0)}
for link, (limit, left) in limits.items():
    print(f"{link:g} GB/s: hidden up to R = {limit:.1f}; very large R: {left:.0%} of the oracle")

assert not any(tables) and resident[-1]
assert all(
    abs(times(x, link).io - times(x, link).compute) < 1e-6 for link, (x, _) in limits.items()
)
