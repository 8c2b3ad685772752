"""What commands read from their flags, apart from what they do with it.

Guards: a prompt file whose bytes are taken for text; a prompt cut longer than it is; a request that
is longer than the model was made for, or than the user allows; a message that names no flag.
"""

from argparse import Namespace
from types import SimpleNamespace

import pytest

from minihisparse.command_inputs import (
    cut_prompts,
    encode_prompts,
    limit_beyond,
    read_prompts,
    read_text,
    runner_max_model_len,
    sampling_params,
)

MODEL = SimpleNamespace(max_model_len=100)
CONFIG = SimpleNamespace(max_position_embeddings=100)


def test_prompts_in_their_order(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("third \u00e4", encoding="utf-8")
    args = Namespace(prompt=["first", "second"], prompt_file=str(file))
    assert read_prompts(args) == ["first", "second", "third \u00e4"]
    with pytest.raises(ValueError, match="pass --prompt TEXT or --prompt-file FILE"):
        read_prompts(Namespace(prompt=None, prompt_file=None))


def test_bytes_are_no_text(tmp_path):
    (tmp_path / "bytes").write_bytes(b"abc\xff")
    with pytest.raises(ValueError, match="bytes is not UTF-8 text: .* position 3"):
        read_text(str(tmp_path / "bytes"))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read_text(str(tmp_path / "nowhere"))


def test_one_prompt_is_cut_to_lengths():
    assert cut_prompts([[5, 6, 7]], [1, 3]) == [[5], [5, 6, 7]]
    with pytest.raises(ValueError, match="--prompt-tokens 4 is more than the prompt has, 3"):
        cut_prompts([[5, 6, 7]], [1, 4])
    with pytest.raises(ValueError, match="--prompt-tokens cuts one prompt, but 2 were given"):
        cut_prompts([[5], [6]], [1])


def test_prompts_as_tokens():
    tokenizer = SimpleNamespace(encode=lambda text: list(text.encode()))
    asked = Namespace(prompt_tokens=None)
    assert encode_prompts(asked, tokenizer, ["ab", "c"]) == [[97, 98], [99]]
    assert encode_prompts(asked, tokenizer, []) == []
    cut = Namespace(prompt_tokens=[2, 1])
    assert encode_prompts(cut, tokenizer, ["abc"]) == [[97, 98], [97]]


@pytest.mark.parametrize(
    ("limit", "longest", "expected"), [(None, 90, 100), (None, 20, 30), (60, 50, 60), (60, 7, 60)]
)
def test_tokens_of_a_request(limit, longest, expected):
    args = Namespace(max_new_tokens=10, max_model_len=limit)
    assert runner_max_model_len(args, MODEL, longest) == expected


@pytest.mark.parametrize(("limit", "longest"), [(None, 91), (60, 51)])
def test_a_request_that_is_too_long(limit, longest):
    args = Namespace(max_new_tokens=10, max_model_len=limit)
    message = f"{longest} prompt tokens .* over the limit max_model_len={limit or 100}; .*--max-new"
    with pytest.raises(ValueError, match=message):
        runner_max_model_len(args, MODEL, longest)


@pytest.mark.parametrize(
    ("allowed", "wanted", "longest", "expected"),
    [
        (False, 500, None, None),
        (True, 500, None, 500),
        (True, None, 300, 300),
        (True, 80, 300, None),
    ],
)
def test_beyond_the_models_limit(capsys, allowed, wanted, longest, expected):
    args = Namespace(allow_beyond_model_limit=allowed, max_model_len=wanted)
    assert limit_beyond(args, CONFIG, longest) == expected
    assert ("positions from 100 on" in capsys.readouterr().err) == (expected is not None)


def test_beyond_the_models_limit_needs_a_length():
    args = Namespace(allow_beyond_model_limit=True, max_model_len=None)
    with pytest.raises(ValueError, match="say how far, with --max-model-len"):
        limit_beyond(args, CONFIG, None)


def test_not_every_command_has_stop():
    flags = {"temperature": 0.5, "top_p": 0.9, "sampling_top_k": 3, "max_new_tokens": 7}
    params = sampling_params(Namespace(**flags, ignore_eos=True))
    assert (params.temperature, params.top_k, params.max_new_tokens) == (0.5, 3, 7)
    assert sampling_params(Namespace(**flags, ignore_eos=True, stop=["x"])).stop != params.stop
