"""What Megatron-Core 0.16 runs without a word and gets wrong, refused when a model is built or a schedule is started.

Each check names the fault, the setting and what fits. The product's own settings pass (`transformer_config` chooses them so); the
checks hold whatever builds a configuration, now or later. Measured for this version: a fault that a later one repairs stays refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from parallel.errors import UserError
from parallel.micro_batch import MicroBatch


def _interleaved_with_two_stages(c: Any) -> str | None:
    """With two stages the next and the previous one are the same rank, and batched sends and receives pair the wrong messages."""
    if c.pipeline_model_parallel_size != 2 or (c.virtual_pipeline_model_parallel_size or 1) == 1:
        return None
    if c.batch_p2p_comm:
        return "pp 2 with vpp and batch_p2p_comm: the wrong micro-batches meet and gradients are wrong; set batch_p2p_comm=False, vpp=None or pp of at least 3"
    if c.variable_seq_lengths:
        return ("pp 2 with vpp and variable_seq_lengths: its exchange of shapes is batched whatever batch_p2p_comm says; pad micro-batches to one "
                "shape and set variable_seq_lengths=False")
    return None


def _cut_without_sequence_parallel(c: Any) -> str | None:
    """Latent attention: the norm of the compressed query is summed over tp twice. Experts: Megatron says so itself, in the first training step."""
    if c.tensor_model_parallel_size == 1 or c.sequence_parallel:
        return None
    if getattr(c, "multi_latent_attention", False):
        return "latent attention with tp > 1 and no sequence parallelism: gradients of its norms are summed twice; set sequence_parallel=True or tp=1"
    if c.num_moe_experts:
        return "experts with tp > 1 and no sequence parallelism: it stops in the first training step, after all is built; set sequence_parallel=True or tp=1"
    return None


def _unmarked_parameters(c: Any) -> str | None:
    if c.perform_initialization or c.tensor_model_parallel_size == 1:
        return None
    return "perform_initialization=False with tp > 1: parameters are not marked as cut, and the gradient norm counts one rank's only; leave it on"


def _divided_loss(c: Any) -> str | None:
    """The schedule divides the loss it is given in place, by micro-batches and local token counts."""
    if c.calculate_per_token_loss:
        return None
    return ("calculate_per_token_loss=False: the schedule divides losses by their own micro-batch's tokens, so that they depend on the split "
            "(and divides them in place); set it to True and weigh tokens by global counts")


CHECKS: tuple[Callable[[Any], str | None], ...] = (_interleaved_with_two_stages, _cut_without_sequence_parallel, _unmarked_parameters, _divided_loss)


def refuse_config(config: Any) -> None:
    """Raises UserError for a TransformerConfig that Megatron-Core would train wrongly."""
    problems = [text for check in CHECKS if (text := check(config)) is not None]
    if problems:
        raise UserError("Megatron-Core would not train this rightly:\n" + "\n".join(f"- {text}" for text in problems))


def refuse_modules(config: Any, modules: Iterable[Any], implementation: str) -> None:
    """Raises UserError for built models whose gradients Megatron-Core would reduce wrongly."""
    for module in modules:
        for name, part in module.named_modules():
            if (implementation == "torch" and name.endswith("linear_kv_down_proj") and config.tensor_model_parallel_size > 1
                    and not part._forward_hooks):
                raise UserError(f"{name}: latent attention of Megatron's local spec at tp {config.tensor_model_parallel_size} never sums the gradient of "
                                "the keys' rotary part; register parallel.latent_attention.whole_along_sequence on it, or set tp=1")
        if config.num_moe_experts and config.expert_tensor_parallel_size != config.tensor_model_parallel_size:
            for name, parameter in module.named_parameters():
                if ".mlp.experts." in name and getattr(parameter, "allreduce", True):
                    raise UserError(f"{name}: with etp {config.expert_tensor_parallel_size} and tp {config.tensor_model_parallel_size} its gradient "
                                    "would be summed over the ranks of dense parameters; mark experts with allreduce=False")


def refuse_optimizer(optimizer: Any) -> None:
    """Raises UserError where the distributed optimizer runs on torch's Adam: one `step` tensor is put into all parameters on resume."""
    import torch

    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(part, "optimizer", None)
        if type(part).__name__ == "DistributedOptimizer" and isinstance(inner, (torch.optim.Adam, torch.optim.AdamW)):
            raise UserError(f"the distributed optimizer runs on torch's {type(inner).__name__}: after a resume its step counts are wrong by the number of "
                            "parameters; call parallel.device.prepare_megatron before Megatron's optimizers are made")


def refuse_ragged(config: Any, micro_batches: Sequence[MicroBatch], chunks: int) -> None:
    """Raises UserError for micro-batches of several shapes in a pipeline that was not told of them: it hangs, or mixes up their tokens."""
    shapes = sorted({tuple(m.tokens.shape) for m in micro_batches})
    if config.pipeline_model_parallel_size > 1 and len(shapes) > 1 and not config.variable_seq_lengths:
        what = "interleaved stages (vpp) take one shape only: pad all to the largest" if chunks > 1 else "set variable_seq_lengths=True"
        raise UserError(f"pp {config.pipeline_model_parallel_size}: micro-batches have {len(shapes)} shapes, {list(shapes[0])} to {list(shapes[-1])}, and "
                        f"variable_seq_lengths is off; {what}, or lay them out with make_micro_batches")
