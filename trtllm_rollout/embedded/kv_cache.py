"""Keys and values of the running sequences, one slot each; slots 0..n-1 are always the active ones.

Keeping the active slots together lets attention read the cache as views: no gather, no copy in a decode step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from parallel.model_config import ModelConfig

TOKEN_BLOCK = 64


def round_up(count: int, multiple: int = TOKEN_BLOCK) -> int:
    return -(-count // multiple) * multiple


class KVCache:
    """Per layer, keys and values [slots, kv_heads / tp, tokens, head_dim]. Storage grows to what the submitted work needs."""

    def __init__(self, model: ModelConfig, kv_heads: int, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = (model.num_layers, kv_heads, model.head_dim)
        self._dtype, self._device = dtype, device
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.slots = self.tokens = 0

    @property
    def nbytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in (*self.keys, *self.values))

    def reserve(self, slots: int, tokens: int, active: int) -> None:
        """Make room for `slots` sequences of `tokens`, keeping the first `active` slots."""
        tokens = round_up(tokens)
        if slots <= self.slots and tokens <= self.tokens:
            return
        layers, heads, head_dim = self._shape
        old_tokens, slots, tokens = self.tokens, max(slots, self.slots), max(tokens, self.tokens)
        for tensors in (self.keys, self.values):
            for layer in range(layers):
                # zeros, not empty: a masked position still enters the product of attention with weight 0, and 0 x NaN is NaN
                new = torch.zeros(slots, heads, tokens, head_dim, dtype=self._dtype, device=self._device)
                if layer < len(tensors):
                    new[:active, :, :old_tokens] = tensors[layer][:active]
                    tensors[layer] = new
                else:
                    tensors.append(new)
        self.slots, self.tokens = slots, tokens

    def drop(self) -> None:
        """Free all storage; nothing cached survives."""
        self.keys, self.values, self.slots, self.tokens = [], [], 0, 0

    def copy(self, sources: Sequence[int], targets: Sequence[int], tokens: int) -> None:
        """Copy the first `tokens` positions of slots `sources` to slots `targets`."""
        if not len(sources):
            return
        source, target = torch.tensor(sources, device=self._device), torch.tensor(targets, device=self._device)
        for tensor in (*self.keys, *self.values):
            tensor[target, :, :tokens] = tensor[source, :, :tokens]


class DecodeAttention:
    """Attention of one new token for each of the first n slots; writes its key and value first.

    The query heads of a key-value group become rows of one small matrix, so each key is read once per group. The cache is
    read up to a multiple of 64 positions, which keeps the order of summation the same whoever else is in the batch.
    """

    def __init__(self, cache: KVCache, lengths: torch.Tensor) -> None:
        """`lengths` [n]: tokens in each slot before this one."""
        self._cache = cache
        self._rows = torch.arange(len(lengths), device=lengths.device)
        self._lengths = lengths
        self._span = min(round_up(int(lengths.max()) + 1), cache.tokens)
        self._mask = (torch.arange(self._span, device=lengths.device) <= lengths[:, None])[:, None, None]

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """`q` [n, heads, head_dim], `k` and `v` [n, kv_heads, head_dim]; returns [n, heads, head_dim]."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys[self._rows, :, self._lengths] = k
        values[self._rows, :, self._lengths] = v
        n, heads, head_dim = q.shape
        grouped = q.view(n, k.shape[1], heads // k.shape[1], head_dim)
        out = F.scaled_dot_product_attention(grouped, keys[:n, :, :self._span], values[:n, :, :self._span], attn_mask=self._mask)
        return out.reshape(n, heads, head_dim)


class PrefillAttention:
    """Causal attention of whole prompts packed one after the other; fills their slots.

    Prompts of equal length are attended together and no prompt is padded, so each is computed exactly as it would be alone.
    """

    def __init__(self, cache: KVCache, first_slot: int, lengths: Sequence[int]) -> None:
        """Prompt i has `lengths[i]` tokens and goes to slot first_slot + i; equal lengths must be neighbours."""
        self._cache = cache
        self._groups: list[tuple[int, int, int, int]] = []  # first token, first slot, prompts, length
        token = 0
        for i, length in enumerate(lengths):
            if self._groups and self._groups[-1][3] == length:
                start, slot, count, _ = self._groups[-1]
                self._groups[-1] = (start, slot, count + 1, length)
            else:
                self._groups.append((token, first_slot + i, 1, length))
            token += length

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """`q` [tokens, heads, head_dim], `k` and `v` [tokens, kv_heads, head_dim]; returns [tokens, heads, head_dim]."""
        out = torch.empty_like(q)
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        for start, slot, count, length in self._groups:
            part = slice(start, start + count * length)
            gq, gk, gv = (t[part].unflatten(0, (count, length)).transpose(1, 2) for t in (q, k, v))
            keys[slot:slot + count, :, :length] = gk
            values[slot:slot + count, :, :length] = gv
            attended = F.scaled_dot_product_attention(gq, gk, gv, is_causal=True, enable_gqa=gq.shape[1] != gk.shape[1])
            out[part] = attended.transpose(1, 2).flatten(0, 1)
        return out
