"""Guards: streamed text that differs from the final text, stop strings that leak or depend on how
the text was cut into tokens, and chat prompts that differ from what transformers would write.

The tokenizers are built here, in the three styles of decoder that small models use.
"""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from minihisparse.tokenizer import Detokenizer, Tokenizer

PROPERTY = settings(derandomize=True, deadline=None, max_examples=300, database=None)
SPECIAL = ["<s>", "</s>"]


def byte_level() -> Tokenizer:
    """GPT-2 style: a token is a string of bytes; merges of this one end inside characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("ð", "Ł"), ("Ġ", "a"), ("l", "l"), ("ll", "o"), ("Ã", "©")]
    vocab = {token: i for i, token in enumerate(alphabet + [a + b for a, b in merges])}
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(["ünïcode word"])
    return finished(backend)


def metaspace() -> Tokenizer:
    """T5 style: a leading space is added, and stripped again at the start of the text only."""
    vocab = {"<unk>": 0, "▁": 1, "▁▁": 2, "▁a": 3, "a": 4, "b": 5, "é": 6, "🙂": 7, "�": 8}
    backend = Backend(models.BPE(vocab=vocab, merges=[("▁", "▁"), ("▁", "a")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return finished(backend)


def byte_fallback() -> Tokenizer:
    """Llama-2 style: what the vocabulary lacks becomes byte pieces, decoded run by run."""
    pieces = ["<unk>", "▁", "▁▁", "▁a", "a", "b", "é", *(f"<0x{i:02X}>" for i in range(256))]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁", "▁"), ("▁", "a")]
    backend = Backend(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return finished(backend)


def finished(backend: Backend) -> Tokenizer:
    backend.add_special_tokens(SPECIAL)
    return Tokenizer(backend)


TOKENIZERS = {f.__name__: f() for f in (byte_level, metaspace, byte_fallback)}
any_tokenizer = pytest.mark.parametrize("name", TOKENIZERS)
texts = st.text(alphabet=st.one_of(st.sampled_from("ab lo é🙂�<s>"), st.characters(codec="utf-8")))


def stream(tokenizer: Tokenizer, ids: list[int], **options) -> tuple[list[str], Detokenizer]:
    detokenizer = Detokenizer(tokenizer, **options)
    return [detokenizer.add(i) for i in ids] + [detokenizer.finish()], detokenizer


# -- encode, decode ---------------------------------------------------------------------------


def test_byte_level_text_survives_the_round_trip():
    tokenizer = TOKENIZERS["byte_level"]
    text = " hello 🙂\n\té�\0"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == 256 + 5 + 1 + 2


def test_special_tokens_are_added_and_skipped_when_asked():
    tokenizer = byte_level()
    bos = tokenizer.backend.token_to_id("<s>")
    tokenizer.backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    assert tokenizer.encode("a") == [bos, *tokenizer.encode("a", add_special_tokens=False)]
    assert tokenizer.decode(tokenizer.encode("a")) == "a"
    assert tokenizer.decode(tokenizer.encode("a"), skip_special_tokens=False) == "<s>a"


def test_saved_truncation_and_padding_are_off():
    backend = byte_level().backend
    backend.enable_truncation(max_length=2)
    backend.enable_padding(length=8)
    assert len(Tokenizer(backend).encode("bbbbb")) == 5


# -- streaming --------------------------------------------------------------------------------


@any_tokenizer
@PROPERTY
@given(st.data())
def test_deltas_of_any_ids_join_to_decode(name, data):
    """Any ids: half characters, special and added tokens, and ids behind the vocabulary."""
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=24))
    skip = data.draw(st.booleans())
    deltas, _ = stream(tokenizer, ids, skip_special_tokens=skip)
    assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=skip)


@any_tokenizer
@PROPERTY
@given(text=texts)
def test_deltas_of_any_text_join_to_decode(name, text):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text)
    assert "".join(stream(tokenizer, ids)[0]) == tokenizer.decode(ids)


def test_characters_arrive_whole_and_at_once():
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("a🙂b")
    assert len(ids) == 5  # the emoji is three tokens here
    assert stream(tokenizer, ids)[0] == ["a", "", "", "🙂", "b", ""]
    assert stream(tokenizer, ids[:3])[0] == ["a", "", "", "�"]


def test_a_run_of_byte_pieces_waits_for_its_end():
    """`DecodeStream` alone would emit the "A" of A, 0xFF, but the pair decodes to two U+FFFD."""
    tokenizer = TOKENIZERS["byte_fallback"]
    a, bad = (tokenizer.backend.token_to_id(t) for t in ("<0x41>", "<0xFF>"))
    space, skipped = (tokenizer.backend.token_to_id(t) for t in ("▁", "<s>"))
    assert stream(tokenizer, [a, skipped, bad, space])[0] == ["", "", "", "�� ", ""]
    assert stream(tokenizer, [a, a])[0] == ["", "", "AA"]


def test_only_the_first_space_of_a_text_is_stripped():
    tokenizer = TOKENIZERS["metaspace"]
    a, space = (tokenizer.backend.token_to_id(t) for t in ("▁a", "▁"))
    assert stream(tokenizer, [space, a, a])[0] == ["", " a", " a", ""]
    assert stream(tokenizer, [a, a])[0] == ["a", " a", ""]


def test_finish_twice_emits_once():
    detokenizer = Detokenizer(TOKENIZERS["byte_level"], stop=("ab",))
    assert detokenizer.add(TOKENIZERS["byte_level"].encode("a")[0]) == ""
    assert [detokenizer.finish(), detokenizer.finish()] == ["a", ""]


# -- stop strings -----------------------------------------------------------------------------


def cut_at_stop(text: str, stop: list[str], include: bool) -> tuple[str, bool]:
    """What stopping means, on the whole text."""
    found = sorted((text.find(s), len(s)) for s in stop if text.find(s) >= 0)
    if not found:
        return text, False
    start, length = found[0]
    return text[: start + length if include else start], True


@any_tokenizer
@PROPERTY
@given(st.data())
def test_stop_strings_equal_a_search_in_the_whole_text(name, data):
    tokenizer = TOKENIZERS[name]
    letters = st.sampled_from(["a", "b", " ", "é", "🙂", "�"])
    ids = tokenizer.encode("".join(data.draw(st.lists(letters, max_size=16))))
    stop = data.draw(
        st.lists(st.lists(letters, min_size=1, max_size=4).map("".join), min_size=1, max_size=3)
    )
    include = data.draw(st.booleans())
    deltas, detokenizer = stream(tokenizer, ids, stop=stop, include_stop_str_in_output=include)
    expected = cut_at_stop(tokenizer.decode(ids), stop, include)
    assert ("".join(deltas), detokenizer.stopped) == expected


@pytest.mark.parametrize(
    "stop, deltas, stopped",
    [
        (("bc",), ["a", "", "", "", ""], True),  # begins inside the text, ends at the third token
        (("bd",), ["a", "", "bc", "d", ""], False),  # held back, then let go
        (("cd", "bc"), ["a", "", "", "", ""], True),  # the order of the list does not matter
        (("abcd", "bc"), ["", "", "", "", ""], True),  # "bc" waits for the earlier "abcd"
        (("abce", "bc"), ["", "", "", "a", ""], True),  # and ends the text once that is off
        (("de",), ["a", "b", "c", "", "d"], False),  # the end of the text lets go too
    ],
)
def test_text_is_held_only_while_undecided(stop, deltas, stopped):
    tokenizer = TOKENIZERS["byte_level"]
    got, detokenizer = stream(tokenizer, tokenizer.encode("abcd"), stop=stop)
    assert (got, detokenizer.stopped) == (deltas, stopped)


def test_stop_string_can_end_in_what_finish_flushes():
    tokenizer = TOKENIZERS["byte_level"]
    deltas, detokenizer = stream(tokenizer, tokenizer.encode("a🙂")[:-1], stop=["�"])
    assert ("".join(deltas), detokenizer.stopped) == ("a", True)


# -- folders and chat templates ---------------------------------------------------------------

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# In the manner of Llama 3: whitespace control, special tokens, the helper functions, loop controls.
LLAMA3 = """{{- bos_token }}{{ unk_token }}
{%- if tools is not none %}{{- raise_exception("no tools here") }}{%- endif %}
    {% set day = strftime_now("%Y") %}
{%- for message in messages %}
    {%- if message.role == "note" %}{% continue %}{% endif %}
    {%- if message.role not in ["system", "user", "assistant"] %}
        {{- raise_exception("unknown role " + message.role) }}
    {%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
    {{- message['content'] | trim + eos_token }}
    {% if message.extra is defined %}
    {{ message.extra | tojson(indent=2) }}
    {% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' + day[:2] }}
{%- endif %}
"""
MESSAGES = [
    {"role": "system", "content": "  Answer in <b>é</b>. "},
    {"role": "user", "content": "Hi & bye\n", "extra": {"ü": ["<a>", 1, None]}},
    {"role": "assistant", "content": "🙂"},
    {"role": "user", "content": "{{ bos_token }}"},
]


def folder(path, config: dict | None = None, jinja: str | None = None):
    """A model folder's tokenizer files."""
    path.mkdir(parents=True, exist_ok=True)
    byte_level().backend.save(str(path / "tokenizer.json"))
    if config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    if jinja is not None:
        (path / "chat_template.jinja").write_text(jinja, encoding="utf-8")
    return path


@pytest.mark.parametrize("template", [CHATML, LLAMA3], ids=["chatml", "llama3"])
@pytest.mark.parametrize("messages", [MESSAGES, MESSAGES[1:2]], ids=["four", "one"])
def test_chat_prompt_equals_that_of_transformers(tmp_path, template, messages):
    from transformers import AutoTokenizer

    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True},
        "unk_token": None,
        "add_bos_token": False,
        "chat_template": template,
    }
    path = folder(tmp_path / "with a space", config)
    theirs, ours = AutoTokenizer.from_pretrained(path), Tokenizer.from_folder(path)
    for generate in (True, False):
        expected = theirs.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generate
        )
        assert ours.apply_chat_template(messages, add_generation_prompt=generate) == expected


