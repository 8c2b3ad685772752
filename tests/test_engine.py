"""LLM: prompts in, text out, and nothing left behind.

Guards: results in another order than the prompts; a prompt whose answer depends on who else runs;
a refused prompt that takes others with it, or that is dropped without a word; rows and host pages
lost when a run ends early; a stop that is missed or shown; deltas that do not add up to the text;
LayerEvents that tell another story than the tables.
"""

import copy
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from conftest import byte_level_tokenizer
from dense_reference import dense_logits
from rig import assert_same_bits

from minihisparse import host_store
from minihisparse.config import HiSparseConfig
from minihisparse.engine import LLM
from minihisparse.events import LayerEvent
from minihisparse.gpu_cache import HiSparseCache
from minihisparse.kernels.resolve import resolve_oracle
from minihisparse.model import Decoder
from minihisparse.request import Request, RequestOutput
from minihisparse.sampling import SamplingParams
from minihisparse.stats import AllocationAccount
from minihisparse.tokenizer import Detokenizer, Tokenizer

K, B = 8, 16
SMALL = HiSparseConfig(top_k=K, device_buffer_size=B, page_size=4)
MAX_MODEL_LEN = 192
TEXTS = [
    "The whole KV history of a request lives in host memory;",
    "a",
    "Once upon a time there was a slot. It held a record, and the record was in the host too. "
    "Then came a miss.",
    "zwölf Boxkämpfer 你好",
]
GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)
UNUSED_ID = 287  # the model's vocabulary has it, the tokenizer has not

MakeLLM = Callable[..., LLM]


@pytest.fixture(scope="module")
def decoder(tiny_folder) -> Decoder:
    return Decoder.from_folder(tiny_folder, progress=False)


@pytest.fixture(scope="module")
def tokenizer(tiny_folder) -> Tokenizer:
    return Tokenizer.from_folder(tiny_folder)


@pytest.fixture
def make_llm(decoder, tokenizer) -> MakeLLM:
    """make_llm(eos=None, **settings): a small engine; when the test ends, it must be idle."""
    made = []

    def make(model: Decoder = decoder, eos: Sequence[int] | None = None, **settings) -> LLM:
        if eos is not None:
            model = copy.copy(model)
            model.config = replace(model.config, eos_token_ids=tuple(eos))
        defaults = {
            "tokenizer": tokenizer,
            "hisparse": SMALL,
            "max_model_len": MAX_MODEL_LEN,
            "use_tqdm": False,
            "checked": True,
        }
        made.append(LLM(model, **defaults | settings))
        return made[-1]

    yield make
    for llm in made:
        assert_idle(llm)


def assert_idle(llm: LLM) -> None:
    """No request is anywhere, or holds anything: rows, host pages, slots, pages of the selector."""
    assert not llm.scheduler.has_unfinished
    cache, pages = llm.cache, llm.runner.selector.extents
    assert cache.rows == set()
    if isinstance(cache, HiSparseCache):
        host = cache.host
        assert host.num_free_tokens == host.num_pages * host.page_size and not host._pages
        assert (cache.device_buffer_tokens == -1).all() and (host.req_to_host_pool == -1).all()
    else:
        assert cache.slots.num_free == cache.slots.num_units and not cache.slots.owners
    cache.check_integrity()
    assert pages.num_free == pages.num_units and not pages.owners
    pages.check_integrity()


def ids_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output["token_ids"] for output in outputs]


# ---- generate ----


def test_one_text(make_llm, tokenizer):
    out = make_llm().generate(TEXTS[0], GREEDY)
    assert isinstance(out, RequestOutput) and out.error is None
    assert out.prompt == TEXTS[0] and out.prompt_token_ids == tokenizer.encode(TEXTS[0])
    (completion,) = out.outputs
    assert completion.finish_reason == "length" and len(completion.token_ids) == 24
    assert completion.text == tokenizer.decode(completion.token_ids)
    assert out["text"] is completion.text and out["token_ids"] is completion.token_ids
    with pytest.raises(KeyError, match="'txt'"):
        out["txt"]
    assert out.ttft_ms > 0 and len(out.itl_ms) == 23 and min(out.itl_ms) >= 0


def test_ids_are_text(make_llm, tokenizer):
    """Token ids, also as a tuple: one prompt; and in a list of prompts beside text."""
    llm = make_llm()
    ids = tokenizer.encode(TEXTS[0])
    expected = llm.generate(TEXTS[0], GREEDY)["token_ids"]
    for prompt in (ids, tuple(ids)):
        out = llm.generate(prompt, GREEDY)
        assert out.prompt is None and out.prompt_token_ids == ids
        assert out["token_ids"] == expected
    assert ids_of(llm.generate([ids, TEXTS[0]], GREEDY)) == [expected, expected]


def test_a_model_without_a_tokenizer(make_llm):
    llm = make_llm(tokenizer=None)
    out = llm.generate([5, 6, 7], GREEDY)
    assert out["text"] == "" and len(out["token_ids"]) == 24
    with pytest.raises(ValueError, match="text prompts need a tokenizer"):
        llm.generate("text", GREEDY)
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        llm.generate([5], SamplingParams(stop="x"))
    with pytest.raises(ValueError, match="chat needs a tokenizer"):
        llm.chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("cache", ["hisparse", "full"])
