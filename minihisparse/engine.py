"""LLM: prompts in, text out. Requests are admitted, prefilled one by one, and decoded as one batch.

    llm = LLM("path/to/folder")
    out = llm.generate("Once upon a time", SamplingParams(max_new_tokens=32))
    for delta in llm.stream(prompts): ...
    for event in llm.step(prompts): ...         every layer of every step, before the next one runs

Batching is static: as many waiting requests as fit are admitted; when all of them have finished,
the next ones are. A request that cannot run says why and harms nobody else.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from numbers import Integral
from pathlib import Path

import torch
from tqdm import tqdm

from minihisparse.batch import Batch
from minihisparse.config import HiSparseConfig, choose_device
from minihisparse.events import LayerEvent, explain, tokens_of
from minihisparse.gpu_cache import KVCache
from minihisparse.model import Decoder
from minihisparse.request import Delta, Request, RequestOutput
from minihisparse.runner import make_runner
from minihisparse.sampling import SamplingParams, make_generator, mask_stop_ids, sample
from minihisparse.stats import Timings, Workspace
from minihisparse.tokenizer import Detokenizer, Tokenizer

Prompt = str | Sequence[int]


class LLM:
    """A model with its caches, ready to generate.

    model: a Hugging Face folder; or a Decoder, with `tokenizer` (without one, prompts are token
    ids). device: "auto", "cpu", "cuda", "cuda:N". dtype: "auto", "fp32", "bf16", "fp16". cache:
    "hisparse" or "full". selector: "quest". hisparse: HiSparseConfig, defaults if None; its
        `top_k` and `page_size` apply to both caches.
    max_model_len: most tokens of a request, prompt and answer; None: the model's own limit.
    max_running_requests: request rows, that is, the largest batch.
    seed: for requests that bring none of their own.
    checked: refuse positions out of range instead of reading -1 for them (slower).

    Raises FileNotFoundError, ValueError: the folder or a setting is not usable; the message names
    it. MemoryError, before anything is allocated: the host pool is larger than free memory.
    """

    def __init__(
        self,
        model: str | Path | Decoder,
        *,
        tokenizer: Tokenizer | None = None,
        device: str = "auto",
        dtype: str = "auto",
        cache: str = "hisparse",
        selector: str = "quest",
        hisparse: HiSparseConfig | None = None,
        max_model_len: int | None = None,
        max_running_requests: int = 8,
        seed: int = 0,
        checked: bool = False,
        chat_template: str | None = None,
        use_tqdm: bool = True,
    ) -> None:
        if isinstance(model, Decoder):
            self.model, self.tokenizer = model, tokenizer
            self.device, self.dtype = model.device, model.dtype
        else:
            self.device, self.dtype, reason = choose_device(device, dtype)
            print(f"minihisparse: {reason}", file=sys.stderr)
            self.model = Decoder.from_folder(
                model, device=self.device, dtype=self.dtype, progress=use_tqdm
            )
            self.tokenizer = tokenizer or Tokenizer.from_folder(model, chat_template)
        self.hisparse = hisparse or HiSparseConfig()
        self.seed = seed
        self.use_tqdm = use_tqdm
        limit = self.model.max_model_len
        self.max_model_len = limit if max_model_len is None else max_model_len
        self.runner = make_runner(
            self.model,
            cache=cache,
            selector=selector,
            hisparse=self.hisparse,
            max_model_len=self.max_model_len,
            max_running_requests=max_running_requests,
            checked=checked,
        )
        self.workspace = Workspace(self.device)
        self.timings = Timings()

    @classmethod
    def from_pretrained(cls, folder: str | Path, **settings) -> LLM:
        """The same as LLM(folder, **settings)."""
        return cls(folder, **settings)

    @property
    def cache(self) -> KVCache:
        return self.runner.cache

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
    ) -> RequestOutput | list[RequestOutput]:
        """Completes one prompt, or a list of them in the caller's order.

        Prompts are text or token ids; params are one for all or one each. In a list, a prompt that
        is refused comes back with `error` set; a lone one raises ValueError.
        """
        requests = self._requests(prompts, params)
        show = self.use_tqdm if use_tqdm is None else use_tqdm
        total = sum(r.params.max_new_tokens for r in requests if not r.finished)
        with tqdm(total=total, unit="tok", desc="generate", disable=not show) as bar:
            for item in self._run(requests):
                bar.update()
                if item.finished:
                    bar.total -= item.params.max_new_tokens - len(item.output_ids)
        if _is_one(prompts):
            _raise_error_of(requests)
            return requests[0].output()
        return [request.output() for request in requests]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[Delta]:
        """Yields each token as it comes; the texts of a prompt's deltas add up to its final text.

        Raises ValueError, before the first token, if a prompt is refused.
        """
        # `closing`: on Python 3.12 closing a generator does not reach the one it iterates over.
        with closing(self._run_or_raise(prompts, params)) as run:
            for request in run:
                last = request.output_ids[-1]
                yield Delta(request.index, request.delta, last, request.finish_reason)

    def chat(
        self, messages: list[dict], params: SamplingParams | None = None, **options
    ) -> RequestOutput:
        """Answers a conversation, a list of {"role", "content"}. Raises ValueError: no template."""
        return self.generate(self.chat_prompt(messages), params, **options)

    def chat_prompt(self, messages: list[dict]) -> list[int]:
        """The token ids of a conversation, up to where the assistant's answer begins."""
        if self.tokenizer is None:
            raise ValueError("chat needs a tokenizer; this LLM was made without one")
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def step(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[LayerEvent]:
        """Decodes, and stops after each layer of each step to show what Resolve did there.

        The next layer runs when the next event is asked for. Raises ValueError as `stream` does.
        """
        with closing(self._run_or_raise(prompts, params, inspect=True)) as run:
            for item in run:
                if isinstance(item, LayerEvent):
                    yield item

    def _requests(self, prompts, params) -> list[Request]:
        """Checks the prompts; what is wrong with one of them becomes that request's error."""
        prompts = [prompts] if _is_one(prompts) else list(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"got {len(prompts)} prompts and {len(params)} SamplingParams")
        requests = []
        for index, (prompt, request_params) in enumerate(zip(prompts, params, strict=True)):
            text = prompt if isinstance(prompt, str) else None
            if text is not None and self.tokenizer is None:
                raise ValueError("text prompts need a tokenizer; pass token ids")
            ids = self.tokenizer.encode(text) if text is not None else [int(i) for i in prompt]
            request = Request(index, text, ids, request_params)
            request.generator = make_generator(request_params, self.seed, index)
            if self.tokenizer is not None:
                request.detokenizer = Detokenizer(
                    self.tokenizer,
                    request_params.stop,
                    skip_special_tokens=request_params.skip_special_tokens,
                )
            problem = self._problem(request)
            if problem:
                request.finish("error", f"prompt {index}: {problem}")
            requests.append(request)
        return requests

    def _problem(self, request: Request) -> str | None:
        """Why this request can never run, if so."""
        num_prompt, num_new = len(request.prompt_ids), request.params.max_new_tokens
        if not num_prompt:
            return "it is empty; a prompt needs at least one token"
        vocab_size = self.model.config.vocab_size
        for ids in (request.prompt_ids, request.params.stop_token_ids):
            if not all(0 <= i < vocab_size for i in ids):
                return f"a token id is not in 0..{vocab_size - 1}"
        if request.params.stop and self.tokenizer is None:
            return "stop strings need a tokenizer"
        if request.max_tokens > self.max_model_len:
            return (
                f"{num_prompt} prompt tokens and max_new_tokens={num_new} are {request.max_tokens} "
                f"in all, over the limit max_model_len={self.max_model_len}; shorten the prompt, "
                "lower --max-new-tokens, or raise --max-model-len as far as the model allows"
            )
        if request.max_tokens > self.cache.max_tokens_per_request:
            return (
                f"{num_prompt} prompt tokens and max_new_tokens={num_new} are {request.max_tokens} "
                f"in all; the host pool holds {self.cache.max_tokens_per_request}; "
                "raise --host-to-device-ratio or lower --max-new-tokens"
            )
        return None

    def _run_or_raise(self, prompts, params, inspect: bool = False):
        """Runs prompts none of which may be refused: a stream has no place for an error."""
        requests = self._requests(prompts, params)
        _raise_error_of(requests)
        yield from self._run(requests, inspect)
        _raise_error_of(requests)  # refused by a cache that another stream of this LLM had filled

    def _run(
        self, requests: list[Request], inspect: bool = False
    ) -> Iterator[Request | LayerEvent]:
        """Yields a request after each of its tokens; with `inspect`, LayerEvents in between."""
        waiting = deque(request for request in requests if not request.finished)
        while waiting:
            running = self._admit(waiting)
            try:
                for request in running:
                    ids = torch.tensor(request.prompt_ids, device=self.device)
                    with self.workspace.measure():
                        logits = self.runner.prefill(request.row, ids)
                    self._append([request], logits[None])
                    self.timings.ttft_ms.append(1e3 * (time.perf_counter() - request.arrival))
                    yield request
                step = 0
                while active := [request for request in running if not request.finished]:
                    step += 1
                    yield from self._decode_step(active, step, inspect)
            finally:  # also when the caller stops listening, or on Ctrl-C
                for request in running:
                    if not request.finished:
                        request.finish("abort")
                    if request.row >= 0:
                        self._release(request)

    def _admit(self, waiting: deque[Request]) -> list[Request]:
        """Takes as many requests as fit, in order; refuses one that does not even fit alone."""
        running: list[Request] = []
        while waiting:
            try:
                waiting[0].row = self.cache.admit(waiting[0].max_tokens)
            except ValueError as error:
                if running:
                    break
                request = waiting.popleft()
                request.finish("error", f"prompt {request.index}: {error}")
            else:
                running.append(waiting.popleft())
        return running

    def _decode_step(
        self, active: list[Request], step: int, inspect: bool
    ) -> Iterator[Request | LayerEvent]:
        seq_lens = [len(r.prompt_ids) + len(r.output_ids) for r in active]
        batch = Batch.make([r.row for r in active], seq_lens, self.device)
        token_ids = torch.tensor([r.output_ids[-1] for r in active], device=self.device)
        start = time.perf_counter()
        hidden = self.runner.embed(token_ids)
        for layer in range(self.runner.num_layers):
            before = tokens_of(self.cache, layer, batch) if inspect else None
            result = self.runner.decode_layer(layer, hidden, batch)
            hidden = result.hidden
            if inspect:
                indices = [r.index for r in active]
                event = explain(
                    self.cache, batch, result, before, step=step, layer=layer, indices=indices
                )
                stopped = time.perf_counter()
                yield event
                start += time.perf_counter() - stopped  # looking takes no time of the engine's
        self._append(active, self.runner.logits(hidden))
        self.timings.add_step(time.perf_counter() - start, len(active))
        yield from active

    def _append(self, requests: list[Request], logits: torch.Tensor) -> None:
        """Samples the next token of each request from logits [R, V]; finished ones leave."""
        eos = self.model.config.eos_token_ids
        params = [r.params for r in requests]
        logits = mask_stop_ids(logits, params, [len(r.output_ids) for r in requests], eos)
        tokens = sample(logits, params, [r.generator for r in requests])
        for request, token in zip(requests, tokens, strict=True):
            request.append(token, eos)
            if request.finished:
                self._release(request)

    def _release(self, request: Request) -> None:
        self.cache.release(request.row)
        request.row = -1


def _raise_error_of(requests: list[Request]) -> None:
    for request in requests:
        if request.error:
            raise ValueError(request.error)


def _is_one(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Text, or token ids: one prompt. (An empty list is no prompts.)"""
    if isinstance(prompts, str):
        return True
    return len(prompts) > 0 and all(isinstance(item, Integral) for item in prompts)
