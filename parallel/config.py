"""Where the parallel sizes of a role meet: one frozen object that validates itself against world and model."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from parallel.errors import UserError
from parallel.model_config import ModelConfig


@dataclass(frozen=True)
class Coordinates:
    """Where one rank stands in the dense grid (Megatron-Core's order: tp fastest, then cp, dp, pp)."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True)
class ExpertCoordinates:
    """Where one rank stands in the expert grid (Megatron-Core's order: etp fastest, then ep, expert data parallel, pp)."""

    etp: int
    ep: int
    dp: int
    pp: int


@dataclass(frozen=True)
class ParallelConfig:
    """Parallel sizes of one role. The data-parallel size is what is left of the world."""

    tp: int = field(default=1, metadata={"help": "tensor-parallel size: heads and feed-forward rows are cut over it"})
    pp: int = field(default=1, metadata={"help": "pipeline-parallel size: layers are cut into this many stages"})
    vpp: int | None = field(default=None, metadata={"help": "virtual pipeline: model chunks per stage (needs pp > 1)"})
    cp: int = field(default=1, metadata={"help": "context-parallel size: sequences are cut over it"})
    ep: int = field(default=1, metadata={"help": "expert-parallel size (MoE models)"})
    etp: int | None = field(default=None, metadata={"help": "tensor-parallel size of experts; unset: the same as tp"})
    first_stage_layers: int | None = field(default=None, metadata={"help": "decoder layers of the first pipeline stage; the rest is split evenly"})
    last_stage_layers: int | None = field(default=None, metadata={"help": "decoder layers of the last pipeline stage; the rest is split evenly"})
    pipeline_layout: str | None = field(default=None, metadata={"help": "Megatron's stage layout, e.g. \"Et*3|tt|ttL\": stages (times vpp) between |, E embedding, t layer, L loss"})
    sequence_parallel: bool = field(default=False, metadata={"help": "cut norms and dropout along the sequence over tp (needs tp > 1; experts and latent attention with tp > 1 need it)"})

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "cp", "ep", "vpp", "etp", "first_stage_layers", "last_stage_layers"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise UserError(f"parallel.{name} is {value!r}; it must be a whole number of at least 1")
        if self.vpp is not None and self.vpp > 1 and self.pp == 1:
            raise UserError(f"parallel.vpp is {self.vpp} with pp 1; virtual pipeline chunks need pp of at least 2")
        uneven = [n for n in ("first_stage_layers", "last_stage_layers") if getattr(self, n) is not None]
        if uneven and (self.pp == 1 or self.chunks > 1 or self.pipeline_layout):
            raise UserError(f"parallel.{uneven[0]} needs pp > 1 without vpp and without pipeline_layout (pp is {self.pp}, vpp {self.vpp}); "
                            "use pipeline_layout alone for virtual chunks")
        if self.pipeline_layout is not None:
            _stages(self)
        if self.sequence_parallel and self.tp == 1:
            raise UserError("parallel.sequence_parallel is true with tp 1; it cuts over tensor-parallel ranks: set tp > 1 or turn it off")

    @property
    def chunks(self) -> int:
        """Model chunks on each pipeline stage."""
        return self.vpp or 1

    def dp(self, world_size: int) -> int:
        """Data-parallel size in a world of `world_size` ranks."""
        return world_size // (self.tp * self.pp * self.cp)

    def coordinates(self, rank: int, world_size: int) -> Coordinates:
        dp = self.dp(world_size)
        tp, rest = rank % self.tp, rank // self.tp
        cp, rest = rest % self.cp, rest // self.cp
        return Coordinates(tp, cp, rest % dp, rest // dp)

    def rank_of(self, at: Coordinates, world_size: int) -> int:
        return at.tp + self.tp * (at.cp + self.cp * (at.dp + self.dp(world_size) * at.pp))

    @property
    def sequence_multiple(self) -> int:
        """Tokens of a packed sequence are padded to a multiple of this: context parallelism cuts it into two chunks per rank."""
        return 2 * self.cp if self.cp > 1 else 1

    @property
    def row_multiple(self) -> int:
        """Tokens of a row are padded to a multiple of this: a context-parallel rank's part is cut once more by sequence parallelism."""
        tp = self.tp if self.sequence_parallel else 1
        return self.cp * math.lcm(2, tp) if self.cp > 1 else tp

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel size of experts."""
        return self.etp or self.tp

    def expert_coordinates(self, rank: int, world_size: int) -> ExpertCoordinates:
        dp = max(1, world_size // (self.expert_tp * self.ep * self.pp))
        etp, rest = rank % self.expert_tp, rank // self.expert_tp
        ep, rest = rest % self.ep, rest // self.ep
        return ExpertCoordinates(etp, ep, rest % dp, rest // dp)

    def layers(self, model: ModelConfig, pp_rank: int, chunk: int = 0) -> range:
        """Global indices of the layers that chunk `chunk` of stage `pp_rank` holds."""
        counts = self.layer_counts(model)
        stage = chunk * self.pp + pp_rank
        start = sum(counts[:stage])
        return range(start, start + counts[stage])

    def layer_counts(self, model: ModelConfig) -> list[int]:
        """Decoder layers of every stage (times chunk), in the order of the model. Raises UserError where they do not add up."""
        if self.pipeline_layout is not None:
            counts = _stages(self)
            if sum(counts) != model.num_layers:
                raise UserError(f"parallel.pipeline_layout {self.pipeline_layout!r} has {sum(counts)} layers (t), the model has {model.num_layers}")
            return counts
        stages = self.pp * self.chunks
        first, last = self.first_stage_layers, self.last_stage_layers
        given = (first or 0) + (last or 0)
        rest = stages - (first is not None) - (last is not None)
        if model.num_layers < given or (rest == 0 and model.num_layers != given) or (rest and (model.num_layers - given) % rest):
            if given:
                raise UserError(f"parallel: {model.num_layers} layers, {first or 'even'} on the first stage and {last or 'even'} on the last, do not "
                                f"split evenly over the {rest} other stages; change first_stage_layers or last_stage_layers")
            fits = [n for n in range(1, model.num_layers + 1) if model.num_layers % n == 0]
            raise UserError(f"parallel: {model.num_layers} layers do not split evenly over pp {self.pp} x vpp {self.chunks} = {stages}; pp x vpp may "
                            f"be {', '.join(map(str, fits[:12]))}, or set first_stage_layers, last_stage_layers or pipeline_layout")
        even = (model.num_layers - given) // rest if rest else 0
        counts = [even] * stages
        if first is not None:
            counts[0] = first
        if last is not None:
            counts[-1] = last
        return counts

    def validate(self, world_size: int, model: ModelConfig, role: str = "actor") -> None:
        """Refuse sizes that do not fit, before any process group exists. Raises UserError with all the numbers."""
        self.validate_world(world_size, role)
        self._fit_model(model, role)

    def validate_world(self, world_size: int, role: str = "actor") -> None:
        """The part of `validate` that needs no model."""
        where = f"{role}.parallel"
        for name, size in (("tp", self.tp), ("pp", self.pp), ("cp", self.cp)):
            if size > world_size:
                raise UserError(f"{where}: {name}={size} is larger than the world of {world_size} ranks; start more ranks or lower {name}")
        dense = self.tp * self.pp * self.cp
        if world_size % dense:
            fits = [w for w in (world_size // dense * dense, (world_size // dense + 1) * dense) if w]
            raise UserError(f"{where}: tp {self.tp} x pp {self.pp} x cp {self.cp} = {dense} does not divide the world of {world_size} ranks; "
                            f"start {' or '.join(map(str, fits))} ranks, or choose sizes whose product divides {world_size}")
        etp = self.etp or self.tp
        expert = etp * self.ep * self.pp
        if (self.ep > 1 or self.etp) and world_size % expert:
            default = " (etp is unset and defaults to tp; set etp=1)" if self.etp is None and self.tp > 1 else ""
            raise UserError(f"{where}: etp {etp} x ep {self.ep} x pp {self.pp} = {expert} does not divide the world of {world_size} ranks{default}")

    def _fit_model(self, model: ModelConfig, role: str) -> None:
        where = f"{role}.parallel"
        if model.moe is None and (self.ep > 1 or (self.etp or 1) > 1):
            raise UserError(f"{where}: ep={self.ep}, etp={self.etp}: {model.family} has no experts; set ep=1 and leave etp unset")
        if model.moe is not None and (model.moe.num_experts % self.ep or model.moe.intermediate_size % self.expert_tp):
            raise UserError(f"{where}: ep={self.ep} must divide the {model.moe.num_experts} experts, and etp={self.expert_tp} their "
                            f"intermediate size {model.moe.intermediate_size}")
        if self.tp > 1 and not self.sequence_parallel and (model.mla or model.moe):
            what = "latent attention" if model.mla else "experts"  # Megatron refuses the one and is silently wrong in the other
            raise UserError(f"{where}: {model.family} has {what}: tp={self.tp} needs sequence_parallel; set sequence_parallel=true")
        if model.moe is not None and model.moe.expert_bias and self.expert_tp > 1:
            raise UserError(f"{where}: etp={self.expert_tp}: experts with biases ({model.family}) are not cut over tensor-parallel ranks; set etp=1")
        for name, size in _cut_over_tp(model):
            if size % self.tp:
                raise UserError(f"{where}: tp={self.tp} does not divide {name} {size} of the model; tp may be {_divisors(model)}")
        if model.num_kv_heads % self.tp and self.tp % model.num_kv_heads:
            raise UserError(f"{where}: tp={self.tp} and num_key_value_heads {model.num_kv_heads} do not divide each other; tp may be {_divisors(model)}")
        try:
            self.layer_counts(model)
        except UserError as error:
            raise UserError(str(error).replace("parallel", where, 1)) from None


def _stages(parallel: ParallelConfig) -> list[int]:
    """Decoder layers of every stage of a Megatron layout string, read as Megatron-Core's PipelineParallelLayerLayout reads it.

    Raises UserError for what it cannot mean.
    """
    text = (parallel.pipeline_layout or "").replace(",", "")
    where = f"parallel.pipeline_layout {parallel.pipeline_layout!r}"
    for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(repeated, lambda found: found[1] * int(found[2]), text)
    stages = text.split("|")
    if set(text) - set("EtL|") or text.count("E") != 1 or text.count("L") != 1 or not text.startswith("E") or not text.endswith("L"):
        raise UserError(f"{where} must be stages between |, made of E (embedding, first), t (layer) and L (loss, last), where t*3 and (t|)*3 repeat, "
                        "without spaces")
    if len(stages) != parallel.pp * parallel.chunks:
        raise UserError(f"{where} has {len(stages)} stages; pp {parallel.pp} x vpp {parallel.chunks} = {parallel.pp * parallel.chunks} are needed")
    return [stage.count("t") for stage in stages]


def _cut_over_tp(model: ModelConfig) -> list[tuple[str, int]]:
    """Sizes of config.json that tp must divide."""
    sizes = [("num_attention_heads", model.num_heads)]
    if len(model.moe_layers) < model.num_layers:
        sizes.append(("intermediate_size", model.intermediate_size))
    if model.moe is not None and model.moe.shared_intermediate_size:
        sizes.append(("shared experts' intermediate size", model.moe.shared_intermediate_size))
    if model.mla is not None:  # Megatron's local spec cuts the down-projections too
        m = model.mla
        sizes += [("q_lora_rank", m.q_lora_rank or 0), ("kv_lora_rank + qk_rope_head_dim", m.kv_lora_rank + m.qk_rope_head_dim)]
    return sizes


def _divisors(model: ModelConfig) -> str:
    fits = [n for n in range(1, model.num_heads + 1) if all(size % n == 0 for _, size in _cut_over_tp(model))
            and (model.num_kv_heads % n == 0 or n % model.num_kv_heads == 0)]
    return ", ".join(map(str, fits))