def test_greedy_is_dense_greedy_when_all_is_selected(make_llm, decoder, tokenizer, cache):
    """An oracle outside of the engine, the selector and the caches: argmax of dense attention."""
    llm = make_llm(cache=cache, hisparse=HiSparseConfig(top_k=MAX_MODEL_LEN))
    outputs = llm.generate(TEXTS, GREEDY)
    for text, out in zip(TEXTS, outputs, strict=True):
        ids = tokenizer.encode(text) + out["token_ids"]
        dense = dense_logits(decoder, torch.tensor(ids[:-1])).argmax(dim=-1)
        assert out["token_ids"] == dense[-24:].tolist()


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_order_and_batch_do_not_matter(make_llm, rows):
    """Fewer rows than prompts: batches follow each other; each answer is that of a run alone."""
    llm = make_llm(max_running_requests=rows)
    alone = [llm.generate(text, GREEDY) for text in TEXTS]
    assert len({tuple(out["token_ids"]) for out in alone}) == len(TEXTS)
    together = llm.generate(TEXTS, GREEDY)
    assert [out.prompt for out in together] == TEXTS
    assert ids_of(together) == ids_of(alone)
    assert [out["text"] for out in together] == [out["text"] for out in alone]
    assert ids_of(llm.generate(TEXTS[::-1], GREEDY)) == ids_of(alone)[::-1]


def test_requests_of_a_batch_end_at_different_times(make_llm):
    """Rows that finish leave the batch; the others go on with the same tokens."""
    llm = make_llm()
    full_length = ids_of(llm.generate(TEXTS, GREEDY))
    lengths = [24, 1, 2, 13]
    params = [replace(GREEDY, max_new_tokens=n, max_tokens=None) for n in lengths]
    outputs = llm.generate(TEXTS, params)
    assert ids_of(outputs) == [ids[:n] for ids, n in zip(full_length, lengths, strict=True)]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_both_caches_give_the_same_tokens(make_llm, tiny_folder, dtype, temperature):
    """Exact: sampled tokens too, since the logits are the same bits."""
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    model = Decoder.from_folder(tiny_folder, dtype=dtypes[dtype], progress=False)
    params = SamplingParams(temperature=temperature, max_new_tokens=40, ignore_eos=True)
    results = {}
    for cache in ("hisparse", "full"):
        llm = make_llm(model, cache=cache, max_running_requests=3)
        outputs = llm.generate(TEXTS, params)
        results[cache] = [(out["text"], out["token_ids"]) for out in outputs]
        if cache == "hisparse":
            assert int(llm.cache.counters[:, 1].sum()) > 0  # or the test would prove little
    assert results["hisparse"] == results["full"]


def test_the_defaults_are_greedy(decoder, tokenizer):
    """No params: greedy, 128 tokens, EOS stops; no HiSparseConfig: its defaults."""
    llm = LLM(decoder, tokenizer=tokenizer, use_tqdm=False, max_running_requests=1)
    assert (llm.hisparse.top_k, llm.cache.device_buffer_size) == (256, 512)
    assert llm.max_model_len == 1024
    out = llm.generate(TEXTS[0])
    spelled_out = SamplingParams(temperature=0.0, max_new_tokens=128, ignore_eos=False)
    assert out["token_ids"] == llm.generate(TEXTS[0], spelled_out)["token_ids"]
    assert len(out["token_ids"]) == 128 or out.outputs[0].finish_reason == "stop"
    assert_idle(llm)


def test_params_one_each(make_llm):
    llm = make_llm()
    with pytest.raises(ValueError, match="2 prompts and 3 SamplingParams"):
        llm.generate(TEXTS[:2], [GREEDY] * 3)
    assert llm.generate([], GREEDY) == []
    assert len(llm.generate(TEXTS[:1], [GREEDY])) == 1


def test_unknown_arguments(make_llm, decoder, tiny_folder):
    for settings in ({"top_k": 8}, {"gpu_memory_utilization": 0.9}, {"max_seq_len": 8}):
        name = next(iter(settings))
        with pytest.raises(TypeError, match=name):
            LLM(decoder, **settings)
        with pytest.raises(TypeError, match=name):
            LLM.from_pretrained(tiny_folder, **settings)
    llm = make_llm()
    for method in (llm.generate, llm.stream, llm.step):
        with pytest.raises(TypeError, match="temperature"):
            method("a", temperature=1)
    with pytest.raises(TypeError, match="temperature"):
        llm.chat(MESSAGES, temperature=1)


# ---- a folder ----


@pytest.mark.parametrize("construct", [LLM, LLM.from_pretrained])
def test_from_a_folder(make_llm, tiny_folder, capfd, construct):
    settings = {"device": "cpu", "hisparse": SMALL, "max_model_len": MAX_MODEL_LEN}
    expected = ids_of(make_llm().generate(TEXTS, GREEDY))
    capfd.readouterr()
    llm = construct(tiny_folder, use_tqdm=False, **settings)
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == [
        "minihisparse: device cpu (as asked), dtype float32 (fastest exact type on a CPU)"
    ]
    assert (llm.device, llm.dtype) == (torch.device("cpu"), torch.float32)
    assert ids_of(llm.generate(TEXTS, GREEDY)) == expected
    assert_idle(llm)
    assert construct(str(tiny_folder), dtype="bf16", use_tqdm=False).dtype == torch.bfloat16


