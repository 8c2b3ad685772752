# %% [markdown]
# # 8. Hiding the rest
#
# - **Question**: must attention wait for the bus, or can records come while something else runs?
# - **Minutes**: 30
# - **Needs**: a CPU; the figure needs the extra `plots`; with a GPU, one section more runs
# - **Previous**: 07_teaching_a_model_where_to_look
#
# In chapter 6 all times add up: a layer selects, fetches, then attends. But some models (and the
# selector `dsa-shared`) let several layers read the same positions. Then the first of them can
# decide for the others, and their records can come before it is their turn: **plan, then IO**.

# %%
import time
from typing import NamedTuple

import torch

from minihisparse import anchors, bench_engine, bench_table, gpu_cache, plots, synthetic
from minihisparse.assembly import make_runner
from minihisparse.batch import Batch
from minihisparse.config import HiSparseConfig, choose_device
from minihisparse.decode_step import DecodeStep
from minihisparse.host_store import HostPool
from minihisparse.kernels.resolve import resolve_oracle
from minihisparse.model import Decoder
from minihisparse.model_config import ModelConfig
from minihisparse.prefetcher import Prefetcher

# %% [markdown]
# ## Why the IO is exposed
#
# One layer of a decode step, on one stream. Each part needs the one before:
#
#     norm, q k v, write-through | select | Resolve: decide, then fetch | attention, mlp
#
# Were the next layer's selection known now, its records could be fetched under this attention and
# mlp. Is it the selection that this layer just made? Most of what two selections have in common is
# in slots already: a guess has to name what is *not*. So we stop the engine before each layer and
# look into its slots. (Random weights: run this on your model before you believe any number.)

# %%
CONTEXT, STEPS = 240, 24
tiny = ModelConfig(64, 32, 48, 6, 4, 2, 8, max_position_embeddings=512)
setup = HiSparseConfig(top_k=32, device_buffer_size=64, page_size=4)
limits = {"hisparse": setup, "max_model_len": CONTEXT + STEPS, "max_running_requests": 1}
quest = make_runner(Decoder.random(tiny, seed=8), cache="hisparse", selector="quest", **limits)
ids = torch.randint(64, (CONTEXT + STEPS,), generator=torch.Generator().manual_seed(8))
row = quest.admit(CONTEXT + STEPS)
quest.prefill(row, ids[: CONTEXT - 1])
quest.decode(ids[CONTEXT - 1 : CONTEXT], Batch.make([row], [CONTEXT], "cpu"))  # fills the slots
quest.cache.reset_counters()
overlaps, misses, guessed, useful, picks = [], 0, 0, 0, set()
for S in range(CONTEXT + 1, CONTEXT + STEPS + 1):
    batch, hidden = Batch.make([row], [S], "cpu"), quest.embed(ids[S - 1 : S])
    for layer in range(tiny.num_hidden_layers):
        there = {*quest.cache.tables(layer)[0][row].tolist(), S - 1}
        hidden, positions, *_ = quest.decode_layer(layer, hidden, batch)
        guess, picks = picks, {*positions[0].tolist()} - {-1}
        if layer > 0:
            overlaps.append(len(guess & picks) / len(guess | picks))  # Jaccard
            misses += len(picks - there)
            guessed += len(guess - there)
            useful += len((guess - there) & picks)
print(f"Jaccard of neighbouring layers: {sum(overlaps) / len(overlaps):.2f} (1: equal)")
print(f"{misses} misses; the guess would fetch {guessed} records, {useful} of them are wanted")

# %% [markdown]
# A wrong guess is worse than none: it takes the bus and a slot from somebody. (In the paper it did
# not pay on a trained model: what neighbours have in common was resident already.)
#
# ## Layers that share
#
# Nothing needs to be guessed where a model was trained to let layers share: an **anchor** selects,
# and the **shared layers** after it read the same positions. In its config is a letter per layer,
# `F` selects (full), `S` shares. The same selection is not yet the same *misses*: those depend on
# all selections before. But if two layers have made the same ones since the request came, the
# replacement rule has had the same input every time. They are in **lockstep**: every position is
# in the same slot, and the order of eviction is the same. To see it, take caches without a model.

