"""LLM: prompts in, text out.

    llm = LLM("path/to/folder")
    out = llm.generate("Once upon a time", SamplingParams(max_new_tokens=32))
    for delta in llm.stream(prompts): ...
    for event in llm.step(prompts): ...         every layer of every step, before the next one runs

All calls on one LLM share one batch, in which requests come and go (`scheduler.py`): several
streams may be read in turns. A request that cannot run says why and harms nobody else.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from numbers import Integral
from pathlib import Path

from tqdm import tqdm

from minihisparse.assembly import make_runner
from minihisparse.config import HiSparseConfig, choose_device
from minihisparse.decode_step import DecodeStep
from minihisparse.events import LayerEvent
from minihisparse.kv_cache import KVCache
from minihisparse.model import Decoder
from minihisparse.request import Delta, Request, RequestOutput
from minihisparse.sampling import SamplingParams, make_generator
from minihisparse.scheduler import Scheduler
from minihisparse.stats import Timings, Workspace
from minihisparse.tokenizer import Detokenizer, Tokenizer

Prompt = str | Sequence[int]


class LLM:
    """A model with its caches, ready to generate.

    model: a Hugging Face folder; or a Decoder, with `tokenizer` (without one, prompts are token
    ids). device: "auto", "cpu", "cuda", "cuda:N". dtype: "auto", "fp32", "bf16", "fp16". cache:
    "hisparse" or "full". hisparse: HiSparseConfig, defaults if None; its `top_k` and `page_size`
        apply to both caches.
    selector: "quest", "dsa" or "dsa-shared". selector_weights: its add-on's file, where it is a
        trained one; None: the shipped one, for SmolLM2-135M-Instruct.
    max_model_len: most tokens of a request, prompt and answer; None: the model's own limit.
    max_running_requests: request rows, that is, the largest batch; None: 8, or what the budget
        holds.
    hbm_budget_gib: device memory for KV records, selector state and tables; see `capacity.py`.
        None: as much as max_running_requests requests of max_model_len tokens need.
    enforce_eager: no CUDA graphs.
    enable_prefix_sharing: a prompt that begins like a running request's shares its host pages, and
        computes what differs; see `prefix.py`.
    max_prefill_tokens: how many prompt tokens are prefilled before it is the others' turn to decode
        (8192): more is better for throughput, less for the time between their tokens.
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
        selector_weights: str | Path | None = None,
        hisparse: HiSparseConfig | None = None,
        max_model_len: int | None = None,
        max_running_requests: int | None = None,
        hbm_budget_gib: float | None = None,
        enforce_eager: bool = False,
        enable_prefix_sharing: bool = True,
        max_prefill_tokens: int | None = None,
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
            selector_weights=selector_weights,
            hisparse=self.hisparse,
            max_model_len=self.max_model_len,
            max_running_requests=max_running_requests,
            hbm_budget_gib=hbm_budget_gib,
            checked=checked,
        )
        decode = DecodeStep(self.runner, enforce_eager=enforce_eager, progress=use_tqdm)
        self.scheduler = Scheduler(
            self.runner,
            decode,
            max_prefill_tokens,
            enable_prefix_sharing=enable_prefix_sharing,
        )

    @classmethod
    def from_pretrained(cls, folder: str | Path, **settings) -> LLM:
        """The same as LLM(folder, **settings)."""
        return cls(folder, **settings)

    @property
    def cache(self) -> KVCache:
        return self.runner.cache

    @property
    def timings(self) -> Timings:
        return self.scheduler.timings

    @property
    def workspace(self) -> Workspace:
        return self.scheduler.workspace

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
            for delta in self._run(requests):
                bar.update()
                if delta.finish_reason:
                    request = requests[delta.index]
                    bar.total -= request.params.max_new_tokens - len(request.output_ids)
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
        requests = self._requests(prompts, params)
        _raise_error_of(requests)  # a stream has no place for an error
        # `closing`: on Python 3.12 closing a generator does not reach the one it iterates over.
        with closing(self._run(requests)) as run:
            yield from run
        _raise_error_of(requests)

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
        requests = self._requests(prompts, params)
        _raise_error_of(requests)
        try:
            for request in requests:
                self.scheduler.add(request)
            while not all(request.finished for request in requests):
                yield from self.scheduler.step_layers()
        finally:
            for request in requests:
                self.scheduler.abort(request)
        _raise_error_of(requests)

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
        limit, where, flag = self.runner.longest_request
        if request.max_tokens > limit:
            return (
                f"{num_prompt} prompt tokens and max_new_tokens={num_new} are {request.max_tokens} "
                f"in all; {where} holds {limit}; raise {flag} or lower --max-new-tokens"
            )
        return None

    def _run(self, requests: list[Request]) -> Iterator[Delta]:
        """Yields each token as it comes; when the caller stops listening, what runs is aborted."""
        unfinished = [request for request in requests if not request.finished]
        try:
            for request in unfinished:
                self.scheduler.add(request)
            while unfinished:
                for request in unfinished:
                    while request.unread:
                        yield request.unread.popleft()
                # Another stream may have moved ours on, even while one of its tokens was read.
                unfinished = [r for r in unfinished if r.unread or not r.finished]
                if not all(r.unread for r in unfinished):
                    self.scheduler.step()
        finally:  # also on Ctrl-C
            for request in requests:
                self.scheduler.abort(request)


def _raise_error_of(requests: list[Request]) -> None:
    for request in requests:
        if request.error:
            raise ValueError(request.error)


def _is_one(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Text, or token ids: one prompt. (An empty list is no prompts.)"""
    if isinstance(prompts, str):
        return True
    return len(prompts) > 0 and all(isinstance(item, Integral) for item in prompts)