def test_which_template_wins(tmp_path):
    """The argument (text or file), then chat_template.jinja, then tokenizer_config.json."""
    named = [{"name": "tool_use", "template": "{#t#}T"}, {"name": "default", "template": "C"}]
    path = folder(tmp_path / "m", {"chat_template": named}, jinja="{#j#}J")
    file = tmp_path / "mine.txt"
    file.write_text("F", encoding="utf-8")

    def prompt(chat_template=None):
        return Tokenizer.from_folder(path, chat_template).apply_chat_template(MESSAGES)

    assert [prompt("{#a#}A"), prompt(str(file)), prompt(file), prompt()] == ["A", "F", "F", "J"]
    (path / "chat_template.jinja").unlink()
    assert prompt() == "C"
    with pytest.raises(FileNotFoundError, match="--chat-template: 'gone.jinja'"):
        prompt("gone.jinja")


def test_without_a_template_only_chat_fails(tmp_path):
    tokenizer = Tokenizer.from_folder(folder(tmp_path / "bare"))
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
    with pytest.raises(ValueError, match="bare has no chat template; pass --chat-template"):
        tokenizer.apply_chat_template(MESSAGES)


@pytest.mark.parametrize(
    "messages, words",
    [
        ("hi", "messages: got 'hi'"),
        ([], "non-empty"),
        (["hi"], r"messages\[0\]: got 'hi'"),
        ([*MESSAGES, {"role": "user"}], r"messages\[4\].*'content'"),
        ([{"role": "user", "content": None}], "'content'"),
        ([{"role": "robot", "content": ""}], "chat template of .*unknown role robot"),
    ],
)
def test_bad_messages_are_explained(tmp_path, messages, words):
    tokenizer = Tokenizer.from_folder(folder(tmp_path, jinja=LLAMA3))
    with pytest.raises(ValueError, match=words):
        tokenizer.apply_chat_template(messages)


