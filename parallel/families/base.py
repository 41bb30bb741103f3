"""The language in which a family file declares its parameters, each with its place in every layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from parallel.errors import UserError
from parallel.model_config import MLA, ModelConfig

Kind = Literal["vocabulary", "replicated", "column", "row", "qkv", "gate_up"]
Stage = Literal["embedding", "layer", "final", "head"]
Layers = Literal["all", "dense", "moe"]
Ingredients = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Parameter:
    """One fused parameter and the canonical tensors it is made of.

    `kind` says how it is cut over tensor-parallel ranks and how its ingredients are fused:

    - vocabulary: rows, padded to a multiple (Megatron: divisor x tp, engine: tp)
    - replicated: the same on every rank
    - column: rows (dim 0) / row: columns (dim 1)
    - qkv: three ingredients. Megatron interleaves by query group (its query heads, its key head, its value head);
      the engine concatenates its own q, k and v rows and repeats key/value heads where tp exceeds them
    - gate_up: two ingredients; every rank holds its gate rows above its up rows

    `hf` maps canonical name templates (with `{layer}` and, of an expert's parameter, `{expert}`) to full shapes. `mcore` is
    the name below a GPTModel built from the local spec, `mcore_te` (and `te_kind`) from the Transformer Engine spec where
    that differs. `trtllm` is the name in the PyTorch backend; parameters of one name are stacked there, row below row.

    An `expert` parameter exists once for every expert: experts are cut over ep, and inside over etp instead of tp. Megatron
    keeps one tensor per expert, numbered from 0 on every rank; TensorRT-LLM stacks a rank's experts on a leading dimension,
    with up above gate. `layers` says which decoder layers have the parameter. `dtype` keeps it in that type in all layouts.
    `fused` is the name under which HF files may hold all experts in one tensor: see `layouts.hf`.
    """

    kind: Kind
    stage: Stage
    hf: Ingredients
    mcore: str
    trtllm: str
    mcore_te: str | None = None
    te_kind: Kind | None = None
    layers: Layers = "all"
    expert: bool = False
    dtype: str | None = None
    fused: str | None = None


@dataclass(frozen=True)
class Family:
    """A model architecture. `name` is the HF `model_type`.

    `read` turns config.json into ModelConfig fields that are particular to the family. `fused_experts`: how HF files of the
    family hold experts: "split" (one tensor each), or "transposed" ([experts, in, out], gate and up columns interleaved).
    `defaults` are values of keys that config.json may lack, where transformers' configuration class has other ones than ours.
    """

    name: str
    architecture: str
    read: Callable[[dict[str, Any]], dict[str, Any]]
    parameters: Callable[[ModelConfig], tuple[Parameter, ...]]
    fused_experts: Literal["split", "transposed"] = "split"
    defaults: dict[str, Any] = field(default_factory=dict)


HF, MC = "model.layers.{layer}.", "decoder.layers.{layer}."


def replicated(name: str, shape: tuple[int, ...], mcore: str, mcore_te: str | None = None, **more: Any) -> Parameter:
    """A parameter of a layer that every rank holds, under the same name in HF files and the engine."""
    return Parameter("replicated", "layer", ((HF + name, shape),), MC + mcore, HF + name, MC + mcore_te if mcore_te else None, **more)


def grouped_query_attention(c: ModelConfig) -> tuple[Parameter, ...]:
    """q, k, v fused, o; with their biases, qk-norms and sinks where the model has them."""
    h, d = c.hidden_size, c.head_dim
    rows = tuple((f"{HF}self_attn.{x}_proj", n) for x, n in (("q", c.q_size), ("k", c.kv_size), ("v", c.kv_size)))
    out = [replicated("input_layernorm.weight", (h,), "input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
           Parameter("qkv", "layer", tuple((n + ".weight", (r, h)) for n, r in rows), MC + "self_attention.linear_qkv.weight",
                     HF + "self_attn.qkv_proj.weight"),
           Parameter("row", "layer", ((HF + "self_attn.o_proj.weight", (h, c.q_size)),), MC + "self_attention.linear_proj.weight",
                     HF + "self_attn.o_proj.weight")]
    if c.qkv_bias:
        out.append(Parameter("qkv", "layer", tuple((n + ".bias", (r,)) for n, r in rows), MC + "self_attention.linear_qkv.bias",
                             HF + "self_attn.qkv_proj.bias"))
    if c.o_bias:
        out.append(replicated("self_attn.o_proj.bias", (h,), "self_attention.linear_proj.bias"))
    if c.qk_norm:
        out += [replicated(f"self_attn.{x}_norm.weight", (d,), f"self_attention.{x}_layernorm.weight") for x in "qk"]
    if c.sinks:
        out.append(Parameter("column", "layer", ((HF + "self_attn.sinks", (c.num_heads,)),),
                             MC + "self_attention.core_attention.softmax_offset", HF + "self_attn.sinks"))
    return tuple(out)


def latent_attention(c: ModelConfig) -> tuple[Parameter, ...]:
    """Multi-head latent attention. Megatron's local spec cuts the down-projections over tp, Transformer Engine's does not."""
    assert c.mla is not None
    h, m, heads = c.hidden_size, c.mla, c.num_heads
    q = heads * (m.qk_nope_head_dim + m.qk_rope_head_dim)

    def cut(kind: str, name: str, shape: tuple[int, int], mcore: str, trtllm: str | None = None, te_kind: Any = None) -> Parameter:
        return Parameter(kind, "layer", ((f"{HF}self_attn.{name}.weight", shape),), f"{MC}self_attention.{mcore}.weight",  # type: ignore[arg-type]
                         f"{HF}self_attn.{trtllm or name}.weight", te_kind=te_kind)

    out = [replicated("input_layernorm.weight", (h,), "input_layernorm.weight")]
    if m.q_lora_rank is None:
        out.append(cut("column", "q_proj", (q, h), "linear_q_proj"))
    else:
        # the engine runs both down-projections as one product: two parameters of one name are stacked
        out += [cut("column", "q_a_proj", (m.q_lora_rank, h), "linear_q_down_proj", "kv_a_proj_with_mqa", "replicated"),
                replicated("self_attn.q_a_layernorm.weight", (m.q_lora_rank,), "self_attention.q_layernorm.weight",
                           "self_attention.linear_q_up_proj.layer_norm_weight"),
                cut("column", "q_b_proj", (q, m.q_lora_rank), "linear_q_up_proj")]
    out += [cut("column", "kv_a_proj_with_mqa", (m.kv_lora_rank + m.qk_rope_head_dim, h), "linear_kv_down_proj", te_kind="replicated"),
            replicated("self_attn.kv_a_layernorm.weight", (m.kv_lora_rank,), "self_attention.kv_layernorm.weight",
                       "self_attention.linear_kv_up_proj.layer_norm_weight"),
            cut("column", "kv_b_proj", (heads * (m.qk_nope_head_dim + m.v_head_dim), m.kv_lora_rank), "linear_kv_up_proj"),
            cut("row", "o_proj", (h, heads * m.v_head_dim), "linear_proj")]
    return tuple(out)


def dense_mlp(c: ModelConfig) -> tuple[Parameter, ...]:
    """SwiGLU of the layers without experts."""
    if c.moe is not None and len(c.moe.layers) == c.num_layers:
        return ()
    out = [replicated("post_attention_layernorm.weight", (c.hidden_size,), "pre_mlp_layernorm.weight",
                      "mlp.linear_fc1.layer_norm_weight", layers="dense")]
    return (*out, *_swiglu("mlp", "mlp", c.intermediate_size, c.hidden_size, "dense"))


def _swiglu(hf: str, mcore: str, f: int, h: int, layers: Layers) -> tuple[Parameter, ...]:
    gate_up = tuple((f"{HF}{hf}.{x}_proj.weight", (f, h)) for x in ("gate", "up"))
    return (Parameter("gate_up", "layer", gate_up, f"{MC}{mcore}.linear_fc1.weight", f"{HF}{hf}.gate_up_proj.weight", layers=layers),
            Parameter("row", "layer", ((f"{HF}{hf}.down_proj.weight", (h, f)),), f"{MC}{mcore}.linear_fc2.weight",
                      f"{HF}{hf}.down_proj.weight", layers=layers))


def experts(c: ModelConfig, block: str = "mlp", names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
            router: str = "gate", shared: str = "shared_experts") -> tuple[Parameter, ...]:
    """Router, routed experts and shared experts of the MoE layers. `block`, `names`, `router`, `shared` are HF's words."""
    assert c.moe is not None
    m, h = c.moe, c.hidden_size
    gate, up, down = (f"{HF}{block}.experts.{{expert}}.{x}" for x in names)
    out = [replicated("post_attention_layernorm.weight", (h,), "pre_mlp_layernorm.weight", layers="moe"),
           replicated(f"{block}.{router}.weight", (m.num_experts, h), "mlp.router.weight", layers="moe")]
    if m.router_bias:
        out.append(replicated(f"{block}.{router}.bias", (m.num_experts,), "mlp.router.bias", layers="moe"))
    if m.correction_bias:
        out.append(replicated(f"{block}.{router}.e_score_correction_bias", (m.num_experts,), "mlp.router.expert_bias", layers="moe",
                              dtype="float32"))
    f = m.intermediate_size
    for kind, suffix, wide, narrow in (("weight", ".weight", (f, h), (h, f)), ("bias", ".bias", (f,), (h,))):
        if kind == "bias" and not m.expert_bias:
            continue
        tail = "_bias" if kind == "bias" else ""
        local, grouped = f"{MC}mlp.experts.local_experts.{{expert}}.", f"{MC}mlp.experts."
        out += [Parameter("gate_up", "layer", ((gate + suffix, wide), (up + suffix, wide)), f"{local}linear_fc1.{kind}",
                          f"{HF}{block}.experts.w3_w1_{kind}", f"{grouped}linear_fc1.{kind}{{expert}}", None, "moe", True, None,
                          f"{HF}mlp.experts.gate_up_proj{tail}"),
                Parameter("row" if kind == "weight" else "replicated", "layer", ((down + suffix, narrow),), f"{local}linear_fc2.{kind}",
                          f"{HF}{block}.experts.w2_{kind}", f"{grouped}linear_fc2.{kind}{{expert}}", None, "moe", True, None,
                          f"{HF}mlp.experts.down_proj{tail}")]
    if m.shared_intermediate_size:
        out += _swiglu(f"{block}.{shared}", "mlp.shared_experts", m.shared_intermediate_size, h, "moe")
    if m.shared_gate:
        out.append(replicated(f"{block}.{shared}_gate.weight", (1, h), "mlp.shared_experts.gate_weight", layers="moe"))
    return tuple(out)


def decoder(c: ModelConfig, *layer: tuple[Parameter, ...]) -> tuple[Parameter, ...]:
    """A whole model: embedding, the given parts of its layers, final norm, and a head where it is not tied; `score.weight` is a value head."""
    h, v = c.hidden_size, c.vocab_size
    out = [Parameter("vocabulary", "embedding", (("model.embed_tokens.weight", (v, h)),), "embedding.word_embeddings.weight",
                     "model.embed_tokens.weight"), *(p for part in layer for p in part),
           Parameter("replicated", "final", (("model.norm.weight", (h,)),), "decoder.final_layernorm.weight", "model.norm.weight")]
    if c.head == "value":
        out.append(Parameter("replicated", "head", (("score.weight", (1, h)),), "output_layer.weight", "score.weight"))
    elif not c.tied:
        out.append(Parameter("vocabulary", "head", (("lm_head.weight", (v, h)),), "output_layer.weight", "lm_head.weight"))
    return tuple(out)


def dense_decoder(c: ModelConfig) -> tuple[Parameter, ...]:
    """The pre-norm decoder that `llama` and its relatives share: RMSNorm, grouped-query attention, SwiGLU."""
    return decoder(c, grouped_query_attention(c), dense_mlp(c))


def window(hf: dict[str, Any], layers: Iterable[int] | None = None) -> dict[str, Any]:
    """A sliding window in the given layers (None: in all), where config.json gives one."""
    if not hf.get("sliding_window"):
        return {}
    return {"sliding_window": int(hf["sliding_window"]), "windowed_layers": tuple(range(int(hf["num_hidden_layers"])) if layers is None else layers)}


def layers_of_type(hf: dict[str, Any], default: Callable[[int], bool]) -> list[int]:
    """Layers with a window: those that `layer_types` names where config.json has it, else those of `default`."""
    kinds = hf.get("layer_types")
    return [i for i in range(int(hf["num_hidden_layers"])) if (kinds[i] == "sliding_attention" if kinds else default(i))]


def qwen_window(hf: dict[str, Any]) -> dict[str, Any]:
    """Qwen configs carry a window size that only counts where `use_sliding_window` is true, and from layer `max_window_layers` on."""
    first = int(hf.get("max_window_layers", 28))
    return window(hf, layers_of_type(hf, lambda i: i >= first)) if hf.get("use_sliding_window") else {}


def qwen_moe_layers(hf: dict[str, Any]) -> tuple[int, ...]:
    """Every `decoder_sparse_step`-th layer has experts, those of `mlp_only_layers` aside."""
    step, dense = int(hf.get("decoder_sparse_step", 1)), hf.get("mlp_only_layers") or []
    return tuple(i for i in range(int(hf["num_hidden_layers"])) if (i + 1) % step == 0 and i not in dense)


def deepseek_layers(hf: dict[str, Any]) -> tuple[int, ...]:
    """All layers but the first `first_k_dense_replace` have experts."""
    if int(hf.get("moe_layer_freq", 1)) != 1:
        raise UserError(f"model config.json ({hf['model_type']}): moe_layer_freq {hf['moe_layer_freq']} is not supported; it must be 1")
    return tuple(range(int(hf.get("first_k_dense_replace", 0)), int(hf["num_hidden_layers"])))


def latent_sizes(hf: dict[str, Any]) -> dict[str, Any]:
    """MLA sizes; head_dim is that of a query (rotated and unrotated part together)."""
    rank = hf.get("q_lora_rank")
    mla = MLA(int(rank) if rank else None, int(hf["kv_lora_rank"]), int(hf["qk_nope_head_dim"]), int(hf["qk_rope_head_dim"]),
              int(hf["v_head_dim"]))
    refuse_attention_bias(hf)
    if not hf.get("rope_interleave", True):
        raise UserError(f"model config.json ({hf['model_type']}): rope_interleave false is not supported; rotated pairs lie side by side")
    return {"mla": mla, "head_dim": mla.qk_nope_head_dim + mla.qk_rope_head_dim, "num_kv_heads": int(hf["num_attention_heads"])}


def refuse_attention_bias(hf: dict[str, Any]) -> None:
    if hf.get("attention_bias"):
        raise UserError(f"model config.json ({hf['model_type']}): attention_bias true is not supported; it must be false")
