# %% [markdown]
# # 7. Teaching a model where to look
#
# - **Question**: which 256 of 8,192 positions must a model read, and who can tell beforehand?
# - **Minutes**: 40, of which the real model computes about four
# - **Needs**: a CPU; better with the real model, which
#   `python -m minihisparse.weights_scripts.get_smollm2` makes; the figure needs the extra `plots`
# - **Previous**: 06_from_bytes_to_throughput
#
# All chapters so far took a selection as given. Whether the answer is any good depends on it. Quest
# needs no training, and leaves out much. DeepSeek's sparse attention (DSA) has a **lightning
# indexer**: a tiny attention of its own, trained to say what the large one will read. Here we write
# one, train it for one layer, and see what decides whether it finds things again.

# %%
import inspect
import json
import os
import time
from pathlib import Path
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
from minihisparse.weights_scripts.distil_dsa import SETTINGS, TENSORS, Indexer, tensor_name
from minihisparse.weights_scripts.distil_masks import oracle, quest, recent, top_k_mask
from minihisparse.weights_scripts.distil_model import LayerStates, dense_layers, dense_probabilities
from minihisparse.weights_scripts.get_smollm2 import default_out

# %% [markdown]
# ## Which model
#
# As in chapter 3: `MINIHISPARSE_MODEL` names the folder of SmolLM2-135M-Instruct, or is `tiny`.
# Without the real model we take one *layer that is made by hand*: what its heads read is known, so
# an indexer has something true to learn. Of the real model, it is layer 18; it looks things up.

# %%
wanted = os.environ.get("MINIHISPARSE_MODEL") or str(default_out())
real = wanted != "tiny" and (Path(wanted).is_dir() or "MINIHISPARSE_MODEL" in os.environ)
if real:
    model, tokenizer = Decoder.from_folder(wanted, progress=False), Tokenizer.from_folder(wanted)
    name, LAYER, T, SPAN, K = "SmolLM2-135M-Instruct", 18, 1024, 128, 64
else:
    tiny = ModelConfig(256, 32, 48, 4, 4, 2, 8, max_position_embeddings=1024)
    model, name = Decoder.random(tiny, seed=0), "a layer made by hand"
    LAYER, T, SPAN, K = 0, 512, 64, 32
print(f"model: {name}; texts of {T} tokens; a selection holds K = {K}")
if not real:
    print("for the real model: python -m minihisparse.weights_scripts.get_smollm2")

# %% [markdown]
# The made-up layer has three heads. One reads position 0 (a **sink**: trained models park attention
# there when they look for nothing). One reads what is near. The third asks: *what followed when
# the last two tokens came before?* Such **induction heads** are how models repeat what they read.


# %%
def layer_by_hand(ids: Tensor, rows: Tensor) -> LayerStates:
    """ids [T] below 96; its inputs x know the last three tokens and whether they are the first."""
    generator = torch.Generator().manual_seed(0)
    code = F.normalize(torch.randn(96, 16, generator=generator))[ids]  # [T, 16]
    back1, back2 = (F.pad(code, (0, 0, n, 0))[: len(ids)] for n in (1, 2))
    first = torch.zeros(len(ids), 16)
    first[0, 0] = 1.0
    x = torch.cat([code, back1, back2, first], dim=1)
    near = rope_angles(len(ids), 32, 1e3).flatten(1)  # q . k: a sum of cos of the distance
    sink_q, sink_k = torch.ones(len(ids), 32), 60 * F.pad(first, (0, 16))
    q = torch.stack([sink_q, 2.5 * near, 36 * torch.cat([code, back1], dim=1)], dim=1)
    k = torch.stack([sink_k, near, torch.cat([back1, back2], dim=1)], dim=1)
    return LayerStates(0, rows, x, q[rows], k, torch.zeros_like(k))  # nobody asks for v


# %% [markdown]
# The texts: sources of Python's standard library, which everybody has (of the layer by hand: drawn
# at random). In each, a span of an earlier place is **copied** to a later one, because we want to
# know whether a selection finds the source. Twelve are to train on; the others come from other
# files.


# %%
class Text(NamedTuple):
    states: LayerStates
    dense: Tensor  # [R, T]: what dense attention reads, mean over heads
    source: int  # where the copied span comes from
    copy: int  # where it was copied to