# %%
PATTERN, K, B, MAX_LEN = "FSSFSS", 4, 8, 64
ANCHOR_OF = anchors.anchor_of_layers(anchors.anchors_of_pattern(PATTERN, 6), 6)
groups = {a: [i for i, of in enumerate(ANCHOR_OF) if of == a != i] for a in sorted({*ANCHOR_OF})}
print(f"{PATTERN}: anchor of each layer {ANCHOR_OF}; anchor -> shared layers {groups}")


def all_records(cache) -> list[torch.Tensor]:  # in slots, and in host memory
    return [*cache.records, *([cache.host.records] if cache.host else [])]


def make_cache(anchor_of: tuple[int, ...]) -> gpu_cache.HiSparseCache:
    """Row 0 has a prompt of K tokens. Records say where they belong: 1000 * layer + position."""
    both, L = {"max_requests": 2, "device": torch.device("cpu")}, len(anchor_of)
    pages = {"page_size": 4, "num_pages": 32, "max_pages_per_request": 16}
    host = HostPool(**both, **pages, num_layers=L, record_width=2, dtype=torch.float32)
    sizes = {"top_k": K, "device_buffer_size": B, "anchor_of": anchor_of}
    cache = gpu_cache.HiSparseCache(host=host, **both, **sizes)
    for records in all_records(cache):
        records.fill_(torch.nan)  # what nobody wrote shows
    cache.admit(MAX_LEN)
    for layer in range(L):
        cache.write_prompt(layer, 0, (1000.0 * layer + torch.arange(K))[:, None].repeat(1, 2))
    return cache


# %%
def make_picks(S: int, generator: torch.Generator) -> torch.Tensor:
    """[1, K] int32, ascending, made up: the newest position, and others, the older the rarer."""
    others = torch.multinomial(1 / torch.arange(S - 1, 0, -1), K - 1, generator=generator)
    return torch.cat([others.sort().values, torch.tensor([S - 1])]).int()[None]


def walk(anchor_of: tuple[int, ...], picks: dict, *, early=False, forgotten=None, kind=Prefetcher):
    """Steps as in the engine: yields S and the cache after each. picks: by S and anchor.

    early: copy before write-through. forgotten: S and the layer that nobody waits for.
    """
    cache = make_cache(anchor_of)
    for S in picks:
        prefetcher, batch = kind(cache), Batch.make([0], [S], "cpu")
        for layer, anchor in enumerate(anchor_of):
            if layer != anchor and early:
                prefetcher.wait(layer)
            cache.write_through(layer, torch.full((1, 2), 1000.0 * layer + S - 1), batch)
            if layer == anchor:
                cache.resolve(layer, picks[S][layer], batch)  # decides, and fetches for it
                prefetcher.start(layer, batch)
            elif not early and (S, layer) != forgotten:
                prefetcher.wait(layer)  # NEW: fetches for it what was fetched for its anchor
        yield S, cache


def tables_of(cache, layer: int) -> list[list[int]]:  # row 0: positions in slots, LRU order
    return [table[0].tolist() for table in cache.tables(layer)]


# %%
LENGTHS = range(K + 1, K + 41)  # past B, where slots begin to be refilled
generator = torch.Generator().manual_seed(1)
PICKS = {S: [make_picks(S, generator)] * 2 for S in LENGTHS}
in_step, filled, plans, tables = [], [], {}, tables_of(make_cache((0, 1)), 0)
for S, alone in walk((0, 1), PICKS):  # two anchors: each layer resolves for itself
    plans[S] = resolve_oracle(PICKS[S][0][0].tolist(), S, *tables)[1]
    tables = tables_of(alone, 0)
    in_step.append(tables == tables_of(alone, 1))
    filled.append([records.clone() for records in all_records(alone)])
print(f"equal after {sum(in_step)} of {len(in_step)} steps; the last one leaves")
for layer in (0, 1):
    first = alone.records[layer][0, :B, 0].int().tolist()
    print(f"layer {layer}: positions {tables[0]}, LRU {tables[1]}, records {first}")

