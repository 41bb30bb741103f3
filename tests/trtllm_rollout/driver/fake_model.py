"""A model as TensorRT-LLM's PyTorch backend holds it on one rank, with its loader: slice rules written down a second time, from upstream's
`modules/linear.py` and `fused_moe`, so that our layouts are not compared with themselves. `reassembled` is the way back."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

Hf = dict[str, Any]


class Shard(torch.nn.Module):
    """One rank's parameters under their upstream names. The final norm is used through a copy that `post_load_weights` makes, so that an
    update that is not finished computes with the old one. `partial`: whether the loader takes some of the tensors at a time."""

    def __init__(self, hf: Hf, tp: int, tp_rank: int, ep: int, dtype: torch.dtype, partial: bool = True, backend: str = "") -> None:
        super().__init__()
        self.hf, self.tp, self.r, self.ep, self.backend = hf, tp, tp_rank, ep, backend
        for name, shape in self._shapes().items():
            torch.manual_seed(len(name))
            self._put(name, torch.nn.Parameter(torch.randn(shape).mul(1e-3).to(dtype), requires_grad=False))
        self.derived: torch.Tensor | None = None
        self.unfinished: set[str] = set()
        self.post_load_weights()
        if not partial:
            self.load_weights = lambda weights: self._load(weights, False)  # as DeepseekV3ForCausalLM: no such parameter
            assert "allow_partial_loading" not in inspect.signature(self.load_weights).parameters

    def load_weights(self, weights: Mapping[str, torch.Tensor], allow_partial_loading: bool = False) -> None:
        self._load(weights, allow_partial_loading)

    def post_load_weights(self) -> None:
        self.derived = self.p("model.norm.weight").clone()

    def p(self, name: str) -> torch.Tensor:
        return self.get_parameter(name)

    def _put(self, name: str, parameter: torch.nn.Parameter) -> None:
        module: torch.nn.Module = self
        *path, last = name.split(".")
        for part in path:
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module._modules[part]  # type: ignore[assignment]
        module.register_parameter(last, parameter)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        c, tp = self.hf, self.tp
        h, v, d = c["hidden_size"], c["vocab_size"], c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
        q, kv = c["num_attention_heads"] * d // tp, max(c["num_key_value_heads"] // tp, 1) * d
        rows = math.ceil(v / tp)
        rows = min(rows, v - self.r * rows)  # the last slice is shorter
        out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (rows, h), "model.norm.weight": (h,)}
        if not c.get("tie_word_embeddings"):
            out["lm_head.weight"] = (rows, h)
        for i in range(c["num_hidden_layers"]):
            at = f"model.layers.{i}."
            out |= {at + "input_layernorm.weight": (h,), at + "post_attention_layernorm.weight": (h,),
                    at + "self_attn.qkv_proj.weight": (q + 2 * kv, h), at + "self_attn.o_proj.weight": (h, q)}
            if c["model_type"] == "qwen2":
                out[at + "self_attn.qkv_proj.bias"] = (q + 2 * kv,)
            if c["model_type"].startswith("qwen3"):
                out |= {at + "self_attn.q_norm.weight": (d,), at + "self_attn.k_norm.weight": (d,)}
            if experts := c.get("num_experts"):
                local, f = experts // self.ep, c["moe_intermediate_size"] // (tp // self.ep)
                out |= {at + "mlp.gate.weight": (experts, h), at + f"mlp.experts.{self.backend}w3_w1_weight": (local, 2 * f, h),
                        at + f"mlp.experts.{self.backend}w2_weight": (local, h, f)}
            else:
                f = c["intermediate_size"] // tp
                out |= {at + "mlp.gate_up_proj.weight": (2 * f, h), at + "mlp.down_proj.weight": (h, f)}
        return out

    def _load(self, weights: Mapping[str, torch.Tensor], partial: bool) -> None:
        """A name that the model does not have is passed over, one that is not sent keeps its value, as upstream does in 1.2."""
        if not partial and (left := {n for n in self._names()} - weights.keys()):
            raise KeyError(f"not a partial load, and {sorted(left)[0]} is missing")
        for name, full in weights.items():
            target = self._target(name, full)
            if target is not None:
                target.copy_(full if target.shape == full.shape and self.tp == 1 else self._slice(name, full, target))

    def _names(self) -> list[str]:
        return hf_names(self.hf)

    def _target(self, name: str, full: torch.Tensor) -> torch.Tensor | None:
        c, at = self.hf, name.rsplit(".", 1)[0].rsplit(".", 1)[0]
        kind = name.split(".")[-1]
        part = name.split(".")[-2]
        if part in ("q_proj", "k_proj", "v_proj"):
            d = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
            q, kv = c["num_attention_heads"] * d // self.tp, max(c["num_key_value_heads"] // self.tp, 1) * d
            start = {"q": 0, "k": q, "v": q + kv}[part[0]]
            return self.p(f"{at}.qkv_proj.{kind}")[start:start + (q if part[0] == "q" else kv)]
        if ".experts." in name:
            layer, rest = name.split(".experts.")
            number, which = int(rest.split(".")[0]), rest.split(".")[1]
            local = c["num_experts"] // self.ep
            if number // local != self.r % self.ep:
                return None
            if which == "down_proj":
                return self.p(f"{layer}.experts.{self.backend}w2_weight")[number % local]
            both = self.p(f"{layer}.experts.{self.backend}w3_w1_weight")[number % local]
            f = both.shape[0] // 2
            return both[:f] if which == "up_proj" else both[f:]  # [w3; w1]
        if part in ("gate_proj", "up_proj"):
            both = self.p(f"{at}.gate_up_proj.{kind}")
            f = both.shape[0] // 2
            return both[:f] if part == "gate_proj" else both[f:]
        return dict(self.named_parameters()).get(name)

    def _slice(self, name: str, full: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        part = name.split(".")[-2]
        expert = ".experts." in name
        size, rank = (self.tp // self.ep, self.r // self.ep) if expert else (self.tp, self.r)
        if part in ("k_proj", "v_proj") and self.hf["num_key_value_heads"] < self.tp:
            rows = target.shape[0]
            first = self.r * self.hf["num_key_value_heads"] // self.tp
            return full[first * rows:(first + 1) * rows]
        if part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"):
            width = math.ceil(full.shape[0] / size)
            return full[rank * width:(rank + 1) * width]
        if part in ("o_proj", "down_proj"):
            width = math.ceil(full.shape[1] / size)
            return full[:, rank * width:(rank + 1) * width]
        return full


def hf_names(hf: Hf) -> list[str]:
    out = ["model.embed_tokens.weight", "model.norm.weight", *([] if hf.get("tie_word_embeddings") else ["lm_head.weight"])]
    for i in range(hf["num_hidden_layers"]):
        at = f"model.layers.{i}."
        out += [at + x + ".weight" for x in ("input_layernorm", "post_attention_layernorm", *(f"self_attn.{y}_proj" for y in "qkvo"))]
        out += [at + f"self_attn.{y}_proj.bias" for y in "qkv"] if hf["model_type"] == "qwen2" else []
        out += [at + f"self_attn.{y}_norm.weight" for y in "qk"] if hf["model_type"].startswith("qwen3") else []
        if experts := hf.get("num_experts"):
            out += [at + "mlp.gate.weight", *(at + f"mlp.experts.{e}.{y}_proj.weight" for e in range(experts) for y in ("gate", "up", "down"))]
        else:
            out += [at + f"mlp.{y}_proj.weight" for y in ("gate", "up", "down")]
    return out


def reassembled(shards: Sequence[Shard]) -> dict[str, torch.Tensor]:
    """The HF tensors that a replica computes with."""
    first, c, tp = shards[0], shards[0].hf, shards[0].tp
    by_rank = sorted(shards, key=lambda s: s.r)
    out = {}
    for name in hf_names(c):
        full: torch.Tensor | None = None
        part = name.split(".")[-2]
        pieces = [(s, t) for s in by_rank if (t := s._target(name, first.p("model.norm.weight"))) is not None]
        if part in ("k_proj", "v_proj") and c["num_key_value_heads"] < tp:
            pieces = pieces[::tp // c["num_key_value_heads"]]
        if ".experts." in name:
            pieces.sort(key=lambda pair: pair[0].r // pair[0].ep)
        if part in ("o_proj", "down_proj"):
            full = torch.cat([t for _, t in pieces], 1)
        elif part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"):
            full = torch.cat([t for _, t in pieces])
        else:
            full = pieces[0][1]
        out[name] = full.clone()
    assert first.derived is not None
    out["model.norm.weight"] = first.derived.clone()
    return out


def transformers_model(hf: Hf, tensors: Mapping[str, torch.Tensor]) -> Any:
    """transformers on these tensors: it stacks experts as [gate; up] and [out, in]."""
    from transformers import AutoConfig, AutoModelForCausalLM

    state = {n: t.float() for n, t in tensors.items() if ".experts." not in n}
    for i in range(hf["num_hidden_layers"] if hf.get("num_experts") else 0):
        at = f"model.layers.{i}.mlp.experts."
        one = [{y: tensors[f"{at}{e}.{y}_proj.weight"].float() for y in ("gate", "up", "down")} for e in range(hf["num_experts"])]
        state[at + "gate_up_proj"] = torch.stack([torch.cat([x["gate"], x["up"]]) for x in one])
        state[at + "down_proj"] = torch.stack([x["down"] for x in one])
    config = AutoConfig.for_model(**{k: v for k, v in hf.items() if k not in ("architectures", "transformers_version", "dtype")})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    if hf.get("tie_word_embeddings"):
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    return model
