# %% [markdown]
# # 7. Teaching a model where to look
#
# - **Question**: which 256 of 8,192 positions must a model read, and who can tell beforehand?
# - **Minutes**: 40; the real model computes for about one (66 s on one core of an AMD EPYC)
# - **Needs**: a CPU; better with the real model, which
#   `python -m minihisparse.weights_scripts.get_smollm2` makes; the figure needs the extra `plots`
# - **Previous**: 06_from_bytes_to_throughput
#
# An answer is as good as the selection. Quest needs no training, and leaves out much. DeepSeek's
# sparse attention (DSA) has a **lightning indexer**: a tiny attention of its own, trained to say
# what the large one will read. Here we write one and train it for one layer.

# %%
import json
import os
from pathlib import Path
from time import perf_counter as clock
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minihisparse.addon import SIZES, Addon, fingerprint, read_addon, write_addon
from minihisparse.assembly import SHIPPED
from minihisparse.batch import Batch
from minihisparse.config import HiSparseConfig
from minihisparse.engine import LLM
from minihisparse.indexer import NORM_EPS, DSASelector, rotate
from minihisparse.model import AttentionInputs, Decoder
from minihisparse.model_config import ModelConfig
from minihisparse.plots import plot_hit_rate, save
from minihisparse.rope import rope_angles
from minihisparse.tokenizer import Tokenizer
from minihisparse.weights_scripts.distil_dsa import SETTINGS, TENSORS, Indexer, forced, tensor_name
from minihisparse.weights_scripts.distil_masks import Selection, oracle, quest, recent, top_k_mask
from minihisparse.weights_scripts.distil_model import LayerStates, dense_layers, dense_probabilities
from minihisparse.weights_scripts.get_smollm2 import default_out

# %% [markdown]
# ## Which model
#
# As in chapter 3, `MINIHISPARSE_MODEL` names the folder of SmolLM2-135M-Instruct, or is `tiny`. Of
# the real model we take layer 18, which looks things up; else a *layer made by hand*, for what its
# heads read is known. One reads position 0 (a **sink**: trained models park attention there when
# they look for nothing), one what is near. The third asks what followed when the last two tokens
# came before: with such **induction heads** models repeat what they read. The texts are sources of
# Python's library, or random for the layer by hand. In each, a span is **copied** to a later place:
# will a selection find the source? Three texts, from files of their own, are held out.

# %%
wanted = os.environ.get("MINIHISPARSE_MODEL") or str(default_out())
real = wanted != "tiny" and (Path(wanted).is_dir() or "MINIHISPARSE_MODEL" in os.environ)
if real:
    model, tokenizer = Decoder.from_folder(wanted, progress=False), Tokenizer.from_folder(wanted)
    name, LAYER, T, SPAN, K = "SmolLM2-135M-Instruct", 18, 1024, 128, 64
else:
    model = Decoder.random(ModelConfig(256, 32, 48, 4, 4, 2, 8), seed=0)
    name, LAYER, T, SPAN, K = "a layer made by hand", 0, 512, 64, 32
print(f"model: {name}; texts of {T} tokens; a selection holds K = {K}")
PIECES = [(file, i) for file in ("argparse", "inspect", "tarfile") for i in range(4)]
PIECES += [("heapq", 0), ("heapq", 3), ("textwrap", 1)]  # held out


def layer_by_hand(ids: Tensor, rows: Tensor) -> LayerStates:
    """ids [T] below 96; its inputs x know the last three tokens and whether they are the first."""
    code = F.normalize(torch.randn(96, 16, generator=torch.Generator().manual_seed(0)))[ids]
    back1, back2 = (F.pad(code, (0, 0, n, 0))[: len(ids)] for n in (1, 2))  # [T, 16], like code
    first = F.pad(torch.ones(1, 1), (0, 15, 0, len(ids) - 1))  # [T, 16]
    x = torch.cat([code, back1, back2, first], dim=1)
    near = rope_angles(len(ids), 32, 1e3).flatten(1)  # q . k: a sum of cos of the distance
    sink_q, sink_k = torch.ones(len(ids), 32), 60 * F.pad(first, (0, 16))
    q = torch.stack([sink_q, 2.5 * near, 36 * torch.cat([code, back1], dim=1)], dim=1)
    k = torch.stack([sink_k, near, torch.cat([back1, back2], dim=1)], dim=1)
    return LayerStates(0, rows, x, q[rows], k, torch.zeros_like(k))  # nobody asks for v


