# %% [markdown]
# # 1. The capacity wall
#
# - **Question**: what limits how many requests a GPU can decode at once, and what does it cost
#   to move that limit?
# - **Minutes**: 15
# - **Needs**: a CPU, no model; `config.json` numbers are typed in
# - **Previous**: none, this is the first chapter
#
# A language model writes one token per *decode step*. To do so, each layer compares the newest
# token with all earlier ones, and for that it keeps two vectors per earlier token and KV head: a
# key (K) and a value (V). This *KV cache* grows with every token of every request. This chapter
# counts its bytes. GB means 10^9 bytes, and a context of 4K means 4096 tokens.

# %%
import torch

from minihisparse.assembly import make_runner
from minihisparse.config import HiSparseConfig
from minihisparse.model import Decoder, weight_shapes
from minihisparse.model_config import ModelConfig

GB = 1e9
KI = 1024  # a context of 4K tokens is 4 * KI

# %% [markdown]
# ## Three models
#
# A `ModelConfig` holds the numbers of a `config.json`. Six of them say how large the weights are;
# three of them (layers, KV heads, head size) say how large the KV cache is. The third model is a
# mixture of experts, which `ModelConfig` does not describe, so its numbers stand in a dict; they
# are those of Qwen3-30B-A3B's `config.json`, and its parameter count is the model card's.

# %%
smollm2 = ModelConfig(49152, 576, 1536, 30, 9, 3, 64, tie_word_embeddings=True)
llama = ModelConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
)
qwen = {"layers": 48, "kv_heads": 4, "head_dim": 128, "parameters": 30.5e9}
BF16 = torch.bfloat16.itemsize  # bytes of one number


def weight_bytes(config: ModelConfig) -> int:
    return BF16 * sum(torch.Size(shape).numel() for shape in weight_shapes(config).values())


# %% [markdown]
# ## Bytes per token
#
# A **record** is what one *position* (a token's place in its request, counted from 0) leaves
# behind in one layer: K and V of all KV heads, side by side. It is the unit in which minihisparse
# stores and moves KV. A token costs one record per layer.

# %%
models = {}  # name -> layers, bytes of a record, bytes of the weights
for name, config in {"SmolLM2-135M": smollm2, "Llama-3.1-8B": llama}.items():
    record_bytes = config.record_width * BF16
    models[name] = (config.num_hidden_layers, record_bytes, weight_bytes(config))
qwen_record_bytes = 2 * qwen["kv_heads"] * qwen["head_dim"] * BF16
models["Qwen3-30B-A3B"] = (qwen["layers"], qwen_record_bytes, qwen["parameters"] * BF16)

print(f"{'bf16':14} {'layers':>6} {'record bytes':>12} {'bytes per token':>15} {'weights GB':>10}")
for name, (layers, record_bytes, weights) in models.items():
    per_token = layers * record_bytes
    print(f"{name:14} {layers:6} {record_bytes:12,} {per_token:15,} {weights / GB:10.2f}")

# %% [markdown]
# ## Bytes per request
#
# Multiply by the tokens of a request. One long request of a model can weigh as much as the
# model itself.

# %%
CONTEXTS = [4 * KI, 8 * KI, 16 * KI, 32 * KI, 64 * KI, 128 * KI]


def kv_bytes(name: str, seq_len: int) -> int:
    layers, record_bytes, _ = models[name]
    return layers * record_bytes * seq_len


print("GB of KV per request" + "".join(f"{s // KI:7}K" for s in CONTEXTS))
for name in models:
    print(f"{name:20}" + "".join(f"{kv_bytes(name, s) / GB:8.2f}" for s in CONTEXTS))

# %% [markdown]
# ## The wall
#
# What the weights leave of the GPU's memory (*HBM*) is divided among the requests:
#
#     concurrency = (HBM - weights) / KV of one request
#
# This is the capacity wall. It ignores activations and the CUDA context, so a real wall stands a
# little nearer. 80 and 141 GB are data-sheet sizes (H100, H200).

# %%
H100, H200 = 80 * GB, 141 * GB