def test_a_template_cannot_reach_python(tmp_path):
    escape = "{{ messages.__class__.__base__.__subclasses__() }}"
    tokenizer = Tokenizer.from_folder(folder(tmp_path), chat_template=escape)
    with pytest.raises(ValueError, match="unsafe"):
        tokenizer.apply_chat_template(MESSAGES)


def test_broken_folders_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere has no tokenizer.json"):
        Tokenizer.from_folder(tmp_path / "nowhere")
    path = folder(tmp_path)
    (path / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="tokenizer_config.json cannot be read"):
        Tokenizer.from_folder(path)
    (path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="tokenizer.json cannot be read"):
        Tokenizer.from_folder(path)


@pytest.mark.model
def test_smollm2_equals_transformers(smollm2_dir):
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(smollm2_dir), Tokenizer.from_folder(smollm2_dir)
    prompt = ours.apply_chat_template(MESSAGES)
    assert prompt == theirs.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=True
    )
    text = prompt + "日本語, naïve 🤷🏽‍♀️  \n\n def f(x):\n\treturn x"
    ids = ours.encode(text, add_special_tokens=False)
    assert ids == theirs.encode(text, add_special_tokens=False)
    for skip in (True, False):
        assert "".join(stream(ours, ids, skip_special_tokens=skip)[0]) == ours.decode(ids, skip)
