"""Megatron-Core's classes with one method of each changed. Imports Megatron-Core: load it only after `prepare_megatron`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from megatron.core.models.common.embeddings import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import RowParallelLinear, gather_from_sequence_parallel_region
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from parallel.balancing import Load, Tokens
from parallel.context_parallel import as_megatron_cuts
from parallel.errors import UserError
from parallel.micro_batch import MicroBatch, Segment
from parallel.model_config import ModelConfig, MoE
from parallel.options import MoEOptions
from parallel.packed_rows import Buckets, make_buckets
from parallel.packing import SHARED_NEEDS_TORCH
from parallel.routing import choose_experts, probabilities


class Router(TopKRouter):
    """Megatron's router with `choose_experts` and the balancing of `parallel.balancing`.

    The correction bias is Megatron's fp32 buffer `expert_bias`: no gradient and no weight decay reach it, and Megatron's own update
    has a rate of 0 (see `transformer_config`). `tokens` is what the layer's packed row said last (`watch_rows`), `place` which
    of the model's layers with experts it is in.
    """

    def __init__(self, moe: MoE, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.moe, self.load, self.balancing = moe, Load(), MoEOptions()
        self.tokens: Tokens | None = None
        self.place = 0

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """logits [tokens, sequences, experts] -> weights (0 where not chosen) and choice, both [tokens * sequences, experts]."""
        logits = logits.reshape(-1, self.moe.num_experts)
        replay = None if self.tokens is None else self.tokens.replay(self.place, len(logits), self.tp_group)
        weights, indices = choose_experts(logits, self.moe, self.expert_bias, replay)
        chosen = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device).scatter(1, indices, True)
        spread = torch.zeros(logits.shape, dtype=weights.dtype, device=logits.device).scatter(1, indices, weights)
        # a checkpointed layer counts in its second pass, which has gradients, only
        if self.tokens is not None and torch.is_grad_enabled() and self.training:
            if replay is not None:
                self.load.compare(replay, choose_experts(logits.detach(), self.moe, self.expert_bias)[1])
            scores = probabilities(logits, self.moe)
            shares = scores / scores.sum(-1, keepdim=True) if self.moe.score == "sigmoid" else scores
            loss = self.load.add(self, self.tokens, shares, chosen, self.balancing)
            if loss is not None:
                spread = MoEAuxLossAutoScaler.apply(spread, self.balancing.aux_loss_coefficient * loss)
        return spread, chosen


def watch_rows(module: Any, model: ModelConfig, options: MoEOptions) -> None:
    """Let the routers of a GPTModel know which tokens they see: a layer's row says so, also when the backward pass computes it again."""

    def tell(layer: Any, _: Any, named: dict[str, Any]) -> None:
        layer.mlp.router.tokens = getattr(named.get("packed_seq_params"), "routed", None)

    for layer in module.decoder.layers:
        if hasattr(layer.mlp, "router"):
            layer.mlp.router.balancing = options
            layer.mlp.router.place = sorted(model.moe_layers).index(layer.layer_number - 1)
            layer.register_forward_pre_hook(tell, with_kwargs=True)