def full_wall(name: str, seq_len: int, hbm: float) -> int:
    """How many requests fit if all their KV is in HBM."""
    return max(0, int((hbm - models[name][2]) // kv_bytes(name, seq_len)))


print("requests that fit" + " " * 10 + "".join(f"{s // KI:7}K" for s in CONTEXTS))
for name in models:
    for hbm in (H100, H200):
        walls = "".join(f"{full_wall(name, s, hbm):8,}" for s in CONTEXTS)
        print(f"{name:18} {hbm / GB:3.0f} GB  {walls}")

# %% [markdown]
# ## Why concurrency matters: a step waits for memory
#
# One decode step multiplies every weight with one vector per request: the GPU computes little and
# reads much. So a step takes about as long as reading its bytes takes:
#
#     step time = (weights + requests * bytes read per request) / bandwidth
#
# The weights are read once per step, however many requests share them. More requests in a step
# therefore mean more tokens per second, until no more requests fit.

# %%
BANDWIDTH = {H100: 3350 * GB, H200: 4800 * GB}  # bytes/s, data sheets


def step_seconds(name: str, requests: int, read_bytes: float, hbm: float) -> float:
    return (models[name][2] + requests * read_bytes) / BANDWIDTH[hbm]


def show_curve(name: str, seq_len: int, read_bytes: float, hbm: float, scale: float) -> None:
    wall = full_wall(name, seq_len, hbm)
    for asked in (1, 2, 4, 8, 16, 32, 64):
        running = min(asked, wall)  # the others wait
        rate = running / step_seconds(name, running, read_bytes, hbm)
        note = " wall" if asked > wall else ""
        print(f"{asked:4} requests {rate:6.0f} tok/s {'#' * round(rate / scale)}{note}")


show_curve("Llama-3.1-8B", 32 * KI, kv_bytes("Llama-3.1-8B", 32 * KI), H100, scale=50)

# %% [markdown]
# ## Sparse attention reads less, but keeps as much
#
# A *sparse selector* names the `top_k` positions that are worth reading in this step; attention
# reads those only. The selector used here, Quest, also reads its own summary of the context: the
# largest and the smallest key of each page of 16 positions, which is as many bytes as one record
# per page.
#
# The curve becomes steep, and ends at the same wall: any position may be chosen in some later
# step, so none can be thrown away. What is *read* shrank; what is *kept* did not.

# %%
TOP_K, PAGE = 2048, 16


def sparse_read_bytes(name: str, seq_len: int) -> int:
    """Selected records and Quest's page bounds, in all layers."""
    return kv_bytes(name, min(TOP_K, seq_len)) + kv_bytes(name, seq_len // PAGE)


show_curve("Llama-3.1-8B", 32 * KI, sparse_read_bytes("Llama-3.1-8B", 32 * KI), H100, scale=50)

# %% [markdown]
# ## HiSparse keeps a fixed number of records on the device
#
# HiSparse moves the whole history into *host* memory (the CPU's). The GPU keeps per request and
# layer a small cache of B places, called **slots**, and one more for the newest token: B + 1
# records, whatever the length. When a selected position is in no slot, its record is fetched
# over the bus. (B is `device_buffer_size`, twice `top_k` unless you say otherwise.)
#
# Two more things stay on the device: tables, 6 bytes per slot; and Quest's bounds, which still
# grow with the context, 16 times slower than KV does.

# %%
B = 2 * TOP_K


def device_bytes(name: str, seq_len: int, slots: int = B) -> dict[str, int]:
    """Device bytes of one request under HiSparse, by kind."""
    layers, record_bytes, _ = models[name]
    pages = -(-seq_len // PAGE)
    return {
        "records": layers * (slots + 1) * record_bytes,
        "selector": layers * pages * record_bytes + 8,  # 8: where its pages begin
        # 4: in which host page a page lies; 8: where its slots begin
        "tables": layers * slots * 6 + pages * 4 + 8,
    }


print("Llama-3.1-8B, GB per request on the device")
print(f"{'':8}{'full':>8}" + "".join(f"{kind:>10}" for kind in device_bytes("Llama-3.1-8B", 1)))
for s in CONTEXTS:
    kinds = "".join(f"{n / GB:10.4f}" for n in device_bytes("Llama-3.1-8B", s).values())
    print(f"{s // KI:6}K {kv_bytes('Llama-3.1-8B', s) / GB:8.2f}{kinds}")

# %% [markdown]
# ## Are these formulas true?
#
# Ask the engine. It allocates its caches when it is made, so a tiny model is enough. To the tables
# it adds a little that all requests share: counters of hits, misses and evictions in each layer,
# and a number of 2 bytes per slot.

# %%
tiny = ModelConfig(64, 16, 16, 2, 4, 2, 4, max_position_embeddings=256)
tiny_decoder = Decoder.random(tiny, seed=0, dtype=torch.bfloat16)
tiny_setup = HiSparseConfig(top_k=32, device_buffer_size=64, page_size=PAGE)
runner = make_runner(
    tiny_decoder,
    cache="hisparse",
    selector="quest",
    hisparse=tiny_setup,
    max_model_len=256,
    max_running_requests=1,
)
models["tiny"] = (tiny.num_hidden_layers, tiny.record_width * BF16, weight_bytes(tiny))
counted = device_bytes("tiny", seq_len=256, slots=64)
counted["tables"] += tiny.num_hidden_layers * 3 * 8 + 64 * 2  # shared by all requests
allocated = {
    "records": runner.cache.device_kv_bytes,
    "selector": runner.selector.state_bytes,
    "tables": runner.cache.metadata_bytes,
}
print("counted  ", counted)
print("allocated", allocated)

# %% [markdown]
# ## Where the wall goes: host memory, and the link
#
# The history has not become smaller. It now has to fit into host memory, which is cheaper and
# larger than HBM. That is a second wall, further away. 2 TB for one GPU is our assumption.

# %%
HOST = 2000 * GB


def hisparse_walls(name: str, seq_len: int, hbm: float, slots: int = B) -> tuple[int, int]:
    """How many requests the device holds, and how many the host does."""
    device = (hbm - models[name][2]) // sum(device_bytes(name, seq_len, slots).values())
    return max(0, int(device)), int(HOST // kv_bytes(name, seq_len))


print("Llama-3.1-8B on 80 GB, requests: full HBM; HiSparse device, host of 2 TB")
for s in CONTEXTS:
    full = full_wall("Llama-3.1-8B", s, H100)
    device, host = hisparse_walls("Llama-3.1-8B", s, H100)
    print(f"{s // KI:6}K {full:5} {device:8} {host:6}   x{min(device, host) / full:.1f}")

# %% [markdown]
# The third wall is the link. A selected record that is in no slot is a *miss* and crosses the
# bus, which is far slower than HBM. If a share of the `top_k` records misses, a step takes
#
#     step time = (weights + requests * bytes read) / HBM bandwidth
#                 + requests * missed bytes / link bandwidth
#
# No concurrency helps against the last term: it caps the throughput at `link / missed bytes`.
# The link speed is measured (one H200, PCIe 5 x16, pinned memory). The miss rate is quoted: 13.4%,
# the HiSparse paper's figure 6, for B = 2 top_k, the model GLM-5.1 and a prompt of 100,384 tokens.
# We use it at all lengths, which is harsh on the short ones: at 8K, half of the context is in
# slots. Chapter 3 measures our own.

# %%
PCIE5 = 55.4 * GB  # bytes/s
MISS_RATE = 0.134


def full_rate(name: str, seq_len: int, hbm: float) -> float:
    """Tokens per second at the wall, sparse attention, all KV in HBM."""
    requests = full_wall(name, seq_len, hbm)
    return requests / step_seconds(name, requests, sparse_read_bytes(name, seq_len), hbm)


def hisparse_rate(name: str, seq_len: int, hbm: float, miss_rate: float, link: float) -> float:
    """The same under HiSparse, at the nearer of its two walls."""
    requests = min(hisparse_walls(name, seq_len, hbm))
    missed = miss_rate * kv_bytes(name, TOP_K) if seq_len > B else 0  # else all is in slots
    on_device = step_seconds(name, requests, sparse_read_bytes(name, seq_len), hbm)
    return requests / (on_device + requests * missed / link)


print(f"HBM is {BANDWIDTH[H100] / PCIE5:.0f} times as fast as the link")

# %% [markdown]
# ## Does it pay?
#
# In this model of a GPU, for long contexts and not for short ones: where full HBM (all KV on the
# GPU) fits enough requests to keep the GPU busy, the link only costs. A faster link, or fewer
# misses, moves the crossing.
#
# The model flatters full HBM. Real steps are slower than their bytes (launches, experts,
# communication), and the slower a step is, the less a fetch weighs. It also leaves out the room
# that Quest's bounds take beside full KV.

# %%
# NVLink-C2C of a GH200: the paper's figure 7 has 29 us where PCIe 5 takes 112.
FAST_LINK = PCIE5 * 112 / 29

print("Llama-3.1-8B on 80 GB, tok/s at the wall (13.4% misses)")
print(f"{'':8}{'full HBM':>9}{'PCIe 5':>9}{'gain':>7}{'C2C':>9}{'gain':>7}")
for s in CONTEXTS:
    full = full_rate("Llama-3.1-8B", s, H100)
    line = f"{s // KI:6}K {full:9.0f}"
    for link in (PCIE5, FAST_LINK):
        rate = hisparse_rate("Llama-3.1-8B", s, H100, MISS_RATE, link)
        line += f"{rate:9.0f}{'x' + format(rate / full, '.2f'):>7}"
    print(line)

# %% [markdown]
# What was measured on real systems is quoted here, not computed: arXiv 2608.07009, with SGLang
# 0.5.11 and all KV in HBM as the baseline, and `top_k` 2048.

# %%
quoted = [  # what, context, full HBM, HiSparse, unit
    ("GLM-5.1, KV of one request on the device", "128K", 13.09, 0.4, "GB (B = 4096, about)"),
    ("GLM-5.1 DSA, 8 x H200, peak throughput", "4K", 2288, 2280, "tok/s"),
    ("GLM-5.1 DSA, 8 x H200, peak throughput", "32K", 624, 1919, "tok/s"),
    ("Qwen3-30B-A3B + Quest, GH200, peak", "4K", 2430, 2668, "tok/s"),
    ("Qwen3-30B-A3B + Quest, GH200, peak", "200K", 111, 520, "tok/s"),
]
for what, context, full, hisparse, unit in quoted:
    print(f"{what:42} {context:>5} {full:8g} -> {hisparse:5g} {unit}")

# %% [markdown]
# ## What you know now
#
# Sparse attention made reading cheap and left the capacity wall where it was. HiSparse makes the
# device's share of a request nearly independent of its length, and pays on the link for misses.
# So everything depends on how few misses a small cache can have: that is chapter 3. Chapter 2
# first shows how one step works.

# %%
assert counted == allocated
assert all(full_wall(n, 128 * KI, H200) < full_wall(n, 4 * KI, H200) for n in models)
fixed = [device_bytes("Llama-3.1-8B", s)["records"] for s in CONTEXTS]
assert len(set(fixed)) == 1  # B + 1 records, whatever the length
gains = [
    hisparse_rate("Llama-3.1-8B", s, H100, MISS_RATE, PCIE5) / full_rate("Llama-3.1-8B", s, H100)
    for s in (32 * KI, 128 * KI)
]
assert gains[0] < 1 < gains[1]
print("chapter 1: all asserts hold")

# %% [markdown]
# ## Exercises
#
# 1. A service runs Llama-3.1-8B on 80 GB and wants 32 requests at once. How long may they be with
#    all KV in HBM? How long with HiSparse, B = 4096? What limits the second number?
# 2. At 32K, the table says that HiSparse over PCIe 5 loses to full HBM at 13.4% misses. At which
#    miss rate are they equal?

# %% [markdown]
# ## Answers
#
# 1. Divide what the weights leave by 32 requests. Under HiSparse the records and the slots' tables
#    are a fixed cost, and the rest buys pages: the limit is the selector's state, not KV. (The
#    model's own limit, 131,072 positions, comes first.)
# 2. Equal throughput means equal time per token; solve for the miss rate.


# %%
def longest_context(requests: int) -> tuple[int, int]:
    """Tokens per request, full HBM and HiSparse, Llama-3.1-8B on 80 GB."""
    layers, record_bytes, weights = models["Llama-3.1-8B"]
    share = (H100 - weights) / requests
    full = int(share // (layers * record_bytes))
    fixed = layers * (B + 1) * record_bytes + layers * B * 6 + 16
    pages = int((share - fixed) // (layers * record_bytes + 4))
    return full, pages * PAGE


def break_even_miss_rate(seq_len: int) -> float:
    """The miss rate at which PCIe 5 gives what full HBM gives, Llama-3.1-8B on 80 GB."""
    name = "Llama-3.1-8B"
    requests = min(hisparse_walls(name, seq_len, H100))
    on_device = step_seconds(name, requests, sparse_read_bytes(name, seq_len), H100) / requests
    seconds_for_misses = 1 / full_rate(name, seq_len, H100) - on_device
    return seconds_for_misses * PCIE5 / kv_bytes(name, TOP_K)


full_tokens, hisparse_tokens = longest_context(32)
print(f"32 requests: {full_tokens:,} tokens in HBM, {hisparse_tokens:,} under HiSparse")
print(f"break-even at 32K: {break_even_miss_rate(32 * KI):.1%} misses")

# %%
assert full_wall("Llama-3.1-8B", full_tokens, H100) >= 32
assert full_wall("Llama-3.1-8B", full_tokens + 1, H100) < 32
assert hisparse_walls("Llama-3.1-8B", hisparse_tokens, H100)[0] >= 32
assert hisparse_walls("Llama-3.1-8B", hisparse_tokens + PAGE, H100)[0] < 32
even = hisparse_rate("Llama-3.1-8B", 32 * KI, H100, break_even_miss_rate(32 * KI), PCIE5)
assert abs(even / full_rate("Llama-3.1-8B", 32 * KI, H100) - 1) < 1e-9
