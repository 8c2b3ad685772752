"""SmolLM2-135M-Instruct in fp32 equals transformers: logits and perplexity of a known text.

Guards against: what tiny random models hide, such as a wrong RoPE base or norm epsilon in a real
config.json. Tolerance 1e-4 relative or 1e-3 absolute: logits reach 43, after sums over 30 layers.
"""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from dense_reference import dense_logits
from tokenizers import Tokenizer

from minihisparse.config import HiSparseConfig
from minihisparse.engine import LLM
from minihisparse.model import Decoder
from minihisparse.sampling import SamplingParams

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.model
TEXT = Path(__file__).parents[1] / "LICENSE"
TOKENS = 1000


@pytest.fixture(scope="module")
def run(smollm2_dir):
    """(token ids [T], our logits [T, V], transformers' logits [T, V])."""
    tokenizer = Tokenizer.from_file(str(Path(smollm2_dir) / "tokenizer.json"))
    ids = torch.tensor(tokenizer.encode(TEXT.read_text(encoding="utf-8")).ids[:TOKENS])
    assert len(ids) == TOKENS
    model = transformers.LlamaForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32).eval()
    with torch.inference_mode():
        theirs = model(ids[None]).logits[0]
    return ids, dense_logits(Decoder.from_folder(smollm2_dir, progress=False), ids), theirs


def test_logits_equal_transformers(run):
    _, ours, theirs = run
    print(f"max |ours - theirs| = {(ours - theirs).abs().max():.2e} of {theirs.abs().max():.1f}")
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)
    # Greedy tokens too, wherever the two best are not a tie in fp32.
    best = theirs.topk(2).values
    clear = best[:, 0] - best[:, 1] > 1e-2
    assert torch.equal(ours.argmax(-1)[clear], theirs.argmax(-1)[clear])


def test_perplexity_equals_transformers(run):
    ids, ours, theirs = run
    ours, theirs = (F.cross_entropy(x[:-1], ids[1:]).exp().item() for x in (ours, theirs))
    print(f"perplexity of {TEXT.name}: {ours:.4f}, transformers {theirs:.4f}")
    assert ours == pytest.approx(theirs, rel=0.01)
    assert ours < 20  # the model can read: 14.2 for the Q4_1 weights


@pytest.mark.parametrize("cache", ["full", "hisparse"])
def test_greedy_tokens_equal_transformers(smollm2_dir, cache):
    """With top_k >= context nothing is left out: 64 tokens, through either cache."""
    options = {"max_model_len": 512, "max_running_requests": 1, "use_tqdm": False}
    hisparse = HiSparseConfig(top_k=512, device_buffer_size=512)
    llm = LLM(smollm2_dir, device="cpu", dtype="fp32", cache=cache, hisparse=hisparse, **options)
    ids = llm.tokenizer.encode(TEXT.read_text(encoding="utf-8"))[:300]
    params = SamplingParams(max_new_tokens=64, ignore_eos=True)
    ours = llm.generate(ids, params)["token_ids"]
    model = transformers.LlamaForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32).eval()
    limits = {"max_new_tokens": 64, "min_new_tokens": 64, "do_sample": False}
    theirs = model.generate(torch.tensor([ids]), **limits)[0, len(ids) :].tolist()
    assert len(ours) == 64 and ours == theirs
