"""How a request picks its tokens: `SamplingParams`, and `sample`, one row of logits per request.

Greedy (temperature 0) is the default. Field names are vLLM's and SGLang's.

Shapes: logits [R, V], float32, any device.

Invariants:
    - a row's token depends on that row, its params and its generator, never on other rows;
    - equal logits go to the lowest token id, in argmax, top-k and top-p alike;
    - `sample` and `mask_stop_ids` leave their logits as they are.

What this file deliberately does not know: the model, text, which ids the model calls EOS.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import InitVar, dataclass
from numbers import Integral, Real

import numpy as np
import torch

DEFAULT_MAX_NEW_TOKENS = 128
NO_TOKEN = -1  # in place of a token id, where logits are no numbers


@dataclass(frozen=True)
class SamplingParams:
    """What one request wants; checked when made.

    temperature: 0 is greedy; else logits are divided by it.
    top_p: sample from the smallest set of likeliest tokens whose mass reaches it; in (0, 1].
    top_k: sample from that many likeliest tokens; -1 or 0: all.
    seed: fixes a request's tokens whatever else runs; None: derived from the engine's seed.
    max_new_tokens: generate at most this many (128 if not given); the constructor also takes
        it as `max_tokens`.
    min_new_tokens: no stop id before this many.
    stop: strings that end the text and are not part of it; a lone string is one.
    stop_token_ids: ids that end the request beside EOS.
    ignore_eos: EOS is a token like any other.
    skip_special_tokens: leave special tokens out of the text.

    Raises ValueError: a value outside its limits, or both names of `max_new_tokens`.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    max_new_tokens: int | None = None  # an int once made
    min_new_tokens: int = 0
    stop: str | Sequence[str] = ()  # a tuple once made
    stop_token_ids: Sequence[int] = ()  # a tuple once made
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    max_tokens: InitVar[int | None] = None

    def __post_init__(self, max_tokens: int | None):
        if max_tokens is not None and self.max_new_tokens is not None:
            raise ValueError(
                f"got max_new_tokens={self.max_new_tokens!r} and max_tokens={max_tokens!r}, two "
                "names of one limit; pass max_new_tokens only"
            )
        limit = self.max_new_tokens if max_tokens is None else max_tokens
        self._set("max_new_tokens", DEFAULT_MAX_NEW_TOKENS if limit is None else limit)
        self._set("stop", (self.stop,) if isinstance(self.stop, str) else _tuple(self.stop))
        self._set("stop_token_ids", _tuple(self.stop_token_ids))

        t, p = self.temperature, self.top_p
        self._check("temperature", _is_real(t) and 0 <= t < math.inf, "a finite number >= 0")
        self._check("top_p", _is_real(p) and 0 < p <= 1, "a number in (0, 1]; 1 is off")
        self._check(
            "top_k",
            _is_int(self.top_k, -1),
            "an integer >= 1; -1 or 0 is off (the flag is --sampling-top-k)",
        )
        self._check("seed", self.seed is None or _is_int(self.seed, 0), "an integer >= 0 or None")
        self._check("max_new_tokens", _is_int(self.max_new_tokens, 1), "an integer >= 1")
        self._check(
            "min_new_tokens",
            _is_int(self.min_new_tokens, 0) and self.min_new_tokens <= self.max_new_tokens,
            f"an integer in 0..max_new_tokens ({self.max_new_tokens})",
        )
        self._check("stop", all(isinstance(s, str) and s for s in self.stop), "non-empty strings")
        self._check(
            "stop_token_ids", all(_is_int(i, 0) for i in self.stop_token_ids), "integers >= 0"
        )
        for name in ("ignore_eos", "skip_special_tokens"):
            self._check(name, isinstance(getattr(self, name), bool), "True or False")

    def _set(self, name: str, value) -> None:
        object.__setattr__(self, name, value)  # the one way to fill a frozen dataclass

    def _check(self, name: str, ok: bool, expected: str) -> None:
        if not ok:
            raise ValueError(f"{name}: got {getattr(self, name)!r}, expected {expected}")

    @property
    def greedy(self) -> bool:
        """Whether the largest logit decides."""
        return self.temperature == 0

    def stop_ids(self, eos_token_ids: Iterable[int]) -> frozenset[int]:
        """The ids that end this request, given the model's EOS ids."""
        return frozenset(self.stop_token_ids).union(() if self.ignore_eos else eos_token_ids)


def _tuple(values) -> tuple:
    if values is None:
        return ()
    return tuple(values) if isinstance(values, Iterable) else (values,)


def _is_real(value) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_int(value, low: int) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and value >= low