def test_progress_bars_go_to_stderr(make_llm, tiny_folder, capfd):
    llm = LLM(tiny_folder, device="cpu", hisparse=SMALL, max_model_len=MAX_MODEL_LEN)
    llm.generate(TEXTS[:2], GREEDY)
    printed = capfd.readouterr()
    assert printed.out == "" and "weights" in printed.err
    assert "48/48" in printed.err
    llm.generate(TEXTS[:2], GREEDY, use_tqdm=False)
    assert capfd.readouterr() == ("", "")
    make_llm(use_tqdm=False).generate(TEXTS[:2], GREEDY)
    assert capfd.readouterr() == ("", "")


def test_the_bar_ends_full_when_requests_stop_early(make_llm, capfd):
    llm = make_llm(use_tqdm=True, eos=range(200))
    llm.generate([*TEXTS, ""], SamplingParams(max_new_tokens=24))
    last = capfd.readouterr().err.split("\r")[-1]
    done, total = last.split("|")[-1].split()[0].split("/")
    assert done == total


# ---- sampling ----

RANDOM = SamplingParams(temperature=1.0, max_new_tokens=20, ignore_eos=True)


def test_seeds(make_llm):
    llm = make_llm(seed=3)
    first = ids_of(llm.generate(TEXTS, RANDOM))
    assert ids_of(llm.generate(TEXTS, RANDOM)) == first
    assert ids_of(make_llm(seed=3).generate(TEXTS, RANDOM)) == first
    assert ids_of(make_llm(seed=4).generate(TEXTS, RANDOM)) != first
    seeded = replace(RANDOM, seed=11, max_tokens=None)
    answers = [make_llm(seed=s).generate(TEXTS[0], seeded)["token_ids"] for s in (3, 4)]
    assert answers[0] == answers[1] != first[0]


def test_a_seed_is_independent_of_batch_mates(make_llm):
    """Alone, in a batch, at another index, and with fewer rows: the same tokens."""
    seeded = replace(RANDOM, seed=11, max_tokens=None)
    llm = make_llm()
    alone = llm.generate(TEXTS[0], seeded)["token_ids"]
    others = [GREEDY, RANDOM]
    batch = llm.generate([TEXTS[1], TEXTS[2], TEXTS[0]], [*others, seeded])
    assert batch[2]["token_ids"] == alone
    assert llm.generate([TEXTS[0], TEXTS[1]], [seeded, RANDOM])[0]["token_ids"] == alone
    one_row = make_llm(max_running_requests=1)
    assert one_row.generate([TEXTS[3], TEXTS[0]], [RANDOM, seeded])[1]["token_ids"] == alone


def test_equal_prompts_without_seeds_differ(make_llm):
    outputs = make_llm().generate([TEXTS[0]] * 3, RANDOM)
    assert len({tuple(ids) for ids in ids_of(outputs)}) == 3


def test_greedy_rows_beside_random_ones(make_llm):
    llm = make_llm()
    expected = llm.generate(TEXTS[0], GREEDY)["token_ids"]
    outputs = llm.generate([TEXTS[1], TEXTS[0]], [RANDOM, GREEDY])
    assert outputs[1]["token_ids"] == expected


# ---- how a request ends ----


@pytest.fixture
def greedy_run(make_llm) -> tuple[list[int], str]:
    out = make_llm(eos=()).generate(TEXTS[2], SamplingParams(max_new_tokens=40))
    assert out.outputs[0].finish_reason == "length"
    return out["token_ids"], out["text"]


def at_first(ids: Sequence[int], start: int = 4) -> tuple[int, int]:
    """An id that occurs first at or after index `start`, and that index."""
    return next((i, x) for i, x in enumerate(ids) if i >= start and x not in ids[:i])


def test_eos(make_llm, tokenizer, greedy_run):
    ids, _ = greedy_run
    at, eos = at_first(ids)
    llm = make_llm(eos=[UNUSED_ID, eos])
    out = llm.generate(TEXTS[2], SamplingParams(max_new_tokens=40))
    assert out.outputs[0].finish_reason == "stop"
    assert out["token_ids"] == ids[: at + 1]  # the ids include it
    assert out["text"] == tokenizer.decode(ids[:at])  # the text does not
    for params in (
        SamplingParams(max_new_tokens=at + 1),
        SamplingParams(max_new_tokens=40, stop_token_ids=[eos], ignore_eos=True),
    ):
        again = llm.generate(TEXTS[2], params)
        assert again["token_ids"] == ids[: at + 1]
        assert again.outputs[0].finish_reason == "stop"
    out = llm.generate(TEXTS[2], SamplingParams(max_new_tokens=40, ignore_eos=True))
    assert out["token_ids"] == ids and out.outputs[0].finish_reason == "length"


def test_eos_as_the_first_token(make_llm, greedy_run):
    """The token that the prefill gives ends the request: no decode step, and the row is free."""
    ids, _ = greedy_run
    llm = make_llm(eos=[ids[0]])
    out = llm.generate([TEXTS[2], TEXTS[2]], SamplingParams(max_new_tokens=40))
    assert ids_of(out) == [ids[:1]] * 2 and out[0]["text"] == ""
    assert int(llm.cache.counters.sum()) == 0