PIECES = [(file, i) for file in ("argparse", "inspect", "tarfile") for i in range(4)]
PIECES += [("heapq", 0), ("heapq", 3), ("textwrap", 1)]  # held out
NUM_TRAIN, ROWS = 12, torch.arange(T // 4, T)  # queries before have little to leave out
generator = torch.Generator().manual_seed(7)


def ids_of(file: str, piece: int) -> Tensor:
    if not real:
        return torch.randint(96, (T,), generator=generator)
    source = Path(inspect.__file__).with_name(f"{file}.py").read_text(encoding="utf-8")
    return torch.tensor(tokenizer.encode(source)[piece * T : (piece + 1) * T])


# %%
def make_text(file: str, piece: int) -> Text:
    ids = ids_of(file, piece)
    assert len(ids) == T, f"{file}.py is too short for piece {piece}"
    source = int(torch.randint(T // 2 - SPAN, (1,), generator=generator))
    copy = int(torch.randint(T // 2 + SPAN, T - SPAN + 1, (1,), generator=generator))
    ids[copy : copy + SPAN] = ids[source : source + SPAN].clone()
    if real:
        layers = dense_layers(model, ids, ROWS)  # stops at each layer
        states = next(states for states in layers if states.layer == LAYER)
    else:
        states = layer_by_hand(ids, ROWS)
    return Text(states, dense_probabilities(states).mean(dim=0), source, copy)


start = time.perf_counter()
texts = [make_text(*piece) for piece in PIECES]
train_on, held_out = texts[:NUM_TRAIN], texts[NUM_TRAIN:]
print(f"{len(texts)} texts up to layer {LAYER}: {time.perf_counter() - start:.0f} s")

# %% [markdown]
# ## What dense attention reads
#
# **Mass** is the share of the softmax that falls on some positions. Sinks and the most recent
# positions take much of it. They need no indexer: a selection just holds them always. The rest must
# be *searched*.

# %%
SINKS, RECENT = SETTINGS["num_sinks"], SETTINGS["num_recent"]
POSITION = torch.arange(T)


def always(rows: Tensor) -> Tensor:
    """[R, T] bool: sinks and recent positions of each query."""
    recent = POSITION > rows[:, None] - RECENT
    return ((POSITION < SINKS) | recent) & (POSITION <= rows[:, None])


def mean(values) -> float:
    values = [float(value) for value in values]
    return sum(values) / len(values)


given = always(ROWS)
sinks = mean(text.dense[:, :SINKS].sum(1).mean() for text in held_out)
free = mean((text.dense * given).sum(1).mean() for text in held_out)
print(f"{SINKS} sinks: {sinks:.1%}; {RECENT} most recent: {free - sinks:.1%}; rest {1 - free:.1%}")
top_mass = {
    n: mean(text.dense.topk(n).values.sum(1).mean() for text in held_out)
    for n in (K // 4, K // 2, K, 2 * K, 256)
}
print("mass of the largest", {n: round(mass, 3) for n, mass in top_mass.items()}, f"of {T}")

# %% [markdown]
# Few positions carry nearly all. But each *head* has its own few. One **record** holds the K and V
# of all KV heads, and slots and tables are per layer. So a layer needs **one list** for all heads.
# What does that cost against a list per head, and how many records would those be?

# %%
per_head, one_list, union = [], [], []
for text in held_out:
    heads = dense_probabilities(text.states)  # [Hq, R, T]
    best = heads.topk(K)
    per_head.append(best.values.sum(2).mean())
    one_list.append(text.dense.topk(K).values.sum(1).mean())
    read = torch.zeros_like(heads[0]).scatter_(1, best.indices.transpose(0, 1).flatten(1), 1.0)
    union.append(read.sum(1).mean())
print(f"a list of K per head: mass {mean(per_head):.3f}, {mean(union):.0f} different records")
print(f"one list of K for all: mass {mean(one_list):.3f}, {K} records")

# %% [markdown]
# ## The indexer, in ten lines
#
#     I[t, s] = sum_h w[t, h] relu(q[t, h] . k[s]) / sqrt(H d)
#
# `q`, `k` and `w` are linear in what the layer sees, its normed input `x`. There are H query heads
# and one key for all of them. RoPE (`rotate`) turns the first numbers of q and k only.


# %%
class Weights(NamedTuple):
    """In the order of TENSORS, which are the names in an add-on's file."""

    wq: Tensor  # [H * d, hidden]
    wk: Tensor  # [d, hidden]
    gain: Tensor  # [d]
    bias: Tensor  # [d]
    heads: Tensor  # [H, hidden]


def index_scores(x: Tensor, rows: Tensor, w: Weights, angles: Tensor) -> Tensor:
    """I [R, T] of the queries at rows; x [T, hidden]."""
    num_heads, dim = len(w.heads), len(w.gain)
    k = F.layer_norm(x @ w.wk.T, (dim,), w.gain, w.bias, NORM_EPS)
    k = rotate(k[:, None], angles[: len(x)])[:, 0]  # [T, d]
    q = (x[rows] @ w.wq.T).unflatten(1, (num_heads, dim))  # [R, H, d]
    q = rotate(q, angles[rows])
    weight = x[rows] @ w.heads.T / (num_heads * dim) ** 0.5  # [R, H]
    matches = torch.relu(q.flatten(0, 1) @ k.T).unflatten(0, weight.shape)  # [R, H, T]
    return (weight[:, :, None] * matches).sum(dim=1)


# %% [markdown]
# Is it the engine's? The trained weights come as an **add-on**, a file beside the model, which
# stays as it is. Two are shipped for SmolLM2. (A tiny model gets random ones: they mean nothing,
# but the arithmetic is the same.) The engine goes token by token and keeps its index keys.


# %%
def random_addon(model: Decoder) -> Addon:
    settings = SETTINGS | {"index_n_heads": 2, "index_head_dim": 16, "rope_dim": 8}
    generator, layers = torch.Generator().manual_seed(3), range(model.config.num_hidden_layers)
    tensors = {}
    for layer in layers:
        indexer = Indexer.random(model.config.hidden_size, settings, generator).tensors()
        tensors |= {tensor_name(layer, key): value.detach() for key, value in indexer.items()}
    header = {size: str(getattr(model.config, size)) for size in SIZES}
    header |= {"model": "tiny", "weights_fingerprint": fingerprint(model)}
    return Addon("dsa", settings, tuple(layers), tensors, header)


def weights_of(addon: Addon, layer: int) -> Weights:
    return Weights(*(addon.tensors[tensor_name(layer, key)].float() for key in TENSORS))


addon_file = SHIPPED / "smollm2-135m-dsa.safetensors"
if not real:
    addon_file = Path("out/07_random_addon.safetensors")
    addon_file.parent.mkdir(exist_ok=True)
    write_addon(addon_file, random_addon(model))
addon = read_addon(addon_file)

# %%
N, NEWEST = 200, 8
ids = torch.randint(256, (N,), generator=generator)
inputs = model.attention_inputs(0, model.embed(ids), torch.arange(N))
angles = rope_angles(N, addon.settings["rope_dim"], addon.settings["rope_theta"])
mine = index_scores(inputs.x, torch.arange(N), weights_of(addon, 0), angles)

engine = DSASelector(addon, model, top_k=K, max_requests=1, max_model_len=N)
engine.admit(0, N)
engine.write_prompt(0, 0, 0, AttentionInputs(*(part[:-NEWEST] for part in inputs)))
same_lists = []
for t in range(N - NEWEST, N):
    token = AttentionInputs(*(part[t : t + 1] for part in inputs))
    picked = engine.select(0, token, Batch.make([0], [t + 1], "cpu"))[0].tolist()
    score = mine[None, t, : t + 1].clone()
    score[:, :SINKS] = score[:, -RECENT:] = torch.inf
    chosen = top_k_mask(score, torch.ones_like(score, dtype=torch.bool), K)  # ties: the lowest
    same_lists.append(picked == chosen[0].nonzero()[:, 0].tolist())
print(f"the same list as the engine's for {sum(same_lists)} of {len(same_lists)} queries")

# %% [markdown]
# **Why ReLU?** Without it the sum over heads moves inside: `(sum_h w_h q_h) . k`. However many
# heads there were, it is one. With it, a head that does not match adds nothing instead of taking
# away, so several reasons to read can stand beside each other. **Why w?** The query decides which
# of them count now. A softmax per head would do that, too, but needs a pass over all positions
# before the first score is known.

# %%
q, k, weight = (torch.randn(shape, generator=generator) for shape in ((4, 16), (50, 16), (4,)))
linear = (weight[:, None] * (q @ k.T)).sum(0)
collapsed = (weight @ q) @ k.T
with_relu = (weight[:, None] * (q @ k.T).relu()).sum(0)
print(f"4 heads against 1: {(linear - collapsed).abs().max():.1e} apart without ReLU, ", end="")
print(f"{(with_relu - collapsed).abs().max():.1f} with it")

# %% [markdown]
# **Why is it cheap?** It must look at all positions, as dense attention does. But at less of each.
# Sizes from the header of the shipped file; bytes are of bf16, per position and layer.

# %%
shipped = {x: read_addon(SHIPPED / f"smollm2-135m-{x}.safetensors") for x in ("dsa", "dsa-shared")}
header, settings = shipped["dsa"].metadata, shipped["dsa"].settings
q_heads, kv_heads = int(header["num_attention_heads"]), int(header["num_key_value_heads"])
head_dim = int(header["head_dim"])
KEY_BYTES, RECORD_BYTES = 2 * settings["index_head_dim"], 2 * 2 * kv_heads * head_dim
index_flops = 2 * settings["index_n_heads"] * (settings["index_head_dim"] + 1)
attention_flops = 2 * 2 * q_heads * head_dim  # q . k, and p times v
print(f"per position: indexer {index_flops} FLOP and {KEY_BYTES} bytes, ", end="")
print(f"attention {attention_flops} FLOP and {RECORD_BYTES} bytes")
anchors = {x: len(addon.anchors) for x, addon in shipped.items()}
for x, file in shipped.items():
    size = sum(tensor.nbytes for tensor in file.tensors.values()) / 1e6
    print(f"{x}: {anchors[x]} indexers, {size:.1f} MB of weights beside the model")

# %% [markdown]
# ## Training
#
# The target is what dense attention reads, mean over heads: a distribution `p` over positions. The
# student's is `softmax(I)`. The loss is the **KL divergence** `sum_s p log(p / softmax(I))`. The
# model is frozen; each layer learns on its own, from its own inputs. One choice is marked.


# %%
def divergence(p: Tensor, scores: Tensor, left_out: Tensor) -> Tensor:
    """Mean over rows of KL, each times the mass that is left; all [R, T]."""
    p = p.masked_fill(left_out, 0)
    scores = scores.masked_fill(left_out, -1e30)
    mass = p.sum(1)
    entropy = torch.special.entr(p).sum(1) + torch.xlogy(mass, mass)
    return (mass * scores.logsumexp(1) - (p * scores).sum(1) - entropy).mean()


# %%
HEADS, DIM, STEPS, BATCH, LR = 4, 32, 300, 128, 5e-3
SCALE = float(train_on[0].states.x.pow(2).mean().rsqrt())  # weights act on inputs of rms 1


def train(mask: bool, rope_dim: int) -> tuple[Weights, Tensor, list[float]]:
    """mask: leave sinks and recent positions out. Weights, their angles, the loss of each step."""
    generator = torch.Generator().manual_seed(1)
    sizes = {"index_n_heads": HEADS, "index_head_dim": DIM}
    indexer = Indexer.random(train_on[0].states.x.shape[1], sizes, generator)
    weights, angles = Weights(*indexer.tensors().values()), rope_angles(T, rope_dim, 1e5)
    optimizer, losses = torch.optim.Adam(weights, betas=(0.9, 0.95)), []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = LR * min(1, (step + 1) / 20) * (1 - step / STEPS)
        text = train_on[step % NUM_TRAIN]
        some = torch.randperm(len(ROWS), generator=generator)[:BATCH].sort().values
        left_out = POSITION > ROWS[some][:, None]  # the future
        if mask:
            left_out = left_out | given[some]  # NEW: what is held anyway is not to be learnt
        scores = index_scores(text.states.x * SCALE, ROWS[some], weights, angles)
        loss = divergence(text.dense[some], scores, left_out)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Weights(*(tensor.detach() for tensor in weights)), angles, losses


# %% [markdown]
# Three students, who differ in one thing each: sinks and recents masked and RoPE on half of the
# numbers; nothing masked; RoPE on all of them.

# %%
RECIPES = {"trained": (True, DIM // 2), "unmasked": (False, DIM // 2), "RoPE on all": (True, DIM)}
students, curves = {}, {}
for recipe, choice in RECIPES.items():
    start = time.perf_counter()
    *students[recipe], curves[recipe] = train(*choice)
    ends = [mean(curves[recipe][part]) for part in (slice(NUM_TRAIN), slice(-NUM_TRAIN, None))]
    seconds = time.perf_counter() - start
    print(f"{recipe:12} KL {ends[0]:.3f} -> {ends[1]:.3f} in {STEPS} steps, {seconds:.0f} s")

# %% [markdown]
# (KLs with and without mask are sums over other positions: do not compare them.)
#
# ## What the students find
#
# On held-out texts, K positions for each query, sinks and recents among them. *Mass*: share of
# dense attention that is read. *Searched*: the same without sinks and recents. *Source*: for
# queries inside the copy, the share of what dense attention reads at the source. The **oracle**
# takes the K largest of dense attention: nobody can hold more mass.


# %%
class Found(NamedTuple):
    mass: float
    searched: float
    source: float


def found(masks: list[Tensor], texts: list[Text]) -> Found:
    """masks: of each text, [R, T] bool."""
    rows = []
    for mask, text in zip(masks, texts, strict=True):
        p, read = text.dense, text.dense * mask
        searched = (read * ~given).sum() / (p * ~given).sum()
        copied = (text.copy <= ROWS) & (text.copy + SPAN > ROWS)
        there = copied, slice(text.source, text.source + SPAN)
        rows.append((read.sum(1).mean(), searched, read[there].sum() / p[there].sum()))
    return Found(*map(mean, zip(*rows, strict=True)))


def picks(text: Text, weights: Weights, angles: Tensor, scale: float, top_k: int) -> Tensor:
    scores = index_scores(text.states.x * scale, ROWS, weights, angles)
    return top_k_mask(scores.masked_fill(given, torch.inf), text.states.causal, top_k)


# %%
results = {}
for label, select in {"oracle": oracle(K), "Quest": quest(K), "recent": recent(K)}.items():
    results[label] = found([select(text.states) for text in held_out], held_out)
for label, student in students.items():
    results[label] = found([picks(text, *student, SCALE, K) for text in held_out], held_out)
    results[f"{label}*"] = found([picks(text, *student, SCALE, K) for text in train_on], train_on)
if real:
    angles = rope_angles(T, addon.settings["rope_dim"], addon.settings["rope_theta"])
    student = weights_of(addon, LAYER), angles, 1.0
    results["shipped"] = found([picks(text, *student, K) for text in held_out], held_out)
print(f"{name}, layer {LAYER}, K = {K} of {T}       (* on what it was trained on)")
print(f"{'':14}{'mass':>8}{'searched':>10}{'source':>8}")
for label, result in results.items():
    print(f"{label:14}{result.mass:8.3f}{result.searched:10.3f}{result.source:8.3f}")

# %% [markdown]
# Look at it column by column.
#
# - **Mass** says that all is nearly well: sinks and recents are most of it, and cost nothing.
# - **Source** tells them apart. Recents find nothing; they do not look. Quest judges whole pages,
#   by bounds of their keys that are loose, and K positions are only K / 16 pages.
# - **Unmasked**, much of the loss, and so of the gradient, is about sinks and recents, which the
#   selection holds anyway. The rest comes later.
# - **RoPE on all** dims: whoever looks for *what* and not *where* has only the numbers that turn
#   slowly. Dims without RoPE match content at any distance.
# - **With a star** they look better: a few thousand tokens are partly learnt by heart. More text
#   helps. The shipped one was trained on millions of tokens (below).
#
# One layer, one seed, a few texts: the order is worth remembering, the digits are not.

# %%
training = json.loads(header["training"])
tokens_read = training["steps"] * training["seq_len"]
print(f"shipped: {tokens_read:,} tokens read, {training['seconds']:.0f} s on {training['device']}")
print("KL over the steps:", *(f"{loss:.3f}" for _, loss in training["losses"][::4]))

# %% [markdown]
# ## Why perplexity is not enough
#
# The files' headers say what was measured on held-out text with all layers sparse: perplexity of
# natural text; the same where a text repeats itself (*copy*); and *needles*, six-digit numbers that
# were asked for after 8K tokens.

# %%
scores = {x: json.loads(file.metadata["scores"]) for x, file in shipped.items()}
measured = dict(scores["dsa"]["columns"])
measured["dsa"] = measured.pop("addon")
measured["dsa-shared"] = scores["dsa-shared"]["columns"]["addon"]
dense = measured.pop("dense")
NEEDLES = scores["dsa"]["num_needles"]
where = "num_positions", "num_decode", "device"
print(*(f"{key} {scores['dsa'][key]}," for key in where), f"top_k {settings['top_k']}")
print(f"{'':14}{'ppl':>8}{'copy':>8}{'needles':>9}{'ppl / dense':>13}{'copy / dense':>14}")
for label, row in {"dense": dense, **measured}.items():
    ratios = row["ppl"] / dense["ppl"], row["copy"] / dense["copy"]
    line = f"{label:14}{row['ppl']:8.2f}{row['copy']:8.2f}{row['needles']:6} of {NEEDLES}"
    print(f"{line}{ratios[0]:10.2f}{ratios[1]:14.2f}")

# %% [markdown]
# `recent` looks at sinks and the last positions, and at nothing else. It cannot find anything
# again. Its perplexity rises, but not to what one would expect of that: most of a natural text
# follows from what is near. Quest is hardly better, and finds no needle. By perplexity, mean-pooled
# blocks are better than Quest; by copies, worse. So the gates of `weights_scripts/distil.py` ask
# for copies and needles, too. The indexers are close to the oracle in each.
#
# ## With the engine
#
# `LLM(..., selector="dsa")` takes the shipped file. A prompt that begins to repeat a part of itself
# shows whether the model can go on. Each engine is fed the right tokens, so that all see the same.
# (A model of random weights cannot go on; with it, look at the last line only.)

# %%
PROMPT, START, NEW, TOP_K = (900, 200, 24, 128) if real else (400, 100, 12, 64)
if real:
    story = ids_of("heapq", 0).tolist()[:PROMPT]
else:
    story = torch.randint(256, (PROMPT,), generator=generator).tolist()
again = story[START : START + 32 + NEW]
prompt, right = torch.tensor(story + again[:32]), torch.tensor(again[32:])


def make_llm(cache: str, selector: str, top_k: int = TOP_K) -> LLM:
    return LLM(
        model,
        cache=cache,
        selector=selector,
        selector_weights=addon_file if selector == "dsa" else None,
        hisparse=HiSparseConfig(top_k=top_k, device_buffer_size=2 * top_k),
        max_model_len=len(prompt) + NEW,
        max_running_requests=1,
        use_tqdm=False,
    )


# %%
def decode(llm: LLM) -> tuple[Tensor, Tensor | None]:
    """Logits [NEW, V]; hits, misses, evictions of each step and layer, [NEW - 1, L, 3]."""
    runner, counts = llm.runner, []
    row = runner.admit(len(prompt) + NEW)
    logits = [runner.prefill(row, prompt)]
    for step in range(1, NEW):
        if runner.cache.counters is not None:
            runner.cache.reset_counters()
        batch = Batch.make([row], [len(prompt) + step], "cpu")
        logits.append(runner.decode(right[step - 1 : step], batch)[0])
        if runner.cache.counters is not None:
            counts.append(runner.cache.counters.clone())
    runner.release(row)
    return torch.stack(logits), torch.stack(counts) if counts else None


# %%
ALL = -(-(len(prompt) + NEW) // 16) * 16  # K that leaves nothing out
engines = {
    "dense": ("full", "quest", ALL),
    "dsa, full": ("full", "dsa"),
    "dsa": ("hisparse", "dsa"),
    "quest": ("hisparse", "quest"),
}
logits, counts, follows = {}, {}, {}
for label, setup in engines.items():
    start = time.perf_counter()
    logits[label], counts[label] = decode(make_llm(*setup))
    follows[label] = int((logits[label].argmax(1) == right).sum())
    loss = float(F.cross_entropy(logits[label], right))
    seconds = time.perf_counter() - start
    print(f"{label:10} {follows[label]:3} of {NEW} tokens right, loss {loss:6.3f}, {seconds:.0f} s")
exact = torch.equal(logits["dsa"], logits["dsa, full"])
print(f"dsa in HiSparse against dsa in full KV: logits {'equal' if exact else 'DIFFER'}, every bit")

# %% [markdown]
# HiSparse changes nothing about what an indexer chose. It is exact with respect to the selection;
# what the selection leaves out is the selector's affair.
#
# And the cache? Quest reads pages, and pages come back whole. The indexer picks positions one by
# one, from wherever they are needed. What is worth more costs more misses.


# %%
def hit_rates(counts: Tensor, dim: int) -> list[float]:
    """counts [steps, L, 3]; per layer (dim 0: summed over steps) or per step (dim 1)."""
    hits, misses = counts.sum(dim)[:, 0], counts.sum(dim)[:, 1]
    return (hits / (hits + misses)).tolist()


compared = ("dsa", "quest")
by_layer = {x: hit_rates(counts[x][1:], 0) for x in compared}  # the first step fills the slots
by_step = {x: hit_rates(counts[x], 1) for x in compared}
print("layer " + "".join(f"{x:>9}" for x in compared))
for layer in range(model.config.num_hidden_layers):
    print(f"{layer:5} " + "".join(f"{by_layer[x][layer]:9.1%}" for x in compared))
print("mean  " + "".join(f"{mean(by_layer[x]):9.1%}" for x in compared))
lru = {x: measured[x]["lru_2k"] for x in compared}
print("8K tokens, from the headers:", {x: f"{1 - miss:.1%}" for x, miss in lru.items()})

setting = f"{name if real else 'tiny random model'}, K = {TOP_K}, B = 2K, {len(prompt)} tokens"
data = {"config": setting, "by_step": by_step, "by_layer": by_layer}
try:
    print(save(plot_hit_rate(data), data, "out/07_hit_rate.png"))
except ImportError as error:
    print("no figure:", error)

# %% [markdown]
# ## What you know now
#
# Attention reads few positions; which, a tiny attention can learn from the large one. Do not train
# it on what it need not know, and leave it dims that are free of position. Then test whether it
# finds things again, because neither mass nor perplexity will tell.

# %%
assert all(same_lists) and exact
assert (linear - collapsed).abs().max() < 1e-4 < (with_relu - collapsed).abs().max()
assert mean(one_list) <= mean(per_head) and mean(union) >= K
for curve in curves.values():
    assert mean(curve[-NUM_TRAIN:]) < 0.7 * mean(curve[:NUM_TRAIN])
trained, unmasked = results["trained"], results["unmasked"]
assert all(result.mass <= results["oracle"].mass + 1e-6 for result in results.values())
assert trained.searched > max(results[x].searched for x in ("Quest", "recent"))
assert trained.source > 2 * max(results[x].source for x in ("Quest", "recent"))
assert trained.source > max(unmasked.source, results["RoPE on all"].source)
assert results["trained*"].source > trained.source
blind, paged, pooled = (measured[x] for x in ("recent", "quest", "mean-pooled"))
assert pooled["ppl"] < paged["ppl"] and pooled["copy"] > paged["copy"]
for row in (blind, paged, pooled):
    assert row["copy"] / dense["copy"] > row["ppl"] / dense["ppl"] and row["needles"] == 0
    for x in ("dsa", "dsa-shared"):
        assert measured[x]["copy"] < row["copy"] and measured[x]["needles"] > row["needles"]
assert lru["quest"] < lru["dsa"]
if real:
    assert results["shipped"].source > trained.source and follows["dsa"] > follows["quest"]
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
# 2. See below: the mass grows with K, so bisect.


# %%
def answer_1(key_bytes: int, record_bytes: int, top_k: int) -> int:
    """The least length at which index keys and K records are fewer bytes than all records."""
    return top_k * record_bytes // (record_bytes - key_bytes) + 1


def answer_2(target: float) -> int:
    """The least K with at least this searched mass; sinks and recents alone take SINKS + RECENT."""
    low, high = SINKS + RECENT, T
    while low < high:
        middle = (low + high) // 2
        masks = [picks(text, *students["trained"], SCALE, middle) for text in held_out]
        enough = found(masks, held_out).searched >= target
        low, high = (low, middle) if enough else (middle + 1, high)
    return low


# %%
keys = KEY_BYTES, KEY_BYTES // 2 + 4
lengths = [answer_1(key_bytes, RECORD_BYTES, settings["top_k"]) for key_bytes in keys]
print(f"K = {settings['top_k']}: from {lengths[0]} tokens on; with fp8 from {lengths[1]}")
fewest = answer_2(results["Quest"].searched)
print(f"the trained student needs K = {fewest} for what Quest holds with {K}")
assert settings["top_k"] < lengths[1] < lengths[0] and SINKS + RECENT <= fewest < K