# %%
class Text(NamedTuple):
    states: LayerStates
    dense: Tensor  # [R, T]: what dense attention reads, mean over heads
    source: int  # where the copied span comes from
    copy: int  # where it was copied to


def ids_of(file: str, piece: int) -> Tensor:
    source = Path(os.__file__).with_name(f"{file}.py").read_text(encoding="utf-8")
    return torch.tensor(tokenizer.encode(source)[piece * T : (piece + 1) * T])


def make_text(file: str, piece: int) -> Text:
    ids = ids_of(file, piece) if real else torch.randint(96, (T,), generator=generator)
    assert len(ids) == T, f"{file}.py is too short for piece {piece}"
    source = int(torch.randint(T // 2 - SPAN, (1,), generator=generator))
    copy = int(torch.randint(T // 2 + SPAN, T - SPAN + 1, (1,), generator=generator))
    ids[copy : copy + SPAN] = ids[source : source + SPAN].clone()
    layers = dense_layers(model, ids, ROWS) if real else [layer_by_hand(ids, ROWS)]
    states = next(states for states in layers if states.layer == LAYER)  # computes no further
    return Text(states, dense_probabilities(states).mean(dim=0), source, copy)


NUM_TRAIN, ROWS = 12, torch.arange(T // 4, T)  # queries before have little to leave out
start, generator = clock(), torch.Generator().manual_seed(7)
texts = [make_text(*piece) for piece in PIECES]
train_on, held_out = texts[:NUM_TRAIN], texts[NUM_TRAIN:]
print(f"{len(texts)} texts up to layer {LAYER}: {clock() - start:.0f} s")

# %% [markdown]
# ## What dense attention reads
#
# **Mass** is the share of the softmax that falls on some positions. Few positions carry nearly
# all. Sinks and the most recent ones have much of it, and need no indexer: a selection just holds
# them always. The rest must be *searched*. But each *head* has its own few. One **record** holds
# the K and V of all KV heads, and slots and tables are per layer. So a layer needs **one list** for
# all heads. What does that cost against a list per head, and how many records would those be?

# %%
SINKS, RECENT = SETTINGS["num_sinks"], SETTINGS["num_recent"]
causal, given = texts[0].states.causal, forced(texts[0].states, SETTINGS)  # [R, T] of all texts
p = torch.stack([text.dense for text in held_out])  # [3, R, T]
sinks, free = (part.sum(2).mean().item() for part in (p[..., :SINKS], p * given))
print(f"{SINKS} sinks: {sinks:.1%}; {RECENT} most recent: {free - sinks:.1%}; rest {1 - free:.1%}")
top_mass = {n: p.topk(n).values.sum(2).mean().item() for n in (K // 4, K // 2, K, 2 * K, 256)}
print("mass of the largest", {n: round(mass, 3) for n, mass in top_mass.items()}, f"of {T}")
best = torch.stack([dense_probabilities(text.states) for text in held_out]).topk(K)  # [3, Hq, R, K]
read = torch.zeros_like(p).scatter_(2, best.indices.transpose(1, 2).flatten(2), 1.0)
per_head, union = best.values.sum(3).mean(), read.sum(2).mean()
print(f"a list of K per head: mass {per_head:.3f}, {union:.0f} different records")
print(f"one list of K for all: mass {top_mass[K]:.3f}, {K} records")

# %% [markdown]
# ## The indexer, in ten lines
#
#     I[t, s] = sum_h w[t, h] relu(q[t, h] . k[s]) / sqrt(H d)
#
# `q`, `k` and `w` are linear in what the layer sees, its normed input `x`. There are H query heads
# and one key for all of them. RoPE (`rotate`) turns the first numbers of q and k only. Trained
# weights come as an **add-on**, a file beside the model, which stays as it is. Two are shipped for
# SmolLM2. (A tiny model gets random ones: they mean nothing, but the arithmetic is the same.) Is
# ours the engine's indexer? That goes token by token and keeps its index keys.


# %%
def index_scores(x: Tensor, rows: Tensor, of: Indexer) -> Tensor:  # [T, hidden], [R] -> [R, T]
    angles = rope_angles(len(x), of.settings["rope_dim"], of.settings["rope_theta"])
    k = F.layer_norm(x @ of.wk.T, of.wk.shape[:1], of.k_norm_weight, of.k_norm_bias, NORM_EPS)
    k = rotate(k[:, None], angles)[:, 0]  # [T, d]
    q = rotate((x[rows] @ of.wq.T).unflatten(1, (-1, len(of.wk))), angles[rows])  # [R, H, d]
    w = x[rows] @ of.weights_proj.T / len(of.wq) ** 0.5  # [R, H]; wq has H d rows
    matches = torch.relu(q.flatten(0, 1) @ k.T).unflatten(0, w.shape)  # [R, H, T]
    return (w[:, :, None] * matches).sum(dim=1)


def indexer_of(addon: Addon, layer: int) -> Indexer:
    tensors = {key: addon.tensors[tensor_name(layer, key)].float() for key in TENSORS}
    return Indexer(tensors, addon.settings).requires_grad_(False)


shipped = {x: read_addon(SHIPPED / f"smollm2-135m-{x}.safetensors") for x in ("dsa", "dsa-shared")}
addon, addon_file = shipped["dsa"], None  # None: the engine finds the shipped one
if not real:
    sizes = SETTINGS | {"index_n_heads": 2, "index_head_dim": 16, "rope_dim": 8}
    layers, seeded = range(model.config.num_hidden_layers), torch.Generator().manual_seed(3)
    made = [Indexer.random(model.config.hidden_size, sizes, seeded).tensors() for _ in layers]
    tensors = {tensor_name(i, x): made[i][x].detach() for i in layers for x in TENSORS}
    header = {size: str(getattr(model.config, size)) for size in SIZES}
    header |= {"model": "tiny", "weights_fingerprint": fingerprint(model)}
    addon, addon_file = Addon("dsa", sizes, (*layers,), tensors, header), "out/07_addon.safetensors"
    Path("out").mkdir(exist_ok=True)
    write_addon(addon_file, addon)

# %%
N, NEWEST, ids = 200, 8, torch.randint(256, (200,), generator=generator)
inputs = model.attention_inputs(0, model.embed(ids), torch.arange(N))
mine = index_scores(inputs.x, torch.arange(N), indexer_of(addon, 0))
engine = DSASelector(addon, model, top_k=K, max_requests=1, max_model_len=N)
engine.admit(0, N)
engine.write_prompt(0, 0, 0, AttentionInputs(*(part[:-NEWEST] for part in inputs)))
same_lists = []
for t in range(N - NEWEST, N):
    token = AttentionInputs(*(part[t : t + 1] for part in inputs))
    picked = engine.select(0, token, Batch.make([0], [t + 1], "cpu"))[0].tolist()
    score = mine[t : t + 1, : t + 1]
    score[:, :SINKS] = score[:, -RECENT:] = torch.inf
    chosen = top_k_mask(score, score > -torch.inf, K)  # ties: the lowest
    same_lists.append(picked == chosen[0].nonzero()[:, 0].tolist())
print(f"the same list as the engine's for {sum(same_lists)} of {len(same_lists)} queries")

# %% [markdown]
# **Why ReLU?** Without it the sum over heads moves inside, `(sum_h w_h q_h) . k`: all are one head.
# With it, a head that does not match adds nothing instead of taking away, so several reasons to
# read can stand side by side. **Why w?** The query decides which count now. A softmax per head
# would, too, but needs a pass over all positions before the first score. **Why is it cheap?** It
# looks at all positions, but at less of each (the shipped file; bf16; per position and layer).

# %%
q, k, weight = (torch.randn(shape, generator=generator) for shape in ((4, 16), (50, 16), (4,)))
linear, collapsed = (weight[:, None] * (q @ k.T)).sum(0), (weight @ q) @ k.T
with_relu = (weight[:, None] * (q @ k.T).relu()).sum(0)
print(f"4 heads against 1: {(linear - collapsed).abs().max():.1e} apart without ReLU, ", end="")
print(f"{(with_relu - collapsed).abs().max():.1f} with it")
header, settings = shipped["dsa"].metadata, shipped["dsa"].settings
q_heads, kv_heads, head_dim = (int(header[size]) for size in SIZES[2:])
KEY_BYTES, RECORD_BYTES = 2 * settings["index_head_dim"], 2 * 2 * kv_heads * head_dim
index_flops = 2 * settings["index_n_heads"] * (settings["index_head_dim"] + 1)
attention_flops = 2 * 2 * q_heads * head_dim  # q . k, and p times v
print(f"per position: indexer {index_flops} FLOP and {KEY_BYTES} bytes, ", end="")
print(f"attention {attention_flops} FLOP and {RECORD_BYTES} bytes")
for x, file in shipped.items():
    size = sum(tensor.nbytes for tensor in file.tensors.values()) / 1e6
    print(f"{x}: {len(file.anchors)} indexers, {size:.1f} MB of weights beside the model")

# %% [markdown]
# ## Training
#
# The target is what dense attention reads, mean over heads: a distribution `p` over positions. The
# student's is `softmax(I)`. The loss is the **KL divergence** `sum_s p log(p / softmax(I))`. The
# model is frozen; each layer learns on its own, from its own inputs. Three students differ in one
# choice each: sinks and recents masked and RoPE on half of the numbers; nothing masked (so its KL
# is over other positions: do not compare it); RoPE on all.


# %%
def divergence(p: Tensor, scores: Tensor, left_out: Tensor) -> Tensor:  # of [R, T] each
    p, scores = p.masked_fill(left_out, 0), scores.masked_fill(left_out, -1e30)
    mass = p.sum(1)  # what is left of it: a row's divergence counts as much
    entropy = torch.special.entr(p).sum(1) + torch.xlogy(mass, mass)
    return (mass * scores.logsumexp(1) - (p * scores).sum(1) - entropy).mean()


def train(mask: bool, rope_dim: int) -> tuple[Indexer, list[float]]:
    """mask: leave sinks and recent positions out. The indexer; the loss of each pass over texts."""
    generator = torch.Generator().manual_seed(1)
    sizes = {"index_n_heads": HEADS, "index_head_dim": DIM, "rope_dim": rope_dim}
    indexer = Indexer.random(train_on[0].states.x.shape[1], SETTINGS | sizes, generator)
    optimizer, losses = torch.optim.Adam(indexer.parameters(), betas=(0.9, 0.95)), []
    left_out = ~causal | given if mask else ~causal  # NEW: what is held anyway is not to be learnt
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = LR * min(1, (step + 1) / 20) * (1 - step / STEPS)
        text = train_on[step % NUM_TRAIN]
        some = torch.randperm(len(ROWS), generator=generator)[:BATCH].sort().values
        scores = index_scores(text.states.x * SCALE, ROWS[some], indexer)
        loss = divergence(text.dense[some], scores, left_out[some])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return indexer.requires_grad_(False), torch.tensor(losses).view(-1, NUM_TRAIN).mean(1).tolist()


HEADS, DIM, STEPS, BATCH, LR = 4, 32, 300, 128, 5e-3
SCALE = float(train_on[0].states.x.pow(2).mean().rsqrt())  # weights act on inputs of rms 1

# %% [markdown]
# ## What the students find
#
# On held-out texts, K positions for each query, sinks and recents among them. *Mass*: share of
# dense attention that is read. *Searched*: the same without sinks and recents. *Source*: for
# queries inside the copy, the share of what dense attention reads at the source. The **oracle**
# takes the K largest of dense attention: nobody can hold more mass. A star: on texts of training.


# %%
def found(select: Selection, texts: list[Text]) -> list[float]:  # mass, searched, source
    rows = []
    for states, p, source, copy in texts:
        read = p * select(states)
        there = (copy <= ROWS) & (copy + SPAN > ROWS), slice(source, source + SPAN)
        rows.append((read.sum(1).mean(), *(read[x].sum() / p[x].sum() for x in (~given, there))))
    return torch.tensor(rows).mean(0).tolist()


def picks(of: Indexer, scale: float, top_k: int) -> Selection:
    return lambda states: top_k_mask(
        index_scores(states.x * scale, ROWS, of).masked_fill(given, torch.inf), causal, top_k
    )


RECIPES = {"trained": (True, DIM // 2), "unmasked": (False, DIM // 2), "RoPE on all": (True, DIM)}
students, curves, start = {}, {}, clock()
for recipe, choice in RECIPES.items():
    students[recipe], curves[recipe] = train(*choice)
    first, *_, last = curves[recipe]
    print(f"{recipe:12} KL {first:.3f} -> {last:.3f} in {STEPS} steps, at {clock() - start:.0f} s")
selections = {"oracle": oracle(K), "Quest": quest(K), "recent": recent(K)}
selections |= {recipe: picks(student, SCALE, K) for recipe, student in students.items()}
selections |= {"shipped": picks(indexer_of(addon, LAYER), 1.0, K)} if real else {}
results = {label: found(select, held_out) for label, select in selections.items()}
results |= {f"{recipe}*": found(selections[recipe], train_on) for recipe in RECIPES}
print(f"{f'K = {K} of {T}':14}", *(f"{measure:>9}" for measure in ("mass", "searched", "source")))
for label, result in results.items():
    print(f"{label:14}", *(f"{share:9.3f}" for share in result))

# %% [markdown]
# **Mass** says that all is nearly well: sinks and recents are most of it, and cost nothing.
# **Source** tells them apart. Recents do not look. Quest judges whole pages, only K / 16 of them,
# by loose bounds. **Unmasked**, much of the loss and its gradient is about what is held anyway; the
# rest comes later. **RoPE on all**: who looks for *what*, not *where*, has only the numbers that
# turn slowly; dims without RoPE match content at any distance. **With a star**, a few thousand
# tokens are partly learnt by heart. More text helps: the shipped one read millions. (One layer, one
# seed, a few texts: remember the order, not the digits.)
#
# ## Why perplexity is not enough
#
# From the shipped files' headers: training, and on held-out text with all layers sparse: perplexity
# (*ppl*); that of text that repeats itself (*copy*); six-digit numbers found after 8K (*needles*).

# %%
run = json.loads(header["training"])
print(f"shipped: {run['steps'] * run['seq_len']:,} tokens, {run['seconds']:.0f} s, {run['device']}")
print("KL over the steps:", *(f"{loss:.3f}" for _, loss in run["losses"][::4]))
scores, shared = (json.loads(file.metadata["scores"]) for file in shipped.values())
measured, NEEDLES, dense = scores["columns"], scores["num_needles"], scores["columns"]["dense"]
measured |= {"dsa": measured.pop("addon"), "dsa-shared": shared["columns"]["addon"]}
print(f"K = {settings['top_k']}", {x: scores[x] for x in ("num_positions", "num_decode", "device")})
print(f"{'':14}{'ppl':>8}{'copy':>8}{'needles':>9}{'ppl / dense':>13}{'copy / dense':>14}")
for label, row in measured.items():
    line = f"{label:14}{row['ppl']:8.2f}{row['copy']:8.2f}{row['needles']:6} of {NEEDLES}"
    print(f"{line}{row['ppl'] / dense['ppl']:10.2f}{row['copy'] / dense['copy']:14.2f}")

# %% [markdown]
# `recent` reads sinks and the last positions only: it finds nothing again. Its perplexity rises
# less than one would expect: most of a text follows from what is near. Quest is hardly better, and
# finds no needle. By perplexity, mean-pooled blocks beat Quest; not by copies. So the gates of
# `weights_scripts/distil.py` ask for copies and needles, too. The indexers are near the oracle.
#
# ## With the engine
#
# `LLM(..., selector="dsa")` takes the shipped file. The prompt begins to repeat a part of itself:
# can the model go on? Each engine is fed the right tokens, so that all see the same. (A model of
# random weights cannot go on; with it, look at the last line only.)

# %%
PROMPT, FIRST, NEW, TOP_K = (900, 200, 24, 128) if real else (400, 100, 12, 64)
story = ids_of("heapq", 0) if real else torch.randint(256, (PROMPT,), generator=generator)
again, right = story[FIRST : FIRST + 32 + NEW].split([32, NEW])
prompt = torch.cat([story[:PROMPT], again])


def make_llm(cache: str, selector: str, top_k: int = TOP_K) -> LLM:
    hisparse = HiSparseConfig(top_k=top_k, device_buffer_size=2 * top_k)
    setup = {"cache": cache, "selector": selector, "hisparse": hisparse, "use_tqdm": False}
    setup |= {"selector_weights": addon_file if selector == "dsa" else None}
    return LLM(model, **setup, max_model_len=len(prompt) + NEW, max_running_requests=1)


def decode(llm: LLM) -> tuple[Tensor, Tensor | None]:
    """Logits [NEW, V]; hits, misses, evictions of each step and layer, [NEW - 1, L, 3]."""
    runner, counts = llm.runner, []
    row = runner.admit(len(prompt) + NEW)
    logits = [runner.prefill(row, prompt)]
    for step in range(1, NEW):
        runner.reset_counters()
        batch = Batch.make([row], [len(prompt) + step], "cpu")
        logits.append(runner.decode(right[step - 1 : step], batch)[0])
        if runner.cache.counters is not None:
            counts.append(runner.cache.counters.clone())
    return torch.stack(logits), torch.stack(counts) if counts else None


# %%
ALL = -(-(len(prompt) + NEW) // 16) * 16  # K that leaves nothing out
engines = {"dense": ("full", "quest", ALL), "dsa, full": ("full", "dsa")}
engines |= {selector: ("hisparse", selector) for selector in ("dsa", "quest")}
logits, counts, follows = {}, {}, {}
for label, setup in engines.items():
    start = clock()
    logits[label], counts[label] = decode(make_llm(*setup))
    follows[label] = hits = int((logits[label].argmax(1) == right).sum())
    loss, seconds = F.cross_entropy(logits[label], right), clock() - start
    print(f"{label:10} {hits:3} of {NEW} tokens right, loss {loss:6.3f}, {seconds:.0f} s")
exact = torch.equal(logits["dsa"], logits["dsa, full"])
print(f"dsa in HiSparse against dsa in full KV: logits {'equal' if exact else 'DIFFER'}, every bit")

# %% [markdown]
# HiSparse is exact with respect to the selection. What that leaves out is the selector's affair.
# And the cache? Quest reads pages, and pages come back whole. The indexer picks positions one by
# one, from wherever they are needed. What is worth more costs more misses.
#
# So attention reads few positions; which, a tiny attention can learn from the large one. Do not
# train it on what it need not know, and leave it dims that are free of position. Then test whether
# it finds things again, because neither mass nor perplexity will tell.

# %%
compared, by_layer, by_step = ("dsa", "quest"), {}, {}
for x in compared:  # by layer without the first step, which fills the slots
    sums = counts[x][1:].sum(0).T, counts[x].sum(1).T
    by_layer[x], by_step[x] = ((hits / (hits + misses)).tolist() for hits, misses, _ in sums)
print("layer " + "".join(f"{x:>9}" for x in compared))
for layer, rates in enumerate(zip(*by_layer.values(), strict=True)):
    print(f"{layer:5} " + "".join(f"{rate:9.1%}" for rate in rates))
print("mean  " + "".join(f"{sum(rates) / len(rates):9.1%}" for rates in by_layer.values()))
lru = {x: measured[x]["lru_2k"] for x in compared}  # from the headers
print(f"8K tokens, {scores['device']}:", {x: f"{1 - miss:.1%}" for x, miss in lru.items()})
setting = f"{name if real else 'tiny random model'}, K = {TOP_K}, B = 2K, {len(prompt)} tokens"
data = {"config": setting, "by_step": by_step, "by_layer": by_layer}
try:
    print(save(plot_hit_rate(data), data, "out/07_hit_rate.png"))
except ImportError as error:
    print("no figure:", error)

# %%
assert all(same_lists) and exact and union >= K and top_mass[K] <= per_head
assert (linear - collapsed).abs().max() < 1e-4 < (with_relu - collapsed).abs().max()
assert all(curve[-1] < 0.7 * curve[0] for curve in curves.values())
mass, searched, source = ({x: row[i] for x, row in results.items()} for i in range(3))
assert max(mass.values()) <= mass["oracle"] + 1e-6
for x in ("Quest", "recent"):
    assert searched["trained"] > searched[x] and source["trained"] > 2 * source[x]
assert source["trained*"] > source["trained"] > max(source["unmasked"], source["RoPE on all"])
blind, paged, pooled = (measured[x] for x in ("recent", "quest", "mean-pooled"))
assert pooled["ppl"] < paged["ppl"] and pooled["copy"] > paged["copy"] and lru["quest"] < lru["dsa"]
for row in (blind, paged, pooled):
    assert row["copy"] / dense["copy"] > row["ppl"] / dense["ppl"] and row["needles"] == 0
    for x in (measured["dsa"], measured["dsa-shared"]):
        assert x["copy"] < row["copy"] and x["needles"] > row["needles"]
assert not real or source["shipped"] > source["trained"] and follows["dsa"] > follows["quest"]
print("chapter 7: all asserts hold")

# %% [markdown]
# ## Exercises
#
# 1. A layer with an indexer reads all index keys, then K records. From which length on is that less
#    than all records? With fp8 index keys (one byte per number, and 4 for a scale)?
# 2. How small may K be for the trained student to hold as much searched mass as Quest does with K?

# %% [markdown]
# ## Answers
#
# 1. `S * key + K * record < S * record`, so from S > K * record / (record - key) on. It pays almost
#    at once; what remains is the share `key / record` of very long contexts.
# 2. The mass grows with K, of which sinks and recents take SINKS + RECENT: count up from there.


# %%
def answer_1(key_bytes: int, record_bytes: int, top_k: int) -> int:
    return top_k * record_bytes // (record_bytes - key_bytes) + 1


def answer_2(target: float) -> int:
    tries = ((n, picks(students["trained"], SCALE, n)) for n in range(SINKS + RECENT, T))
    return next(n for n, select in tries if found(select, held_out)[1] >= target)


lengths = [answer_1(x, RECORD_BYTES, settings["top_k"]) for x in (KEY_BYTES, KEY_BYTES // 2 + 4)]
print(f"K = {settings['top_k']}: from {lengths[0]} tokens on; with fp8 from {lengths[1]}")
fewest = answer_2(searched["Quest"])
print(f"the trained student needs K = {fewest} for what Quest holds with {K}")
assert settings["top_k"] < lengths[1] < lengths[0] and SINKS + RECENT <= fewest < K
