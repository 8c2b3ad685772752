"""Text to token ids and back, chat templates, and text that grows token by token.

The work is done by the `tokenizers` library and jinja2; this file reads a model folder as other
engines do and adds what streaming needs: text that never has to be taken back.

Invariants:
    - the deltas of a `Detokenizer`, joined, equal `decode(all ids)`, cut at the first stop string;
    - no delta ends inside a character, or inside what may yet become a stop string;
    - nothing is emitted after a stop string.

What this file deliberately does not know: the model, sampling, which token ids end a request.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers.decoders import DecodeStream

# How sentencepiece-like vocabularies spell a single byte.
_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """A `tokenizers` tokenizer, plus the chat template and special tokens of its model folder.

    backend: the library's own object.
    special_tokens: {"bos_token": "<s>", ...} as the folder names them; templates may use them.
    special_ids: the ids that `decode` skips when told to.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        chat_template: str | None = None,
        special_tokens: dict[str, str] | None = None,
        source: str = "this tokenizer",
    ):
        # A saved tokenizer may carry its training-time limits; a prompt is never cut silently.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = special_tokens or {}
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._chat_template = chat_template
        self._source = source  # named in errors

    @classmethod
    def from_folder(cls, path: str | Path, chat_template: str | Path | None = None) -> Tokenizer:
        """Read tokenizer.json and, where they exist, tokenizer_config.json and chat_template.jinja.

        chat_template: a file's path or the template itself; goes before the folder's own. Without
            it chat_template.jinja goes before the "chat_template" of tokenizer_config.json.

        Raises FileNotFoundError: no tokenizer.json, or no such template file; ValueError: a file
        cannot be parsed.
        """
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(f"{folder} has no tokenizer.json; pass a model folder with one")
        backend = _parse(file, tokenizers.Tokenizer.from_str)
        file = folder / "tokenizer_config.json"
        config = _parse(file, json.loads) if file.is_file() else {}
        # A special token is a string, or a dict that holds it as "content".
        tokens = {
            name: token["content"] if isinstance(token, dict) else token
            for name, token in config.items()
            if name.endswith("_token") and isinstance(token, str | dict)
        }

        file = folder / "chat_template.jinja"
        if chat_template is not None:
            template = _template_text(str(chat_template))
        elif file.is_file():
            template = file.read_text(encoding="utf-8")
        else:
            template = config.get("chat_template")
            if isinstance(template, list):  # several, by name
                template = {entry["name"]: entry["template"] for entry in template}.get("default")
        return cls(backend, template, tokens, source=str(folder))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's V may be larger (padding)."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`.

        add_special_tokens: what tokenizer.json adds around a text, such as BOS. Pass False for the
            result of `apply_chat_template`, which holds its special tokens already.
        """
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; incomplete UTF-8 becomes U+FFFD, ids of no token become nothing."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(self, messages: list[dict], add_generation_prompt: bool = True) -> str:
        """Write a conversation as the prompt that the model was trained on.

        messages: [{"role": "user", "content": "..."}, ...]; further keys reach the template.
        add_generation_prompt: end with the opening of the assistant's answer.

        Raises ValueError: there is no template, or `messages` is malformed or rejected by it.
        """
        if self._chat_template is None:
            raise ValueError(
                f"{self._source} has no chat template; pass --chat-template with a file or the "
                "template's text, or give a plain prompt"
            )
        if not isinstance(messages, list | tuple) or not messages:
            raise ValueError(f"messages: got {messages!r}, expected a non-empty list of dicts")
        for i, message in enumerate(messages):
            fields = message if isinstance(message, dict) else {}
            if not all(isinstance(fields.get(key), str) for key in ("role", "content")):
                raise ValueError(
                    f"messages[{i}]: got {message!r}, expected a dict with strings at 'role' and "
                    "'content'"
                )
        try:
            template = _template_environment().from_string(self._chat_template)
            return template.render(
                **self.special_tokens,
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=None,  # templates compare these with none, and an undefined name is not none
                documents=None,
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"chat template of {self._source}: {error}") from error


def _parse(file: Path, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(file.read_text(encoding="utf-8"))
    except Exception as error:  # `tokenizers` raises nothing more precise
        raise ValueError(f"{file} cannot be read: {error}") from error


def _template_text(chat_template: str) -> str:
    """The argument itself if it is a template, else the text of the file it names."""
    if os.path.isfile(chat_template):
        return Path(chat_template).read_text(encoding="utf-8")
    if "{" not in chat_template:
        raise FileNotFoundError(
            f"--chat-template: {chat_template!r} is neither a file nor a Jinja template"
        )
    return chat_template


def _template_environment() -> jinja2.Environment:
    """What published templates rely on: whitespace rules, loop controls, three functions.

    Sandboxed, because a template comes with the weights and is somebody else's code.
    """

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value, ensure_ascii=False, **options) -> str:  # jinja2's own escapes HTML
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda fmt: datetime.now().strftime(fmt)
    return environment


class Detokenizer:
    """The text of one growing sequence of token ids, emitted as soon as it is final.

    stop: non-empty strings; the text ends before the one that begins first (the shorter of two that
        begin together), or behind it with `include_stop_str_in_output`.
    stopped: True once a stop string was found; from then on nothing is emitted.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
    ):
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop = (stop,) if isinstance(stop, str) else tuple(stop)
        self._include_stop = include_stop_str_in_output
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._ids: list[int] = []
        self._num_fed = 0  # ids that the stream has seen
        self._num_chars = 0  # characters that left the decoder
        self._held = ""  # decoded, but perhaps the start of a stop string

    def add(self, token_id: int) -> str:
        """Append one token; return the text that became final by it, often none."""
        if self.stopped:
            return ""
        self._ids.append(token_id)
        if self._decides_nothing(token_id):
            return ""
        new_ids = self._ids[self._num_fed :]
        self._num_fed = len(self._ids)
        return self._release(self._stream.step(self._tokenizer.backend, new_ids) or "")

    def finish(self) -> str:
        """Return the rest: incomplete UTF-8 as U+FFFD, and what could have become a stop string."""
        if self.stopped:
            return ""
        text = self._tokenizer.decode(self._ids, self._skip_special_tokens)
        return self._release(text[self._num_chars :], final=True)

    def _decides_nothing(self, token_id: int) -> bool:
        """Whether the text up to here may still change, whatever the stream thinks of it.

        A run of byte pieces decodes as a whole: one bad byte turns the complete characters beside
        it into U+FFFD too. `DecodeStream` emits those early (tokenizers 0.23), so it gets a run
        only when a visible token has ended it, and then as a list, which it takes from 0.22 on.
        """
        token = self._tokenizer.backend.id_to_token(token_id)
        skipped = self._skip_special_tokens and token_id in self._tokenizer.special_ids
        return token is None or skipped or _BYTE_PIECE.fullmatch(token) is not None

    def _release(self, text: str, final: bool = False) -> str:
        """Pass decoded text on, up to a stop string or to where one may have begun."""
        self._num_chars += len(text)
        text = self._held + text
        found = min(((text.find(s), len(s)) for s in self._stop if s in text), default=None)
        end = len(text) if final else self._undecided_from(text)
        if found is not None and found[0] <= end:
            self.stopped = True
            end = found[0] + (found[1] if self._include_stop else 0)
            self._held = ""
        else:
            self._held = text[end:]
        return text[:end]

    def _undecided_from(self, text: str) -> int:
        """Index where an incomplete stop string may begin at the end of `text`; else len(text)."""
        longest = max(map(len, self._stop), default=0)
        for i in range(max(0, len(text) - longest + 1), len(text)):
            if any(s.startswith(text[i:]) for s in self._stop):
                return i
        return len(text)