# %% [markdown]
# The tables are equal, the records are not. So one table is enough for both, and one Resolve. Its
# **miss plan** (which host rows go into which slots) is the plan of the whole group, with the same
# numbers in every layer. A shared layer *replays* it: it copies, and decides nothing. (Equal tables
# that are stored twice could get out of step by an abort, or a bug; one table cannot.)
#
# Then, one step further, we stop between plan and IO. The table already says what layer 1's slots
# *will* hold; the integrity check (every slot equals its host row) calls that an error. Until then
# nothing may read these slots. Attention and mlp of layer 0 do not: there a copy can hide.


# %%
def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:  # bytes: NaN equals NaN
    pairs = zip(one, other, strict=True)
    return all(torch.equal(gpu_cache.bits(a), gpu_cache.bits(b)) for a, b in pairs)


def share(early: bool = False) -> list[bool]:
    """With layer 0 as layer 1's anchor: after which steps do all records equal `alone`'s?"""
    walked = zip(walk((0, 0), PICKS, early=early), filled, strict=True)
    return [same(all_records(cache), expected) for (_, cache), expected in walked]


def examine(cache, layer: int) -> tuple[str | None, dict[int, tuple[int, int]]]:
    """What the check says; wrong slot -> the position that the table says, the record there."""
    found = zip(tables_of(cache, layer)[0], cache.records[layer][0, :B, 0].tolist(), strict=True)
    wrong = {s: (p, int(x)) for s, (p, x) in enumerate(found) if -1 < p != x - 1000 * layer}
    try:
        return cache.check_integrity(), wrong
    except AssertionError as error:
        return str(error), wrong


# %%
same_bytes = share()
print(f"the same bytes everywhere after {sum(same_bytes)} of {len(same_bytes)} steps")
S = LENGTHS[-1] + 1
old = torch.tensor([[0, 1, 2, S - 1]], dtype=torch.int32)
*_, (_, sharing) = walk((0, 0), PICKS | {S: [old]}, forgotten=(S, 1))
print(f"bytes of tables: {alone.metadata_bytes} for two layers, {sharing.metadata_bytes} shared")
plan, between = resolve_oracle(old[0].tolist(), S, *tables)[1], examine(sharing, 1)
sharing.replay(1, Batch.make([0], [S], "cpu"))
print("plan:", *plan)
print(f"between: {between[0]}; slot -> (position, record): {between[1]}")
print("afterwards:", examine(sharing, 1)[0] or "no complaint")

# %% [markdown]
# ## Two streams
#
# The copies go to a **side stream**. An event after Resolve tells it that the plan is there (fork);
# an event after each copy tells the main stream that a layer's records are there (wait).
#
#     main   Resolve 0 | attention, mlp 0 | q k v 1 | wait | attention, mlp 1 | q k v 2 | wait | ...
#                    |                                 ^                                   ^
#     side           '-> copy for 1 -------------------'-> copy for 2 ---------------------'
#
# How long does a step take? Give each part a time (**made up**, here and in the tables below); a
# stream does one thing after the other.


# %%
class Bar(NamedTuple):
    stream: str
    layer: int
    what: str
    start: float
    end: float


class Times(NamedTuple):
    """Microseconds of one layer."""

    compute: float  # all but selection, Resolve and IO
    before: float  # the part of it that comes before the selection
    select: float
    resolve: float
    io: float  # the layer's missed records on the bus

    def step(self, mode: str, anchor_of: tuple[int, ...]) -> float:
        return max(bar.end for bar in time_line(mode, self, anchor_of))

    def exposed(self, mode: str, anchor_of: tuple[int, ...]) -> float:  # see below
        return self.step(mode, anchor_of) - self.step("no-io", anchor_of)


# %%
def time_line(mode: str, us: Times, anchor_of: tuple[int, ...]) -> list[Bar]:
    """hisparse: all layers resolve. prefetch: anchors do. no-io: the same, with no copies."""
    bars, now, io = [], 0.0, 0.0 if mode == "no-io" else us.io
    for layer, anchor in enumerate(anchor_of):
        start, now = now, now + us.before
        if layer == anchor:
            bars.append(Bar("main", layer, "select", now, now := now + us.select))
        if layer == anchor or mode == "hisparse":
            bars.append(Bar("main", layer, "resolve", now, now := now + us.resolve + io))
            side = now  # the fork: all older copies have been waited for
        elif mode == "prefetch":
            bars.append(Bar("side", layer, "copy", side, side := side + io))
            bars.append(Bar("main", layer, "wait", now, now := max(now, side)))
        now += us.compute - us.before
        bars.append(Bar("main", layer, "compute", start, now))
    return bars