def make_generator(params: SamplingParams, engine_seed: int, index: int) -> torch.Generator | None:
    """The CPU generator of one request; None for a greedy one.

    index: the request's place in its call; requests without a seed differ by it, calls do not.
    """
    if params.greedy:
        return None
    # torch's CPU generator reads 32 bits of its seed; SeedSequence mixes all of ours into them, and
    # keeps (seed 0, index 1) apart from (seed 1, index 0).
    if params.seed is not None:
        sequence = np.random.SeedSequence(params.seed)
    else:
        sequence = np.random.SeedSequence(engine_seed, spawn_key=(index,))
    return torch.Generator().manual_seed(int(sequence.generate_state(1)[0]))


def mask_stop_ids(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    num_new_tokens: Sequence[int],
    eos_token_ids: Iterable[int],
) -> torch.Tensor:
    """Forbid (-inf) the ids that would end a request before its `min_new_tokens`.

    logits: [R, V] float32. num_new_tokens: [R], tokens generated so far.
    Returns [R, V] float32: a copy, or `logits` itself when no request is that young.
    Raises ValueError: a stop id is not below V.
    """
    eos_token_ids = tuple(eos_token_ids)
    vocab_size = logits.shape[1]
    masked = logits
    for r, (request, count) in enumerate(zip(params, num_new_tokens, strict=True)):
        if count >= request.min_new_tokens:
            continue
        ids = sorted(request.stop_ids(eos_token_ids))
        if not ids:
            continue
        if ids[-1] >= vocab_size:
            raise ValueError(
                f"row {r}: stop id {ids[-1]} is not below the vocabulary's {vocab_size}"
            )
        if masked is logits:
            masked = logits.clone()  # [R, V] float32
        masked[r, ids] = -math.inf
    return masked


def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    generators: Sequence[torch.Generator | None],
) -> list[int]:
    """Pick the next token of each request: argmax, or temperature -> top-k -> top-p -> draw.

    logits: [R, V] float32; -inf forbids a token.
    generators: from `make_generator`; each random row advances its own by one draw.
    Returns R token ids; NO_TOKEN for a row that holds NaN or +inf, or forbids every token: its
    generator does not advance.

    Raises ValueError: sizes differ, or a random row has no generator.
    """
    if logits.ndim != 2 or not len(logits) == len(params) == len(generators):
        raise ValueError(
            f"got logits {tuple(logits.shape)}, {len(params)} params and {len(generators)} "
            "generators, expected [R, V], R and R"
        )
    # max passes NaN on, so that one number per row tells all three faults. One copy from the device
    # brings both numbers, float64 holds any token id.
    peaks, tokens = logits.max(dim=-1)  # torch returns the first of equal values
    peaks, tokens = torch.stack([peaks.double(), tokens.double()]).tolist()
    tokens = [int(t) if math.isfinite(p) else NO_TOKEN for p, t in zip(peaks, tokens, strict=True)]
    random = [r for r, p in enumerate(params) if not p.greedy and tokens[r] != NO_TOKEN]
    for r in random:
        if generators[r] is None:
            raise ValueError(f"row {r}: temperature {params[r].temperature} needs a generator")
    if random:
        drawn = _draw(logits[random], [params[r] for r in random], [generators[r] for r in random])
        for r, token in zip(random, drawn, strict=True):
            tokens[r] = token
    return tokens


def _draw(
    logits: torch.Tensor, params: Sequence[SamplingParams], generators: Sequence[torch.Generator]
) -> list[int]:
    """Draw one token from each row of logits [R, V] float32, on the device where they are."""
    device = logits.device

    def column(values: Iterable[float]) -> torch.Tensor:  # [R, 1] float64
        return torch.tensor(list(values), dtype=torch.float64, device=device)[:, None]

    values, ids = torch.sort(logits, dim=1, descending=True, stable=True)  # [R, V]
    # Below zero and in float64 no temperature overflows to NaN, however small.
    scaled = (values - values[:, :1]).double() / column(p.temperature for p in params)
    rank = torch.arange(logits.shape[1], device=device)
    limit = column(p.top_k if p.top_k > 0 else math.inf for p in params)
    probs = scaled.masked_fill(rank >= limit, -math.inf).softmax(dim=1)  # [R, V] float64
    mass = probs.cumsum(dim=1)
    # A token belongs to the smallest set of mass top_p if those before it have less.
    top_p = column(p.top_p if p.top_p < 1 else math.inf for p in params)
    last = ((mass - probs < top_p) & (probs > 0)).sum(dim=1, keepdim=True) - 1  # [R, 1]
    uniform = column(
        torch.rand((), dtype=torch.float64, generator=generator).item() for generator in generators
    )
    chosen = torch.searchsorted(mass, uniform * mass.gather(1, last), right=True)
    return ids.gather(1, torch.minimum(chosen, last))[:, 0].tolist()