class BiasedRowLinear(RowParallelLinear):
    """The down-projection of experts with biases, at etp 1.

    Megatron's MLP adds an expert's bias in place, which autograd refuses on what RowParallelLinear returns, its input aliased: here
    the output is a tensor of its own. And RowParallelLinear marks its bias as replicated over tp under sequence parallelism, so
    that the gradients of different experts, which tp ranks hold at etp 1, would be summed: here it is not marked.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.bias.sequence_parallel = False

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_)
        return output.clone(), bias


@dataclass
class PackedRow(PackedSeqParams):
    """What attention must know of a packed row in the `torch` layer implementation, beside what Megatron asks for.

    To Megatron it is one sequence, so that it hands on q, k and v as they are; positions [tokens] and buckets say the rest. Under
    context parallelism positions are where Megatron takes this rank's from (`as_megatron_cuts`), and segments those of the whole row.
    """

    positions: Tensor | None = None
    segments: tuple[Segment, ...] = ()
    buckets: Buckets | None = None


def packed_row(micro_batch: MicroBatch, implementation: str, cp: int = 1, cp_rank: int = 0) -> PackedSeqParams | None:
    """What Megatron's modules take beside the tokens of a micro-batch; None for padded rows. With `cp` it is a rank's part (`cut`).

    Transformer Engine gets the sequences' boundaries, the padding at the end as one more sequence. Raises UserError for shared
    prompts there, of which its attention knows nothing.
    """
    if micro_batch.segments is None:
        return None
    tokens, device = micro_batch.tokens.shape[1] * cp, micro_batch.tokens.device
    if implementation == "torch":
        whole = torch.tensor([0, tokens], dtype=torch.int32, device=device)
        return PackedRow(qkv_format="thd", cu_seqlens_q=whole, cu_seqlens_kv=whole, max_seqlen_q=tokens, max_seqlen_kv=tokens,
                         positions=as_megatron_cuts(micro_batch.positions[0], cp, cp_rank), segments=micro_batch.segments,
                         buckets=make_buckets(micro_batch.segments, tokens, device) if cp == 1 else None)
    if any(s.prefix[1] for s in micro_batch.segments):
        raise UserError(SHARED_NEEDS_TORCH)
    ends = sorted({0, *(s.start + s.length for s in micro_batch.segments), tokens})
    longest = max(b - a for a, b in pairwise(ends))
    cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=device)
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, max_seqlen_q=longest, max_seqlen_kv=longest)


class Rotary(RotaryEmbedding):
    """Megatron's rotary embedding with given frequencies, and with the positions of a `PackedRow`'s tokens."""

    def __init__(self, frequencies: Tensor, cp_group: Any) -> None:
        super().__init__(2 * len(frequencies), 1.0, cp_group=cp_group)
        self.inv_freq = frequencies.to(self.inv_freq.device)
        self._positions: Tensor | None = None

    def get_rotary_seq_len(self, inference_context: Any, transformer: Any, transformer_input: Any, transformer_config: Any,
                           packed_seq_params: Any = None, **named: Any) -> int:
        """Megatron asks for the length right before it calls the module, with the row at hand: the positions are taken here."""
        self._positions = getattr(packed_seq_params, "positions", None)
        return super().get_rotary_seq_len(inference_context, transformer, transformer_input, transformer_config, packed_seq_params, **named)

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None) -> Tensor:
        angles = super().forward(max_seq_len, offset, packed_seq, cp_group)
        return angles if self._positions is None else angles[self._positions]


class LatentRotary(Rotary):
    """Answers latent attention as Megatron's YaRN embedding does, (angles, scale), with given frequencies and scale."""

    def __init__(self, frequencies: Tensor, scale: float, cp_group: Any) -> None:
        super().__init__(frequencies, cp_group)
        self.scale = scale

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None) -> tuple[Tensor, float]:
        return super().forward(max_seq_len, offset, packed_seq, cp_group), self.scale


def return_hidden_states(module: Any) -> None:
    """Let a GPTModel with a head answer with the hidden states that the head would take, whole along the sequence, [sequences, tokens, hidden].

    `parallel.log_probs` applies the head a chunk of tokens at a time. Under sequence parallelism the gradient that comes back is one
    tensor-parallel rank's part: the gather's backward sums the parts. Without, the caller passes the states through
    `copy_to_tensor_model_parallel_region`, which is not done here because Megatron drops its sum where the gradient is not
    contiguous, as that of the transposition that follows is.
    """
    layer = module.output_layer

    def forward(input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> tuple[Tensor, None]:
        if layer.sequence_parallel:
            input_ = gather_from_sequence_parallel_region(input_, tensor_parallel_output_grad=True, group=layer.tp_group)
        return input_, None

    layer.forward = forward