MODES, GROUP = ("hisparse", "prefetch", "no-io"), ANCHOR_OF[:3]
made_up = Times(compute=40, before=10, select=10, resolve=5, io=50)
bars = sorted(time_line("prefetch", made_up, GROUP), key=lambda bar: bar.start)
for stream, layer, what, start, end in bars:
    if what != "compute":
        print(f"{start:4g} to {end:3g} us, {stream} stream: layer {layer} {what}")
print("step:", {mode: made_up.step(mode, GROUP) for mode in MODES})

# %% [markdown]
# ## When is a copy hidden?
#
# The step without IO (the *no-IO oracle*) is the shortest that any prefetch can reach. **Exposed
# IO** is what a step takes longer: in a group of `G`, `io + (G - 1) * max(0, io - compute)`. All of
# the anchor's is exposed, because nobody knew its selection earlier; of each copy, what is longer
# than a layer's compute, the time between two waits. `io` grows with the batch and with what
# misses. Compute grows too, but part of it (reading the weights) is paid once per step. So copies
# are hidden in small batches, and stick out in large ones. The anchors set a floor: in the paper's
# model, GLM-5.2, 21 layers select and 57 share. Its Figure 8 (on their GPUs; not measured here) has
# 7.7 ms of exposed IO per token for 8 clients, 3.0 with prefetch; for 256 clients, 22.0 and 11.2.

# %%
L, MISSES, RECORD_BYTES = 12, 36, 4096  # misses per request and layer: put in your numbers
LINK = 50.0  # GB/s, what our kernels reach on the PCIe 5 of an H200


def times(num_requests: float, link: float = LINK) -> Times:
    io = num_requests * MISSES * RECORD_BYTES / link / 1e3
    return Times(40 + 0.5 * num_requests, 10 + 0.1 * num_requests, 10, 5, io)


grouped = {size: anchors.anchor_of_layers([*range(0, L, size)], L) for size in (1, 2, 3, 4, 6, 12)}
for us in (made_up._replace(io=30), made_up._replace(io=60)):
    found = {size: us.exposed("prefetch", anchor_of) for size, anchor_of in grouped.items()}
    print(f"io {us.io}, compute 40: of {L * us.io} us exposed, by size of groups: {found}")
shares = {}  # R -> of the oracle's throughput: hisparse, prefetch
print("  R  compute    io  step, us: hisparse  prefetch  no-io  of the oracle: hisparse  prefetch")
for R in (1, 4, 8, 16, 32, 128):
    us = times(R)
    one, two, oracle = (us.step(mode, grouped[4]) for mode in MODES)
    shares[R] = oracle / one, oracle / two
    line = f"{R:3}{us.compute:9.0f}{us.io:6.0f}{one:20.0f}{two:10.0f}{oracle:7.0f}"
    print(line + f"{shares[R][0]:25.0%}{shares[R][1]:10.0%}")
floor, reported = 21 / (21 + 57), {8: 3.0 / 7.7, 256: 11.2 / 22.0}
for clients, left in reported.items():
    print(f"{clients} clients: {left:.0%} is still exposed; the anchors alone are {floor:.0%}")

# %% [markdown]
# ## Hazard 1: the plan is overwritten
#
# There is one plan, and the next anchor's Resolve overwrites it. By then all copies must have read
# it; waiting for every shared layer sees to that. What if one `wait` is forgotten? On a GPU that
# copy runs at some time; here at the worst one, right after the next Resolve. `Prefetcher` refuses
# that. To see it all the same, `Late` goes behind its back.

# %%
FAULT, refused = 25, []
generator.manual_seed(3)
SIX = {S: {anchor: make_picks(S, generator) for anchor in groups} for S in LENGTHS}


class Late(Prefetcher):
    def start(self, anchor: int, batch: Batch) -> None:
        try:
            super().start(anchor, batch)
        except RuntimeError as error:
            refused.append(str(error))
            self.cache._fetch(self._waiting.pop(), self.cache._plan)  # the side stream is here now
            super().start(anchor, batch)


