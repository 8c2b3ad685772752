"""The decoder of Llama, Qwen2 and Qwen3, in the pieces that a decode step is made of.

    hidden = embed(token_ids)
    for each layer:   x, q, records = attention_inputs(layer, hidden, positions)
                      ...         somebody's attention over somebody's records
                      hidden = attention_output(layer, hidden, attn)
    logits(hidden)

Upstream names: weight names are those of the Hugging Face files.
Shapes: rows are tokens [T], of one prompt (prefill) or of R requests (decode): nothing here mixes
rows. The legend is in minihisparse/__init__.py.
Invariants: no method keeps state, synchronises, or writes into its arguments, so that a CUDA graph
can capture it. Operations per layer are few: at T = 1 each costs microseconds, whatever its size.
Cost: the weights once, beside one layer while they are packed; the RoPE table.
Does not know: K and V of other positions, attention, sampling.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minihisparse.model_config import ModelConfig
from minihisparse.rope import apply_rope, rope_table
from minihisparse.weights import EMBEDDING, HEAD, check_weights, drop_tied_head, load_weights


@dataclass(frozen=True)
class Layer:
    """The weights of one layer; projections that read the same input are one matrix."""

    input_norm: Tensor  # [hidden]
    qkv: Tensor  # [(Hq + 2 Hkv) * D, hidden]: rows of q, then k, then v
    qkv_bias: Tensor | None
    qk_norm: Tensor | None  # [Hq + Hkv, D]: q's weight for each q head, k's for each k head
    o: Tensor  # [hidden, Hq * D]
    o_bias: Tensor | None
    post_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden]: rows of gate, then up
    gate_up_bias: Tensor | None
    down: Tensor  # [hidden, intermediate]
    down_bias: Tensor | None


class AttentionInputs(NamedTuple):
    """What one layer's attention, and a selector of positions, can know of T tokens."""

    x: Tensor  # [T, hidden], the layer's input after its norm
    q: Tensor  # [T, Hq, D], rotated
    records: Tensor  # [T, 2 * Hkv * D], K of all KV heads, rotated, then V

    @property
    def k(self) -> Tensor:
        """The records' K, [T, Hkv, D]."""
        return self.records.view(len(self.records), 2, -1, self.q.shape[2])[:, 0]