def test_min_new_tokens(make_llm, greedy_run):
    ids, _ = greedy_run
    at, eos = at_first(ids)
    llm = make_llm(eos=[eos])
    params = SamplingParams(max_new_tokens=40, min_new_tokens=at + 3)
    out = llm.generate(TEXTS[2], params)
    assert len(out["token_ids"]) >= at + 3
    assert out["token_ids"][:at] == ids[:at]
    assert eos not in out["token_ids"][: at + 2]


def test_stop_strings(make_llm, greedy_run):
    ids, text = greedy_run
    stop = text[9:12]
    at = text.find(stop)
    assert at > 0
    out = make_llm(eos=()).generate(TEXTS[2], SamplingParams(max_new_tokens=40, stop=stop))
    assert out.outputs[0].finish_reason == "stop"
    assert out["text"] == text[:at]
    assert out["token_ids"] == ids[: len(out["token_ids"])] and len(out["token_ids"]) < 40
    unheard_of = SamplingParams(max_new_tokens=40, stop=["\0never", text[-1] + "and more"])
    out = make_llm(eos=()).generate(TEXTS[2], unheard_of)
    assert (out["text"], out["token_ids"]) == (text, ids)
    assert out.outputs[0].finish_reason == "length"


def test_a_stop_string_found_only_at_the_end(tokenizer):
    """A "b" was held back, for "abc" could have come: when the length ends it, the text is cut."""
    ids = tokenizer.encode("xab")
    params = SamplingParams(max_new_tokens=len(ids), stop=["abc", "b"])
    request = Request(0, None, [5], params, detokenizer=Detokenizer(tokenizer, params.stop))
    for token_id in ids:
        request.append(token_id, ())
    assert (request.text, request.finish_reason) == ("xa", "stop")


# ---- stream ----


@pytest.mark.parametrize("stop", [(), ("e", "a b"), ("\N{REPLACEMENT CHARACTER}",)])
def test_deltas_add_up(make_llm, stop):
    """Random bytes: much of the text is incomplete UTF-8 that must be held back."""
    params = [
        SamplingParams(temperature=1.5, max_new_tokens=n, stop=stop, seed=n) for n in (60, 1, 33, 9)
    ]
    llm = make_llm(max_running_requests=3)
    outputs = llm.generate(TEXTS, params)
    deltas = list(llm.stream(TEXTS, params))
    for index, out in enumerate(outputs):
        own = [delta for delta in deltas if delta.index == index]
        assert "".join(delta.text for delta in own) == out["text"]
        assert [delta.token_id for delta in own] == out["token_ids"]
        reasons = [delta.finish_reason for delta in own]
        assert reasons == [None] * (len(own) - 1) + [out.outputs[0].finish_reason]


def test_tokens_come_one_by_one(make_llm):
    """A stream that is not listened to does not run ahead."""
    llm = make_llm()
    layers = count_layers(llm)
    stream = llm.stream(TEXTS[0], GREEDY)
    assert layers == []  # nothing happens before the first token is asked for
    next(stream)
    assert layers == []  # the prompt's token
    next(stream)
    assert layers == [0, 1]
    next(stream)
    assert layers == [0, 1] * 2
    stream.close()


def test_streams_take_turns(make_llm):
    """Two streams over one engine have rows of their own."""
    llm = make_llm()
    expected = ids_of(llm.generate(TEXTS[:2], GREEDY))
    pairs = zip(llm.stream(TEXTS[0], GREEDY), llm.stream(TEXTS[1], GREEDY), strict=True)
    first, second = zip(*((a.token_id, b.token_id) for a, b in pairs), strict=True)
    assert [list(first), list(second)] == expected


def test_a_stream_joins_and_leaves_another_one(make_llm):
    """Four streams begin and end at different tokens of each other; none notices the others."""
    llm = make_llm(max_running_requests=3)
    lengths = [24, 5, 12, 9]
    params = [replace(GREEDY, max_new_tokens=n, max_tokens=None) for n in lengths]
    expected = ids_of(llm.generate(TEXTS, params))
    streams = {i: llm.stream(TEXTS[i], params[i]) for i in range(4)}
    got: list[list[int]] = [[] for _ in streams]
    for turn in range(40):
        for i, stream in list(streams.items()):
            if turn >= 2 * i:  # the i-th begins when the others have got some tokens
                delta = next(stream, None)
                if delta is None:
                    del streams[i]
                else:
                    got[i].append(delta.token_id)
    assert not streams and got == expected


def test_a_stream_waits_while_another_one_has_the_cache(make_llm):
    """One row: the second stream's first token comes when the first one has left; the first one's
    tokens are kept for it meanwhile.
    """
    llm = make_llm(max_running_requests=1)
    expected = ids_of(llm.generate(TEXTS[:2], GREEDY))
    first, second = (llm.stream(text, GREEDY) for text in TEXTS[:2])
    got = [next(first).token_id]
    other = [next(second).token_id]  # runs the first one to its end
    assert len(llm.scheduler.timings.step_ms) >= 23
    layers = count_layers(llm)
    got += [delta.token_id for delta in first]
    assert layers == []  # all of them were there
    other += [delta.token_id for delta in second]
    assert [got, other] == expected