def damage(fault_at: int | None) -> dict[int, tuple[str | None, dict]]:
    """S -> what the integrity check says, and the wrong slots of layer 2."""
    walked = walk(ANCHOR_OF, SIX, kind=Late, forgotten=(fault_at, 2))
    return {S: examine(cache, 2) for S, cache in walked}


broken, cured = damage(FAULT), damage(None)
print("refused:", *refused)
for S in range(FAULT - 1, FAULT + 8):
    print(f"S = {S}: {broken[S][0] or 'fine'}  {broken[S][1] or ''}")

# %% [markdown]
# In braces: slot, the position it should hold, the record it has (layer 2's are 2000 and more).
# Some slots were never filled; others have what layer 3's slot of that number was to get. All are
# layer 2's own records of wrong positions: finite, and plausible. Later steps do not repair that:
# in the table the position is a hit, and hits are not fetched. It ends when the slot is refilled.
#
# ## Hazard 2: write-through runs beside the copy
#
# A shared layer writes its newest record while the copy into it may be under way, in any order.
# That is safe if neither touches what the other does. While `S <= B`, position p is in slot p, and
# the plan is empty. Later the newest record goes to slot B, and plans fill slots below B only. Nor
# do they read its host row: S - 1 is in slot B and never misses. See all plans, then copy first.

# %%
copies = [(S, fetch) for S, plan in plans.items() for fetch in plan]
meet = [(S, fetch) for S, fetch in copies if S <= B or fetch.slot == B or fetch.position == S - 1]
other_order = share(early=True)
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
# logits, tables and records must have the same bits: nothing was predicted.


# %%
def make_engine(mode: str, model: Decoder, selections: torch.Tensor, context: int, **setup):
    """selections [steps, L, requests, K]: the first is for a request of context + 1 tokens."""
    cache = "full" if mode == "full" else "hisparse"
    setup["enable_layer_prefetch"] = False if mode == "hisparse" else None  # where layers share
    given = selections, context, model.device, model.config.anchor_of
    parts = {"selector": synthetic.GivenSelections(*given), "hisparse": HiSparseConfig(**setup)}
    limits = {"max_model_len": context + len(selections), "skip_io": mode == "no-io"}
    limits["max_running_requests"] = selections.shape[2]
    return make_runner(model, cache=cache, **parts, **limits)


def decode_all(engine) -> list[torch.Tensor]:
    """Logits of the prompts and of 40 steps, and the token ids they lead to."""
    for records in all_records(engine.cache):
        records.fill_(torch.nan)
    rows = [engine.admit(MAX_LEN) for _ in prompts]
    logits = [torch.stack([engine.prefill(*x) for x in zip(rows, prompts, strict=True)])]
    for step in range(1, 41):
        lengths = [len(prompt) + step for prompt in prompts]
        logits.append(engine.decode(logits[-1].argmax(1), Batch.make(rows, lengths, "cpu")))
        if engine.cache.host:
            engine.cache.check_integrity(lengths)
    return [*logits, torch.stack([x.argmax(1) for x in logits])]


# %%
model = Decoder.random(ModelConfig(256, 32, 48, 6, 4, 2, 8, index_topk_pattern=PATTERN), seed=9)
generator.manual_seed(9)
prompts = [torch.randint(256, (n,), generator=generator) for n in (B - 3, B + 5)]
lengths = [S for S in range(B - 2, MAX_LEN + 1) for _ in range(6 * 2)]  # layers, requests
given = torch.cat([make_picks(S, generator) for S in lengths]).view(-1, 6, 2, K)
sizes, modes = {"top_k": K, "device_buffer_size": B, "page_size": 4}, ("full", *MODES[:2])
engines = {mode: make_engine(mode, model, given, B - 3, **sizes) for mode in modes}
right, *answers = [decode_all(engine) for engine in engines.values()]
one, other = engines["hisparse"].cache, engines["prefetch"].cache
equal = {"tokens, logits": all(same(right, answer) for answer in answers)}
equal["slots, host rows"] = same(all_records(one), all_records(other))
for name in ("device_buffer_tokens", "lru_slots", "counters"):
    equal[name] = torch.equal(getattr(one, name), getattr(other, name))
