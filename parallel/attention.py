"""Core attention of the `torch` layer implementation: causal, packed or padded, with sliding windows and learned sinks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parallel.context_parallel import gather_tokens, held_columns
from parallel.micro_batch import Segment


class SDPACoreAttention(torch.nn.Module):
    """Causal core attention on `scaled_dot_product_attention`, in place of Megatron's unfused `DotProductAttention`.

    q [tokens, sequences, heads / tp, head_dim], k and v [tokens, sequences, kv_heads / tp, head_dim] (of latent attention v has
    a size of its own) -> [tokens, sequences, heads / tp * v_head_dim]. Sequences are padded on the right, so causality alone
    keeps padding out of real tokens. Packed rows come with `PackedRow`: q, k and v [tokens, heads, head_dim] -> [tokens, heads * v_head_dim],
    where every segment sees itself and its prefix only. Under context parallelism tokens are this rank's (`parallel.context_parallel`).

    The window is Megatron's `window_size` (left, 0): a position sees itself and `left` positions before it, in the layers that
    `window_attn_skip_freq` marks with 1. With `softmax_type` learnable every head has one more score, `softmax_offset`
    [heads / tp], that takes its share of the softmax and adds nothing (gpt_oss's sinks).
    """

    def __init__(self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str,
                 softmax_scale: float | None = None, pg_collection: Any = None, **unused: Any) -> None:
        from megatron.core.transformer.utils import is_layer_window_attention

        super().__init__()
        self._cp_group = pg_collection.cp if config.context_parallel_size > 1 else None
        self.scale = softmax_scale
        self.window = config.window_size[0] if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number) else None
        self.softmax_offset: torch.nn.Parameter | None = None
        self._tp_group = pg_collection.tp if pg_collection is not None else None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
            config.init_method(self.softmax_offset)
            self.softmax_offset.tensor_model_parallel = True  # type: ignore[attr-defined]  # the gradient norm counts every rank's
            self.softmax_offset.partition_dim, self.softmax_offset.partition_stride = 0, 1  # type: ignore[attr-defined]

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
                attn_mask_type: Any = None, attention_bias: Tensor | None = None, packed_seq_params: Any = None) -> Tensor:
        if attention_bias is not None or attention_mask is not None:
            raise ValueError("this core attention takes causal batches, packed or padded on the right: no mask or bias")
        if self._cp_group is not None:
            return self._cut_over_cp(query, key, value, packed_seq_params)
        if packed_seq_params is not None:
            return packed_seq_params.buckets.attend(query, key, value, self._attend).flatten(1)
        return self._attend(*(x.permute(1, 2, 0, 3) for x in (query, key, value))).permute(2, 0, 1, 3).flatten(2)

    def _cut_over_cp(self, query: Tensor, key: Tensor, value: Tensor, row: Any) -> Tensor:
        """The same for this rank's chunks of every sequence: keys and values of all ranks are gathered, queries stay where they are."""
        cp, rank = self._cp_group.size(), self._cp_group.rank()
        if row is not None:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        tokens = query.shape[0] * cp
        segments = (Segment(0, tokens),) if row is None else row.segments
        lengths = [s.length for s in segments]
        lengths.append(tokens - sum(lengths))  # the tail of a packed row
        gathered = gather_tokens(torch.cat([key, value], -1), held_columns(lengths, cp).to(key.device), self._cp_group).permute(1, 2, 0, 3)
        k, v = ([*x.split(lengths, 2)] for x in gathered.split([key.shape[-1], value.shape[-1]], -1))
        q = query.permute(1, 2, 0, 3).split([n // (2 * cp) for n in lengths for _ in range(2)], 2)
        at, out = {s.start: i for i, s in enumerate(segments)}, []
        for i, segment in enumerate(segments):
            size, before = segment.length // (2 * cp), segment.prefix[1]
            j = at[segment.prefix[0]] if before else i
            for part, chunk in ((q[2 * i], rank), (q[2 * i + 1], 2 * cp - 1 - rank)):
                keys, values = (x[i][:, :, :(chunk + 1) * size] for x in (k, v))
                if before:  # of a shared prompt without its padding
                    keys, values = torch.cat([k[j][:, :, :before], keys], 2), torch.cat([v[j][:, :, :before], values], 2)
                out.append(self._attend(part, keys, values, before + chunk * size))
        tail = lengths[-1] // cp
        if tail or not out:
            out.append(value.new_zeros(query.shape[1], query.shape[2], tail, value.shape[-1]))
        attended = torch.cat(out, 2).permute(2, 0, 1, 3).flatten(2)
        return attended if row is None else attended.squeeze(1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, before: int = 0) -> Tensor:
        """q [sequences, heads, tokens, head_dim], k and v [sequences, kv_heads, before + tokens, ...]: token t sees keys up to before + t."""
        mask = self._mask(q, before)
        if self.softmax_offset is not None:  # a key of zeros before all others, whose score is the offset and whose value is zero
            k, v = (torch.nn.functional.pad(x, (0, 0, 1, 0)) for x in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1], scale=self.scale)

    def _mask(self, q: Tensor, before: int = 0) -> Tensor | None:
        """None where causality is all; else what is added to the scores, [1, heads or 1, tokens, keys]."""
        if self.softmax_offset is None and self.window is None and not before:
            return None
        tokens = q.shape[2]
        distance = torch.arange(before, before + tokens, device=q.device)[:, None] - torch.arange(before + tokens, device=q.device)
        hidden = distance < 0 if self.window is None else (distance < 0) | (distance > self.window)
        mask = torch.zeros(1, 1, tokens, before + tokens, dtype=q.dtype, device=q.device).masked_fill(hidden, float("-inf"))
        if self.softmax_offset is None:
            return mask
        heads = self.softmax_offset.shape[0]
        return torch.cat([self.softmax_offset.to(q.dtype).view(1, heads, 1, 1).expand(1, heads, tokens, 1), mask.expand(1, heads, -1, -1)], -1)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None) -> dict[str, Any]:
        """For Megatron's distributed checkpoints: the sinks are cut over tensor-parallel ranks."""
        from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint

        metadata = ensure_metadata_has_dp_cp_group(metadata)
        return make_sharded_tensors_for_checkpoint(self.state_dict(keep_vars=True), prefix, {"softmax_offset": 0}, sharded_offsets,
                                                   tp_group=self._tp_group, dp_cp_group=metadata["dp_cp_group"])