def test_closing_a_stream_lets_another_one_in(make_llm):
    llm = make_llm(max_running_requests=1)
    expected = llm.generate(TEXTS[1], GREEDY)["token_ids"]
    first, second = (llm.stream(text, GREEDY) for text in TEXTS[:2])
    next(first)
    first.close()
    assert_idle(llm)
    assert [delta.token_id for delta in second] == expected


# ---- chat ----

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Where is my KV?"},
]


def test_chat(make_llm, tokenizer):
    llm = make_llm()
    text = (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhere is my KV?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.backend.encode(text, add_special_tokens=False).ids
    assert ids.count(1) == 3 and ids.count(2) == 2  # special tokens, not their letters
    assert llm.chat_prompt(MESSAGES) == ids
    out = llm.chat(MESSAGES, GREEDY)
    assert out.prompt_token_ids == ids
    assert out["token_ids"] == llm.generate(ids, GREEDY)["token_ids"]


def test_chat_without_a_template(make_llm):
    llm = make_llm(tokenizer=Tokenizer(byte_level_tokenizer()))
    with pytest.raises(ValueError, match="--chat-template"):
        llm.chat(MESSAGES, GREEDY)
    assert llm.generate("plain prompts work", GREEDY).error is None


def test_a_template_of_ones_own(tiny_folder):
    llm = LLM(
        tiny_folder,
        device="cpu",
        chat_template="{% for m in messages %}[{{ m.content }}]{% endfor %}",
        hisparse=SMALL,
        use_tqdm=False,
    )
    assert llm.tokenizer.decode(llm.chat_prompt(MESSAGES)) == "[Be brief.][Where is my KV?]"


# ---- prompts that are refused ----


def too_long() -> list[int]:
    return [5] * (MAX_MODEL_LEN - 10)


@pytest.mark.parametrize(
    "prompt, params, message",
    [
        ("", GREEDY, "empty"),
        ([[]], GREEDY, "empty"),
        ([-1], GREEDY, r"not in 0\.\.287"),
        ([5, 288], GREEDY, r"not in 0\.\.287"),
        ([5], SamplingParams(stop_token_ids=[288]), r"not in 0\.\.287"),
        (too_long(), GREEDY, "206 in all, over the limit max_model_len=192"),
        ([5] * 300, GREEDY, "300 prompt tokens .* max_model_len=192"),
    ],
    ids=["no text", "no ids", "negative", "beyond", "stop id", "a little", "far"],
)
def test_refused(make_llm, prompt, params, message):
    """Alone: ValueError. In a list: `error`, and the others answer as if it were not there."""
    llm = make_llm(max_running_requests=2)
    one = prompt[0] if prompt == [[]] else prompt
    expected = ids_of(llm.generate(TEXTS[:3], GREEDY))
    with pytest.raises(ValueError, match=message):
        if prompt == [[]]:  # [] alone means no prompts
            list(llm.stream(prompt, params))
        else:
            llm.generate(prompt, params)
    for at in (0, 2):
        prompts, all_params = list(TEXTS[:3]), [GREEDY] * 3
        prompts.insert(at, one)
        all_params.insert(at, params)
        outputs = llm.generate(prompts, all_params)
        refused = outputs.pop(at)
        assert refused.error.startswith(f"prompt {at}: ")
        assert refused["text"] == "" and refused["token_ids"] == []
        assert refused.outputs[0].finish_reason == "error" and refused.ttft_ms is None
        assert ids_of(outputs) == expected and all(out.error is None for out in outputs)


@pytest.mark.parametrize("method", ["stream", "step"])
def test_a_stream_raises_before_its_first_token(make_llm, method):
    llm = make_llm()
    layers = count_layers(llm)
    with pytest.raises(ValueError, match="prompt 1: .*max_model_len=192"):
        next(getattr(llm, method)([TEXTS[0], too_long()], GREEDY))
    assert layers == []


def test_a_prompt_of_the_whole_length(make_llm, decoder, tokenizer):
    """Up to max_model_len, to the token; and far over all device slots together."""
    ids = tokenizer.encode(TEXTS[2] * 2)[: MAX_MODEL_LEN - 24]
    assert len(ids) == MAX_MODEL_LEN - 24 > B
    assert len(make_llm(max_running_requests=1).generate(ids, GREEDY)["token_ids"]) == 24
    llm = make_llm(max_model_len=decoder.max_model_len, max_running_requests=1)
    prompt = [5] * (decoder.max_model_len - 24)
    assert len(llm.generate(prompt, GREEDY)["token_ids"]) == 24


def test_a_host_pool_too_small_for_one(make_llm):
    """Refused with the flag that helps; the others run, one after the other if need be."""
    ratio = 60 / B / 2  # 60 tokens for two rows: text 0 and 24 new ones are too many
    hisparse = replace(SMALL, host_to_device_ratio=ratio)
    llm = make_llm(hisparse=hisparse, max_running_requests=2)
    assert llm.cache.host.num_free_tokens == 60
    with pytest.raises(ValueError, match="--host-to-device-ratio") as error:
        llm.generate(TEXTS[0], GREEDY)
    assert "60" in str(error.value) and "75" in str(error.value)
    prompts = [TEXTS[1], TEXTS[0], TEXTS[3], TEXTS[1] * 3]
    outputs = llm.generate(prompts, GREEDY)
    assert "--host-to-device-ratio" in outputs.pop(1).error
    del prompts[1]
    assert ids_of(outputs) == ids_of(make_llm().generate(prompts, GREEDY))


def bytes_of_one_request(make_llm: MakeLLM, cache: str) -> int:
    """Device bytes of one request of full length, and a quarter more for tables."""
    llm = make_llm(cache=cache, max_running_requests=1)
    return (llm.cache.device_kv_bytes + llm.runner.selector.state_bytes) * 5 // 4


@pytest.mark.parametrize("cache", ["full", "hisparse"])
def test_a_budget_of_device_memory(make_llm, cache):
    """Fewer requests at once, and none that would not fit: the same answers, later."""
    expected = ids_of(make_llm(cache=cache).generate(TEXTS, GREEDY))
    for num_requests in (1, 2):
        budget = num_requests * bytes_of_one_request(make_llm, cache)
        llm = make_llm(cache=cache, hbm_budget_gib=budget / 2**30)
        assert llm.cache.max_requests == num_requests
        assert ids_of(llm.generate(TEXTS, GREEDY)) == expected


def test_rows_that_share_a_budget(make_llm):
    """Eight rows on little more memory than one request of full length takes: as many run as fit,
    and they are more than one, for they are short.
    """
    budget = bytes_of_one_request(make_llm, "full") * 5 // 4
    settings = {"max_running_requests": 8, "hbm_budget_gib": budget / 2**30}
    llm = make_llm(cache="full", **settings)
    assert llm.cache.max_requests == 8 and llm.cache.slots.num_units < 2 * MAX_MODEL_LEN
    batches, decode = [], llm.scheduler.decode
    llm.scheduler.decode = lambda *args: batches.append(len(args[0])) or decode(*args)
    outputs = llm.generate([*TEXTS, *TEXTS], GREEDY)
    assert ids_of(outputs) == ids_of(make_llm(cache="full").generate(TEXTS, GREEDY)) * 2
    assert 1 < max(batches) < 8


@pytest.mark.parametrize("method", ["stream", "step"])
def test_a_stream_raises_when_the_host_pool_is_too_small(make_llm, method):
    """Not an empty stream: silence would look like an empty answer."""
    llm = make_llm(hisparse=replace(SMALL, host_to_device_ratio=1), max_running_requests=1)
    layers = count_layers(llm)
    with pytest.raises(ValueError, match="--host-to-device-ratio"):
        list(getattr(llm, method)(TEXTS[0], GREEDY))
    with pytest.raises(ValueError, match="prompt 1: .*--host-to-device-ratio"):
        list(getattr(llm, method)([[5], TEXTS[0]], replace(GREEDY, max_new_tokens=2)))
    assert layers == []


# ---- settings that are refused ----


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"device": "tpu"}, "--device 'tpu'"),
        ({"device": "meta"}, "--device 'meta'"),
        ({"dtype": "int8"}, "--dtype 'int8'"),
        ({"cache": "lru"}, "--cache 'lru'.*hisparse, full"),
        ({"selector": "h2o"}, "--selector 'h2o' is not one of: quest, dsa, dsa-shared, nsa"),
        ({"max_model_len": 1025}, r"--max-model-len 1025 .*1\.\.1024"),
        ({"max_model_len": 0}, r"--max-model-len 0 .*1\.\.1024"),
        ({"max_model_len": -5}, r"--max-model-len -5 .*1\.\.1024"),
        ({"max_running_requests": 0}, "--max-running-requests 0"),
        ({"hbm_budget_gib": 0}, "--hbm-budget-gib 0 must be above 0"),
        ({"hbm_budget_gib": 1e-6}, "--hbm-budget-gib 1e-06 is less than one request of 1024"),
        ({"hisparse": HiSparseConfig(cache_size_mb=0.001)}, "--cache-size-mb"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_bad_settings(tiny_folder, settings, message):
    with pytest.raises(ValueError, match=message):
        LLM(tiny_folder, use_tqdm=False, **{"device": "cpu", "dtype": "fp32"} | settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu(tiny_folder):
    with pytest.raises(ValueError, match="--device cuda:.*use --device cpu"):
        LLM(tiny_folder, device="cuda", use_tqdm=False)


def test_folders_that_are_not_there(tmp_path, tiny_folder):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        LLM(tmp_path / "nowhere", device="cpu", use_tqdm=False)
    for lost in ("config.json", "model.safetensors", "tokenizer.json"):
        folder = tmp_path / lost
        shutil.copytree(tiny_folder, folder)
        (folder / lost).unlink()
        with pytest.raises(FileNotFoundError, match=lost):
            LLM(folder, device="cpu", use_tqdm=False)


def test_a_path_with_spaces(tmp_path, tiny_folder):
    folder = tmp_path / "a model"
    shutil.copytree(tiny_folder, folder)
    assert LLM(folder, device="cpu", hisparse=SMALL, use_tqdm=False).generate("a", GREEDY)


def test_a_list_of_eos_ids_in_the_folder(tmp_path, tiny_folder, make_llm):
    """generation_config.json may name several; both end a text."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    ids = make_llm(eos=()).generate(TEXTS[2], GREEDY)["token_ids"]
    at, eos = at_first(ids)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, eos]}))
    llm = LLM(folder, device="cpu", hisparse=SMALL, max_model_len=MAX_MODEL_LEN, use_tqdm=False)
    out = llm.generate(TEXTS[2], SamplingParams(max_new_tokens=24))
    assert out["token_ids"] == ids[: at + 1] and out.outputs[0].finish_reason == "stop"


def test_host_memory_is_checked_before_it_is_taken(decoder, monkeypatch):
    monkeypatch.setattr(host_store, "free_host_bytes", lambda: 10 * 2**20)
    settings = {"hisparse": SMALL, "max_running_requests": 400, "max_model_len": 1024}
    needed = 2 * 400 * 1024 * 32 * 4
    with AllocationAccount() as account:
        with pytest.raises(MemoryError) as error:
            LLM(decoder, **settings)
    assert account.peak_bytes < needed / 2
    message = str(error.value)
    assert f"{needed / 2**30:.2f} GiB" in message and "0.01 GiB" in message
    for flag in ("--max-model-len", "--max-running-requests", "--host-to-device-ratio"):
        assert flag in message
    smaller = replace(SMALL, host_to_device_ratio=1)
    LLM(decoder, **settings | {"hisparse": smaller, "max_running_requests": 8})  # they do help
    LLM(decoder, **settings | {"max_running_requests": 8})
    monkeypatch.setattr(host_store, "free_host_bytes", lambda: None)  # the platform does not tell
    LLM(decoder, **settings | {"max_running_requests": 8})


# ---- everything comes back ----


def count_layers(llm: LLM) -> list[int]:
    """Notes each decode_layer call from now on."""
    layers, right = [], llm.runner.decode_layer

    def decode_layer(layer, hidden, batch):
        layers.append(layer)
        return right(layer, hidden, batch)

    llm.runner.decode_layer = decode_layer
    return layers


def fail_at(llm: LLM, method: str, call: int, error: BaseException) -> None:
    """Makes the runner's method raise at its `call`-th call, once."""
    right, calls = getattr(llm.runner, method), []

    def wrapper(*args):
        calls.append(method)
        if len(calls) == call:
            raise error
        return right(*args)

    setattr(llm.runner, method, wrapper)


@pytest.mark.parametrize("cache", ["hisparse", "full"])
@pytest.mark.parametrize("taken", [0, 1, 2, 3, 4, 11])
def test_a_stream_closed_early(make_llm, cache, taken):
    """During the prefills, after them, in the middle of a step's tokens."""
    llm = make_llm(cache=cache, max_running_requests=3)
    expected = ids_of(llm.generate(TEXTS, GREEDY))
    stream = llm.stream(TEXTS, GREEDY)
    for _ in range(taken):
        next(stream)
    stream.close()
    assert_idle(llm)
    assert ids_of(llm.generate(TEXTS, GREEDY)) == expected


def test_a_loop_left_by_break(make_llm):
    llm = make_llm()
    for _ in llm.stream(TEXTS, GREEDY):
        break
    assert_idle(llm)


@pytest.mark.parametrize("error", [RuntimeError("lost"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize(
    "method, call", [("prefill", 1), ("prefill", 2), ("decode_layer", 1), ("decode_layer", 8)]
)
def test_an_exception_in_the_middle(make_llm, method, call, error):
    """Also Ctrl-C: the engine is as good as new."""
    llm = make_llm()
    expected = ids_of(llm.generate(TEXTS, GREEDY))
    fail_at(llm, method, call, error)
    with pytest.raises(type(error)):
        llm.generate(TEXTS, GREEDY)
    assert_idle(llm)
    assert ids_of(llm.generate(TEXTS, GREEDY)) == expected


def test_logits_that_are_no_numbers(make_llm):
    """A model that overflows: an error that says so, and nothing is lost."""
    llm = make_llm()
    right = llm.runner.logits
    llm.runner.logits = lambda hidden: right(hidden) * torch.nan
    message = "after 1 new tokens its largest logit is no finite number: .* try --dtype fp32"
    for method in (llm.generate, lambda *args: list(llm.stream(*args))):
        with pytest.raises(ValueError, match=f"prompt 0: {message}"):
            method(TEXTS[0], GREEDY)
        assert_idle(llm)
    outputs = llm.generate(TEXTS, GREEDY)
    for index, out in enumerate(outputs):
        assert out.error.startswith(f"prompt {index}: after 1 new tokens")
        assert out.outputs[0].finish_reason == "error" and len(out["token_ids"]) == 1
    llm.runner.logits = right
    assert all(out.error is None for out in llm.generate(TEXTS, GREEDY))


def test_the_next_request_finds_a_clean_row(make_llm, decoder):
    """A long request, then a short one in the same row and pages: as in a new engine."""
    llm = make_llm(max_running_requests=1)
    for text in (TEXTS[2], TEXTS[1], TEXTS[3], TEXTS[2]):
        fresh = make_llm(max_running_requests=1)
        assert llm.generate(text, GREEDY)["token_ids"] == fresh.generate(text, GREEDY)["token_ids"]


# ---- step ----


class Shadow:
    """The tables as they must be, from the prompt's length and the events' positions alone."""

    def __init__(self, prompt_lens: Sequence[int], num_layers: int, record_bytes: int) -> None:
        self.record_bytes = record_bytes
        self.tokens = {}
        self.lru = {}
        for index, length in enumerate(prompt_lens):
            first = list(range(length)) if length <= B else []
            for layer in range(num_layers):
                self.tokens[layer, index] = first + [-1] * (B - len(first))
                self.lru[layer, index] = list(range(B))

    def check(self, event: LayerEvent) -> int:
        """Replays one event; returns its number of misses."""
        num_misses = 0
        for r, (index, seq_len) in enumerate(zip(event.indices, event.seq_lens, strict=True)):
            key = event.layer, index
            tokens, lru = self.tokens[key], self.lru[key]
            if seq_len <= B:
                tokens[seq_len - 1] = seq_len - 1
            positions = event.positions[r].tolist()
            slots, plan = resolve_oracle(positions, seq_len, tokens, lru, checked=True)
            missed = {fetch.position: fetch.evicted for fetch in plan}
            assert event.slots[r].tolist() == slots
            assert event.missed[r].tolist() == [p in missed for p in positions]
            assert event.hit[r].tolist() == [p >= 0 and p not in missed for p in positions]
            assert event.evicted[r].tolist() == [missed.get(p, -1) for p in positions]
            assert event.bytes_h2d[r] == len(plan) * self.record_bytes
            assert event.device_buffer_tokens[r].tolist() == tokens
            assert event.lru_slots[r].tolist() == lru
            num_misses += len(plan)
        return num_misses


@pytest.mark.parametrize("prompt_lens", [(B - 3,), (B,), (70,), (70, 3, B + 1)], ids=str)
def test_events_tell_what_happened(make_llm, decoder, prompt_lens):
    llm = make_llm()
    prompts = [[5 + (i * 7) % 200 for i in range(n)] for n in prompt_lens]
    params = [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in (20, 9, 14)]
    params = params[: len(prompts)]
    events = list(llm.step(prompts, params))  # all of them first: an event is a snapshot
    num_layers = decoder.config.num_hidden_layers
    assert [(e.step, e.layer) for e in events] == [
        (step, layer) for step in range(1, 20) for layer in range(num_layers)
    ]
    shadow = Shadow(prompt_lens, num_layers, record_bytes=32 * 4)
    misses = 0
    for event in events:
        alive = [i for i, p in enumerate(params) if event.step < p.max_new_tokens]
        assert event.indices == alive
        assert event.seq_lens == [prompt_lens[i] + event.step for i in alive]
        assert event.positions.shape == event.slots.shape == (len(alive), K)
        assert event.attention.shape == (len(alive), 6, 8)
        assert event.device_buffer_tokens.shape == event.lru_slots.shape == (len(alive), B)
        misses += shadow.check(event)
    assert misses == int(llm.cache.counters[:, 1].sum())
    evictions = sum(int((event.evicted >= 0).sum()) for event in events)
    assert evictions == int(llm.cache.counters[:, 2].sum())
    hits = sum(int(event.hit.sum()) for event in events)
    assert hits == int(llm.cache.counters[:, 0].sum())
    assert misses > 0 and evictions > 0


def test_events_of_both_caches(make_llm):
    """The same positions and attention, to the bit; FullCache has no slots to show, no misses."""
    pairs = zip(
        make_llm(cache="full").step(TEXTS, GREEDY),
        make_llm().step(TEXTS, GREEDY),
        strict=True,
    )
    for full, sparse in pairs:
        assert_same_bits(sparse.positions, full.positions, "positions")
        assert_same_bits(sparse.attention, full.attention, "attention")
        assert full.device_buffer_tokens is None and full.lru_slots is None
        assert torch.equal(full.hit, full.positions >= 0) and not full.missed.any()
        assert torch.equal(full.slots, full.positions)
        assert (full.evicted == -1).all() and (full.bytes_h2d == 0).all()
        for field in ("step", "layer", "indices", "seq_lens"):
            assert getattr(full, field) == getattr(sparse, field)


def test_the_next_layer_waits(make_llm):
    llm = make_llm()
    layers = count_layers(llm)
    steps = llm.step(TEXTS[0], GREEDY)
    for number, event in enumerate(steps, start=1):
        assert len(layers) == number and layers[-1] == event.layer
        if number == 5:
            break
    steps.close()


@pytest.mark.parametrize("cache", ["hisparse", "full"])
@pytest.mark.parametrize("taken", [0, 1, 3])
def test_stepping_stopped_half_way(make_llm, cache, taken):
    """In the middle of a step: some layers have written the newest record, others have not."""
    llm = make_llm(cache=cache)
    expected = ids_of(llm.generate(TEXTS, GREEDY))
    steps = llm.step(TEXTS, GREEDY)
    for _ in range(taken):
        next(steps)
    steps.close()
    assert_idle(llm)
    assert ids_of(llm.generate(TEXTS, GREEDY)) == expected


def test_a_request_without_a_decode_step(make_llm):
    assert list(make_llm().step(TEXTS[0], SamplingParams(max_new_tokens=1))) == []