print("prefetch:", {mode: engine.prefetcher is not None for mode, engine in engines.items()})
print("equal:", equal, "misses:", int(other.counters[:, 1].sum()))

# %% [markdown]
# ## On a GPU
#
# The same modes, measured: a random model with layers of Qwen3-1.7B's shape, in groups of four, and
# selections with 7% misses. `compare_with_no_io` says what `bench decode` would. The time line
# comes from events around the parts of each layer, which the graph records too. (They cost a
# little: these steps are longer.) The figure has the first layers; without a GPU, made-up times.


# %%
def watch(runner) -> dict[tuple, tuple]:
    """(what, layer) -> start and end, of the step that ran last, or was captured last."""
    spans, on_gpu = {}, runner.model.device.type == "cuda"

    def now():
        if not on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True, external=True)
        event.record()  # on the current stream
        return event

    def put_around(owner, name: str, what: str) -> None:
        def timed(layer: int, *args):
            start = now()
            result = call(layer, *args)
            spans[what, layer] = start, now()
            return result

        call = getattr(owner, name)
        setattr(owner, name, timed)

    put_around(runner, "decode_layer", "compute")
    put_around(runner, "_select", "select")
    put_around(runner.cache, "resolve", "resolve")
    if runner.prefetcher and not runner.cache.skip_io:
        put_around(runner.cache, "replay", "copy")
        put_around(runner.prefetcher, "wait", "wait")
    return spans


# %%
def measure(mode: str, model: Decoder, top_k: int, context: int, R: int, num_steps: int, *, bars):
    """Milliseconds of a mean step but the first two, which fill slots; or the bars of the last."""
    bench_engine.free_memory(model.device)  # of the one before
    sizes = {"num_layers": model.config.num_hidden_layers, "num_requests": R, "top_k": top_k}
    window = {"num_steps": num_steps, "context_len": context, "num_misses": round(0.07 * top_k)}
    selections = synthetic.sliding_selections(**sizes, **window, seed=8)
    runner = make_engine(mode, model, selections, context, top_k=top_k)
    spans = watch(runner) if bars else {}
    step, seconds = DecodeStep(runner, progress=False, sizes=[R]), []
    rows = [runner.admit(context + num_steps) for _ in range(R)]
    for row in rows:
        synthetic.fill(runner, row, torch.zeros(context, dtype=torch.int64))
    for S in range(context + 1, context + num_steps + 1):
        start = time.perf_counter()
        float(step([7] * R, rows, [S] * R).sum())  # waits for the step
        seconds.append(time.perf_counter() - start)
    if not bars:
        return 1e3 * sum(seconds[2:]) / len(seconds[2:])
    zero, _ = spans["compute", 0]

    def us(when) -> float:
        return 1e6 * (when - zero) if isinstance(zero, float) else 1e3 * zero.elapsed_time(when)

    of = {"copy": "side"}
    return [Bar(of.get(x, "main"), i, x, us(a), us(b)) for (x, i), (a, b) in spans.items()]


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
    bench_table.compare_with_no_io(rows)
    return rows


lines, setting = {mode: time_line(mode, made_up, ANCHOR_OF) for mode in MODES}, "made-up times"
device, dtype, _ = choose_device()
if device.type == "cuda":
    qwen3 = ModelConfig(32000, 2048, 6144, 12, 16, 8, 128, 1e-6, 4096, index_topk_freq=4)
    large = Decoder.random(qwen3, seed=0, device=device, dtype=dtype, drawn_on=device)
    compare_modes(large, 512, 2048, (1, 8, 32), 40)
    lines = {mode: measure(mode, large, 512, 2048, 32, 8, bars=True) for mode in MODES}
    setting = f"{torch.cuda.get_device_name()}, 32 requests"
else:
    print("skipped: torch finds no CUDA device")

# %%
for mode, bars in lines.items():
    parts = {"step": max(bar.end for bar in bars)}
    for _, _, what, start, end in bars:
        if what != "compute":
            parts[what] = parts.get(what, 0.0) + end - start
    print(f"{setting}, {mode}, us:", {what: round(us, 1) for what, us in parts.items()})
