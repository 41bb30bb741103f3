"""How a role's model is trained, beside its optimizer: what is computed twice to save memory, and how experts are kept in balance."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from parallel.errors import UserError
from parallel.model_config import ModelConfig

Balancing = Literal["none", "seq_aux_loss", "aux_loss", "bias"]
Recompute = Literal["none", "selective", "full"]
RecomputeModule = Literal["core_attn", "mlp", "moe"]


@dataclass(frozen=True)
class MoEOptions:
    """How the load of experts is kept even. Losses are means over the sequences (`aux_loss`: micro-batches) of an update."""

    balancing: Balancing = field(default="none", metadata={"help": (
        "none; seq_aux_loss: a loss on the load within each sequence, the same however work is split; aux_loss: on that within each micro-batch, "
        "whose gradients depend on the split by nature; bias: the router's correction bias moves after every update, without a loss")})
    aux_loss_coefficient: float = field(default=1e-3, metadata={"help": "weight of the loss (for seq_aux_loss and aux_loss)"})
    bias_update_rate: float = field(default=1e-3, metadata={"help": "how far the correction bias moves in an update (for bias)"})
    replay_experts: bool = field(default=False, metadata={"help": (
        "train with the experts that the engine chose for each token (router replay, arXiv 2510.11370), so that rounding cannot send a token to "
        "other experts than the ones it was sampled with; needs the embedded engine")})

    def __post_init__(self) -> None:
        if self.balancing not in get_args(Balancing):
            raise UserError(f"moe.balancing is {self.balancing!r}; allowed: {', '.join(get_args(Balancing))}")
        for name in ("aux_loss_coefficient", "bias_update_rate"):
            if not 0 < getattr(self, name) < 1:
                raise UserError(f"moe.{name} is {getattr(self, name)}; it must be above 0 and below 1")

    @property
    def loss(self) -> bool:
        return self.balancing in ("seq_aux_loss", "aux_loss")


@dataclass(frozen=True)
class TrainingOptions:
    """`recompute`: what the backward pass computes again; `recompute_modules` are the parts of a layer that `selective` does. `fp8`: the
    recipe of FP8 training (`parallel.fp8_recipe`), None: without."""

    recompute: Recompute = "none"
    recompute_modules: tuple[RecomputeModule, ...] = ("core_attn",)
    moe: MoEOptions = MoEOptions()
    fp8: str | None = None

    def __post_init__(self) -> None:
        if self.recompute not in get_args(Recompute):
            raise UserError(f"recompute is {self.recompute!r}; allowed: {', '.join(get_args(Recompute))}")
        unknown = set(self.recompute_modules) - set(get_args(RecomputeModule))
        if unknown or not self.recompute_modules:
            raise UserError(f"recompute_modules is {list(self.recompute_modules)}; choose among {', '.join(get_args(RecomputeModule))}")

    def validate(self, model: ModelConfig, packing: str = "packed", role: str = "actor") -> None:
        """Refuse what does not fit the model or the packing. Raises UserError."""
        if self.recompute == "selective" and "moe" in self.recompute_modules and model.moe is None:
            raise UserError(f"{role}.recompute_modules names moe, but {model.family} has no experts; choose core_attn or mlp")
        if self.recompute == "selective" and "mlp" in self.recompute_modules and len(model.moe_layers) == model.num_layers:
            raise UserError(f"{role}.recompute_modules names mlp, but every layer of the model has experts; choose moe")
        if self.moe.replay_experts and model.moe is None:
            raise UserError(f"{role}.moe.replay_experts is true, but {model.family} has no experts; set it to false")
        if self.moe.replay_experts and packing == "padded":
            raise UserError(f"{role}.moe.replay_experts is true, but {role}.packing is padded, whose rows it does not know; set packing: packed")
        if self.moe.balancing == "none":
            return
        where = f"{role}.moe.balancing is {self.moe.balancing}"
        if model.moe is None:
            raise UserError(f"{where}, but {model.family} has no experts; set it to none")
        if self.moe.balancing == "bias" and not model.moe.correction_bias:
            raise UserError(f"{where}, but routers of {model.family} have no correction bias; use seq_aux_loss")
        if packing == "padded":
            raise UserError(f"{where}, but {role}.packing is padded, where padding would count as load; set packing: packed")
        if packing == "shared_prompt" and self.moe.loss:
            raise UserError(f"{where}, but {role}.packing is shared_prompt, where a prompt belongs to no one sequence; set packing: packed or balancing: bias")

    def megatron(self) -> dict[str, Any]:
        """Megatron's configuration of recomputation. Of experts it only gets what its own checks ask for: see `parallel.balancing`."""
        if self.recompute == "none":
            return {}
        if self.recompute == "full":
            return dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
        return dict(recompute_granularity="selective", recompute_modules=list(self.recompute_modules))