class Decoder:
    """A model whose attention is left to the caller.

    config, device, dtype: what it was built with. max_model_len: positions below it are valid.
    weight_bytes: bytes of all weights, a tied head counted once.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Tensor],
        *,
        max_model_len: int | None = None,
        kernels: bool | None = None,
    ) -> None:
        """Pack `weights` (Hugging Face names, all of one dtype and device), and empty the dict.

        Each tensor leaves the dict as it is packed: otherwise the model would be in memory twice.
        max_model_len: length of the RoPE table. None: the config's max_position_embeddings.
        kernels: use kernels between the matrix products (simulated on a CPU), or torch; None:
        kernels on a GPU.

        Raises ValueError: weights missing, superfluous, of a wrong shape, or a tied head that
        differs from the embedding.
        """
        found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        check_weights(weight_shapes(config), found, source="weights")
        if config.tie_word_embeddings:
            drop_tied_head(weights, source="weights")
        self.config = config
        self.embedding = weights.pop(EMBEDDING)  # [V, hidden]
        self.head = self.embedding if config.tie_word_embeddings else weights.pop(HEAD)
        self.final_norm = weights.pop("model.norm.weight")
        self.layers = [_pack_layer(config, weights, i) for i in range(config.num_hidden_layers)]
        weights.clear()  # what old files carry beside

        self.device, self.dtype = self.embedding.device, self.embedding.dtype
        self.max_model_len = max_model_len or config.max_position_embeddings
        table = rope_table(config.rope, config.head_dim, self.max_model_len)
        self._rope_table = table.to(self.device, self.dtype)  # [max_model_len, 2, 1, D]
        self._pointwise = None
        if self.device.type == "cuda" if kernels is None else kernels:
            from minihisparse.kernels import pointwise

            self._pointwise = pointwise

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        max_model_len: int | None = None,
        progress: bool = True,
    ) -> Decoder:
        """Load a Hugging Face folder. Raises what `ModelConfig.from_folder`, `load_weights` do."""
        config = ModelConfig.from_folder(folder)
        weights = load_weights(
            folder, weight_shapes(config), device=device, dtype=dtype, progress=progress
        )
        return cls(config, weights, max_model_len=max_model_len)

    @classmethod
    def random(
        cls,
        config: ModelConfig,
        *,
        seed: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        max_model_len: int | None = None,
        drawn_on: torch.device | str = "cpu",
    ) -> Decoder:
        """A model with random weights, the same for a seed whatever the device.

        drawn_on: where the numbers are drawn: a GPU is quick, but draws other ones than a CPU.
        """
        generator = torch.Generator(drawn_on).manual_seed(seed)
        weights = {}
        for name, shape in weight_shapes(config).items():
            noise = torch.randn(shape, generator=generator, device=drawn_on)
            if name.endswith("norm.weight"):
                noise = 1 + 0.1 * noise
            else:  # divided so that a projection keeps the size of its input
                noise = noise / shape[-1] ** 0.5
            weights[name] = noise.to(device, dtype)
        return cls(config, weights, max_model_len=max_model_len)

    @property
    def weight_bytes(self) -> int:
        tensors = [self.embedding, self.final_norm]
        if self.head is not self.embedding:
            tensors.append(self.head)
        for layer in self.layers:
            tensors += [getattr(layer, f) for f in Layer.__annotations__]
        return sum(t.nbytes for t in tensors if t is not None)

    @torch.inference_mode()
    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] int64 -> hidden [T, hidden]. Raises IndexError on a CPU: an id >= V."""
        return F.embedding(token_ids, self.embedding)

    @torch.inference_mode()
    def attention_inputs(self, layer: int, hidden: Tensor, positions: Tensor) -> AttentionInputs:
        """hidden [T, hidden], positions [T] int64 -> x, q and records of these tokens.

        q and records are views with strides of their own: copy them to keep them.
        Raises IndexError on a CPU: a position >= max_model_len.
        """
        c, w = self.config, self.layers[layer]
        n_q, n_kv = c.num_attention_heads, c.num_key_value_heads
        x = self._norm(hidden, w.input_norm)
        qkv = _linear(x, w.qkv, w.qkv_bias).view(-1, n_q + 2 * n_kv, c.head_dim)
        if self._pointwise:
            table, eps = self._rope_table, c.rms_norm_eps
            self._pointwise.rope(qkv, positions, table, n_kv, w.qk_norm, eps)
            return AttentionInputs(x, qkv[:, :n_q], qkv[:, n_q:].flatten(1))
        qk, v = qkv.split([n_q + n_kv, n_kv], dim=1)
        if w.qk_norm is not None:
            qk = F.rms_norm(qk, (c.head_dim,), None, c.rms_norm_eps) * w.qk_norm
        cos, sin = self._rope_table.index_select(0, positions).unbind(1)  # [T, 1, D] each
        q, k = apply_rope(qk, cos, sin).split([n_q, n_kv], dim=1)
        return AttentionInputs(x, q, torch.cat([k, v], dim=1).flatten(1))

    @torch.inference_mode()
    def attention_output(self, layer: int, hidden: Tensor, attn: Tensor) -> Tensor:
        """hidden [T, hidden] as given to `attention_inputs`, attn [T, Hq, D] -> [T, hidden], new.

        The output projection and the MLP, each added to the residual stream.
        """
        w = self.layers[layer]
        attn = _linear(attn.flatten(1), w.o, w.o_bias)
        if self._pointwise:
            x = torch.empty_like(attn)
            self._pointwise.add_rms_norm(attn, hidden, w.post_norm, self.config.rms_norm_eps, x)
            hidden, gate_up = attn, _linear(x, w.gate_up, w.gate_up_bias)  # attn += hidden
            x = gate_up.new_empty(len(x), gate_up.shape[1] // 2)
            self._pointwise.silu_mul(gate_up, x)
        else:
            hidden = hidden + attn
            x = self._norm(hidden, w.post_norm)
            gate, up = _linear(x, w.gate_up, w.gate_up_bias).chunk(2, dim=-1)
            x = F.silu(gate) * up
        return hidden + _linear(x, w.down, w.down_bias)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [T, hidden] after the last layer -> logits [T, V] float32."""
        return _linear(self._norm(hidden, self.final_norm), self.head).float()

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        if self._pointwise:
            out = torch.empty_like(x)
            self._pointwise.add_rms_norm(x, None, weight, self.config.rms_norm_eps, out)
            return out
        return F.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear: x [T, in], weight [out, in] -> [T, out], contiguous.

    Up to four fp32 rows on a CPU go through bmm, with the weight as two halves: MKL is faster so.
    All layers' products of SmolLM2-135M, two EPYC cores, torch 2.13: at T = 1 12 ms, F.linear 34;
    at T = 4 20 ms, F.linear 45. With more rows, or in bf16, there is no such gain.
    """
    (tokens, n_in), n_out = x.shape, weight.shape[0]
    if tokens > 4 or n_out % 2 or x.dtype != torch.float32 or x.device.type != "cpu":
        return F.linear(x, weight, bias)
    halves = torch.bmm(weight.view(2, -1, n_in), x.t().expand(2, -1, -1))  # [2, out / 2, T]
    y = halves.view(n_out, tokens).t().contiguous()
    return y if bias is None else y + bias


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every weight a model of this config has."""
    hidden, inner, d = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.num_attention_heads * d, config.num_key_value_heads * d
    projections = {  # name -> rows, columns, has a bias
        "self_attn.q_proj": (q_rows, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv_rows, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv_rows, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q_rows, config.o_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.qk_norm:
        norms |= {"self_attn.q_norm": d, "self_attn.k_norm": d}

    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for i in range(config.num_hidden_layers):
        prefix = f"model.layers.{i}."
        for name, size in norms.items():
            shapes[f"{prefix}{name}.weight"] = (size,)
        for name, (rows, columns, has_bias) in projections.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    return shapes


def _pack_layer(config: ModelConfig, weights: dict[str, Tensor], layer: int) -> Layer:
    """Take one layer's tensors out of `weights`."""

    def take(*names: str, kind: str = "weight") -> Tensor | None:
        tensors = [weights.pop(f"model.layers.{layer}.{name}.{kind}", None) for name in names]
        if tensors[0] is None:  # an optional one; check_weights has seen to the rest
            return None
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    qkv = [f"self_attn.{x}_proj" for x in "qkv"]
    gate_up = ["mlp.gate_proj", "mlp.up_proj"]
    qk_norm = None
    if config.qk_norm:
        q_norm, k_norm = take("self_attn.q_norm"), take("self_attn.k_norm")
        qk_norm = torch.cat(
            [
                q_norm.expand(config.num_attention_heads, -1),
                k_norm.expand(config.num_key_value_heads, -1),
            ]
        )
    return Layer(
        input_norm=take("input_layernorm"),
        qkv=take(*qkv),
        qkv_bias=take(*qkv, kind="bias"),
        qk_norm=qk_norm,
        o=take("self_attn.o_proj"),
        o_bias=take("self_attn.o_proj", kind="bias"),
        post_norm=take("post_attention_layernorm"),
        gate_up=take(*gate_up),
        gate_up_bias=take(*gate_up, kind="bias"),
        down=take("mlp.down_proj"),
        down_bias=take("mlp.down_proj", kind="bias"),
    )