COLOUR_OF = dict(zip(("resolve", "copy", "compute", "select"), plots.COLOURS, strict=True))
COLOUR_OF["wait"] = "0.8"
data = {"config": setting, "lines": {mode: [*map(list, bars)] for mode, bars in lines.items()}}
try:
    figure, drawn = plots.new_figure(10, 4), {}
    axes = figure.subplots()
    for mode, bars in lines.items():
        for stream, layer, what, start, end in bars:
            if layer < 8:
                style = {"color": COLOUR_OF[what], "zorder": 1 + (what != "compute")}
                style |= {"width": end - start, "left": start}
                drawn[what] = axes.barh(f"{mode}, {stream} stream", **style)
    axes.invert_yaxis()
    axes.set_xlabel("microseconds from the start of layer 0")
    figure.legend(drawn.values(), drawn, loc="outside lower center", ncols=5, frameon=False)
    figure.suptitle(f"The first layers of a decode step\n{setting}")
    print(plots.save(figure, data, "out/08_time_line.png"))
except ImportError as error:
    print("no figure:", error)

# %%
assert misses == int(quest.cache.counters[1:, 1].sum()) and useful <= min(misses, guessed)
assert all(in_step) and all(same_bytes) and copies and not meet and all(other_order)
assert "layer 1, request row 0: a slot differs" in between[0] and not examine(sharing, 1)[0]
assert between[1] == {f.slot: (f.position, 1000 + f.evicted) for f in plan}
for io in (0, 10, 40, 41, 100, 1000):
    for G, anchor_of in grouped.items():
        us = made_up._replace(io=io)
        by_formula = io + (G - 1) * max(0, io - us.compute)
        assert us.exposed("prefetch", anchor_of) == L // G * by_formula
        assert us.exposed("hisparse", anchor_of) == L * io + (L - L // G) * us.resolve
assert all(sync < ahead <= 1 for sync, ahead in shares.values()) and floor < min(reported.values())
assert len(refused) == 1 and "waited for the records of layers [2]" in refused[0]
wrong = {S: what for S, (what, _) in broken.items() if what}
assert not any(what for what, _ in cured.values())
assert min(wrong) == FAULT and FAULT + 1 in wrong and all("layer 2" in x for x in wrong.values())
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
# 1. Which positions are resident soon depends on the latest selections only, but in which slots
#    they are depends on all of them. A replay would fill slots in which the layer's own table has
#    something else.
# 2. Up to io = compute: R * misses * record_bytes / link = 40 + 0.5 R. If R is large, only what
#    grows with R counts.


# %%
def one_step_apart(seed: int, num_steps: int = 36) -> tuple[list[bool], list[bool]]:
    """After each step from that one on: are the tables equal, are the same positions resident?"""
    generator, picks, apart = torch.Generator().manual_seed(seed), {}, K + 20
    for S in range(K + 1, apart + 1 + num_steps):
        drawn = [make_picks(S, generator) for _ in range(1 + (S == apart))]
        picks[S] = drawn[0], drawn[-1]
    tables, resident = [], []
    for S, cache in walk((0, 1), picks):
        if S >= apart:
            one, other = tables_of(cache, 0), tables_of(cache, 1)
            tables.append(one == other)
            resident.append({*one[0]} == {*other[0]})
    return tables, resident


def answer_2(link: float) -> tuple[float, float]:
    """The R at which a copy takes as long as a layer (inf: none); the share for very large R."""
    more_us, us = times(1, link).io - 0.5, times(1e9, link)
    left = us.step("no-io", grouped[4]) / us.step("prefetch", grouped[4])
    return 40 / more_us if more_us > 0 else float("inf"), left


tables, resident = one_step_apart(seed=4)
print(f"{len(tables)} steps: tables equal in {sum(tables)}, the same resident in {sum(resident)}")
for link in (50.0, 200.0):
    limit, left = answer_2(link)
    print(f"{link:g} GB/s: hidden up to R = {limit:.1f}; very large R: {left:.0%} of the oracle")
    assert abs(times(limit, link).io - times(limit, link).compute) < 1e-6
assert not any(tables) and resident[-1]
