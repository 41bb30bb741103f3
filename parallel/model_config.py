"""The architecture of a model, read from a Hugging Face `config.json`."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from parallel.errors import UserError
from parallel.hf_values import check_values, read_config
from parallel.quantization import read_quantization

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RopeScaling:
    """Llama-3 frequency scaling of rotary embeddings (transformers `rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class Yarn:
    """YaRN scaling of rotary embeddings (arXiv 2309.00071; transformers `rope_type: yarn`). `attention_factor` overrides `mscale`."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    attention_factor: float | None = None


@dataclass(frozen=True)
class MoE:
    """The expert layers of a model. `layers` are the indices of the decoder layers that have experts.

    A token goes to its `top_k` experts by `score` ("softmax" over all experts or "sigmoid" of each); `correction_bias` (fp32)
    is added for the choice only. With `normalize` the chosen weights are divided by their sum; then they are multiplied by
    `scaling`. With `groups`, experts are chosen among the best `top_groups` groups only. `shared_intermediate_size` is that of
    all shared experts together (0: none), `shared_gate` puts a sigmoid gate on their output.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    layers: tuple[int, ...]
    score: str = "softmax"
    normalize: bool = True
    scaling: float = 1.0
    groups: int | None = None
    top_groups: int | None = None
    correction_bias: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    shared_intermediate_size: int = 0
    shared_gate: bool = False


@dataclass(frozen=True)
class MLA:
    """Multi-head latent attention (arXiv 2405.04434): ranks of the compressed query (None: not compressed) and key/value."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches that all layouts, Megatron-Core and the engine derive from.

    `sliding_window` is the number of keys a position sees, itself included, in the `windowed_layers`; all other layers see
    everything before them. `sinks`: attention has one more, learned, score per head (gpt_oss). `swiglu_limit`: the clamped
    SwiGLU of gpt_oss. `rotary_fraction`: the part of head_dim that is rotated. `head`: what the last layer's states are turned into, log-probs of
    tokens (lm) or one value (value: a critic or reward model). `hf` keeps the source `config.json` as read.
    """

    family: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    head: Literal["lm", "value"] = "lm"
    tied: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    sliding_window: int | None = None
    windowed_layers: tuple[int, ...] = ()
    swiglu_limit: float | None = None
    moe: MoE | None = None
    mla: MLA | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | Yarn | None = None
    rotary_fraction: float = 1.0
    init_std: float = 0.02
    dtype: str = "float32"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    make_vocab_size_divisible_by: int = 128
    hf: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size"):
            if getattr(self, name) < 1:
                raise UserError(f"model: {name} is {getattr(self, name)}; it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise UserError(f"model: num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads {self.num_kv_heads}")
        if self.moe is not None and not 1 <= self.moe.top_k <= self.moe.num_experts:
            raise UserError(f"model: {self.moe.top_k} experts per token of {self.moe.num_experts}; it must be between 1 and their number")
        if self.moe is not None and self.moe.groups and self.moe.num_experts % self.moe.groups:
            raise UserError(f"model: {self.moe.num_experts} experts do not divide into n_group {self.moe.groups}")

    @property
    def q_size(self) -> int:
        """Rows of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def moe_layers(self) -> frozenset[int]:
        """Indices of the decoder layers that have experts."""
        return frozenset(self.moe.layers if self.moe else ())

    @property
    def kv_size(self) -> int:
        """Rows of the key (and of the value) projection."""
        return self.num_kv_heads * self.head_dim

    def padded_vocab_size(self, tp: int) -> int:
        """Vocabulary rows that Megatron-Core holds over `tp` ranks (a multiple of divisor x tp)."""
        multiple = self.make_vocab_size_divisible_by * tp
        return -(-self.vocab_size // multiple) * multiple

    def with_options(self, **changes: Any) -> ModelConfig:
        return replace(self, **changes)

    def with_value_head(self) -> ModelConfig:
        """The same layers under a head of one value."""
        return self if self.head == "value" else replace(self, head="value", tied=False)

    @classmethod
    def from_directory(cls, directory: str | Path, **changes: Any) -> ModelConfig:
        """Read `directory/config.json`. Raises UserError where the directory, file or family cannot be used."""
        path = Path(directory)
        if not path.is_dir():
            raise UserError(f"model directory {str(directory)!r} does not exist; give a directory with config.json and *.safetensors")
        if not (path / "config.json").is_file():
            raise UserError(f"model directory {str(directory)!r} has no config.json; give a Hugging Face model directory")
        data = read_config(path / "config.json")
        return cls.from_hf(data, **changes)

    @classmethod
    def from_hf(cls, hf: dict[str, Any], **changes: Any) -> ModelConfig:
        """Build from a config dictionary. Raises UserError for a family or an option that is not supported, or a value of a wrong kind."""
        from parallel.families import family_of  # families read this module's types

        family = family_of(hf)
        check_values(hf)
        try:
            return cls._from_checked(hf, family, changes)
        except (TypeError, ValueError, AttributeError, ArithmeticError, KeyError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"model config.json ({family.name}) has a value that cannot be used: {type(error).__name__}: {error}") from None

    @classmethod
    def _from_checked(cls, hf: dict[str, Any], family: Any, changes: dict[str, Any]) -> ModelConfig:
        source, hf = hf, {**family.defaults, **hf}
        try:
            hidden, heads = int(hf["hidden_size"]), int(hf["num_attention_heads"])
            values: dict[str, Any] = dict(
                family=family.name, hidden_size=hidden, num_heads=heads,
                intermediate_size=int(hf["intermediate_size"]), num_layers=int(hf["num_hidden_layers"]),
                num_kv_heads=int(hf.get("num_key_value_heads") or heads),
                head_dim=int(hf.get("head_dim") or hidden // heads), vocab_size=int(hf["vocab_size"]),
            )
        except KeyError as error:
            raise UserError(f"model config.json ({family.name}) lacks the key {error}") from None
        theta, scaling = _rope(hf, source)
        eos = hf.get("eos_token_id")
        scores = any(str(name).endswith("ForSequenceClassification") for name in hf.get("architectures") or ())
        values.update(
            max_position_embeddings=int(hf.get("max_position_embeddings") or 2048),
            head="value" if scores else "lm", tied=bool(hf.get("tie_word_embeddings", False)) and not scores,
            rms_norm_eps=float(hf.get("rms_norm_eps", 1e-6)), rope_theta=theta, rope_scaling=scaling,
            init_std=float(hf.get("initializer_range") or 0.02),
            dtype=str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch."),
            bos_token_id=hf.get("bos_token_id"),
            eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),), hf=dict(source),
        )
        _refuse_unsupported(hf, family.name)
        values.update(family.read(hf))
        values.update(changes)
        return cls(**values)


def _rope(hf: dict[str, Any], source: dict[str, Any]) -> tuple[float, RopeScaling | Yarn | None]:
    """Rotary base and scaling, from either place: transformers 5 `rope_parameters` or the older top-level keys."""
    parameters = hf.get("rope_parameters") or {}
    old = source.get("rope_theta")
    new = parameters.get("rope_theta")
    if old is not None and new is not None and float(old) != float(new):
        raise UserError(f"model config.json gives two rotary bases: rope_theta {old} and rope_parameters.rope_theta {new}; keep one")
    if old is None and new is None:
        old = hf.get("rope_theta", 10000.0)
        logger.warning("model config.json gives no rope_theta; using the transformers default %s", old)
    theta = float(new if new is not None else old)
    scaling = parameters if parameters.get("rope_type", "default") != "default" else (source if parameters else hf).get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind == "yarn":
        return theta, _yarn(scaling, hf.get("max_position_embeddings"))
    if kind != "llama3":
        raise UserError(f"model config.json: rope scaling {kind!r} is not supported; supported: default, llama3, yarn")
    return theta, RopeScaling(float(scaling["factor"]), float(scaling["low_freq_factor"]),
                              float(scaling["high_freq_factor"]), int(scaling["original_max_position_embeddings"]))


def _yarn(scaling: dict[str, Any], max_positions: Any) -> Yarn:
    if "original_max_position_embeddings" not in scaling:
        raise UserError("model config.json: rope scaling yarn lacks original_max_position_embeddings")
    original = int(scaling["original_max_position_embeddings"])
    factor = scaling.get("factor") or int(max_positions or original) / original
    numbers = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor")
    optional: dict[str, Any] = {key: float(scaling[key]) for key in numbers if scaling.get(key) is not None}
    return Yarn(float(factor), original, truncate=bool(scaling.get("truncate", True)), **optional)


def _refuse_unsupported(hf: dict[str, Any], family: str) -> None:
    """Options that would change the computation and are not built are refused by name."""
    if hf.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UserError(f"model config.json ({family}): hidden_act {hf['hidden_act']!r} is not supported; supported: silu")
    if hf.get("mlp_bias"):
        raise UserError(f"model config.json ({family}): mlp_bias true is not supported")
    partial = (hf.get("rope_parameters") or {}).get("partial_rotary_factor", hf.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0) and family != "glm4_moe":
        raise UserError(f"model config.json ({family}): partial_rotary_factor {partial} is not supported; all of a head is rotated")
    read_quantization(hf)
    if hf.get("pretraining_tp", 1) not in (1, None):
        raise UserError(f"model config.json ({family}): pretraining_tp {hf['pretraining_tp']} is not supported; it must be 1")
