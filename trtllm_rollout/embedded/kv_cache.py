"""The storage of keys and values, in blocks; which block belongs to whom is the block pool's business (`blocks.py`)."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch

from parallel.errors import UserError
from trtllm_rollout.embedded.heads import Heads

MEMORY_SHARE = {"cpu": 0.25, "cuda": 0.6}  # of what is free when the engine is made, where no budget is given

CHOICE = torch.int16  # of an expert's number


class KVCache:
    """Per layer, keys [blocks, kv_heads, block_size, key_dim], and values alike unless the layer is latent.

    On the CPU they are held in fp32 whatever the model's type (values are those of the model's type): products of the attention run
    in fp32 there, and converting the cache anew for every token would cost more than they do. Storage is taken at the first use; on
    the CPU a page of it becomes resident when it is first written. With `choices` (layers with experts, top_k) it also holds the
    experts that were chosen for every token, [blocks, block_size, layers, top_k].
    """

    def __init__(self, heads: Sequence[Heads], blocks: int, block_size: int, dtype: torch.dtype, device: torch.device,
                 choices: tuple[int, int] | None = None) -> None:
        self._heads, self.blocks, self.block_size, self._device, self._choices = tuple(heads), blocks, block_size, device, choices
        self.dtype = cache_dtype(dtype, device)
        self.experts: torch.Tensor | None = None
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the storage that is held now."""
        return self.blocks * block_bytes(self._heads, self.block_size, self.dtype, self._choices) if self.keys else 0

    def ensure(self) -> None:
        """Take the storage unless it is there. It reads as zeros: a masked position still enters a product with weight 0, and 0 x NaN is NaN."""
        if self.keys:
            return
        for h in self._heads:
            self.keys.append(self._zeros(h.kv, h.key_dim))
            self.values.append(self.keys[-1][..., :h.value_dim] if h.latent else self._zeros(h.kv, h.value_dim))
        if self._choices is not None:
            self.experts = torch.zeros(self.blocks, self.block_size, *self._choices, dtype=CHOICE, device=self._device)

    def drop(self) -> None:
        """Free all storage; nothing cached survives."""
        self.keys, self.values, self.experts = [], [], None

    def write(self, layer: int, blocks: torch.Tensor, offsets: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None) -> None:
        """Row i of `k` [rows, kv, key_dim] and `v` goes to place `offsets[i]` of block `blocks[i]`."""
        self.keys[layer][blocks, :, offsets] = k.to(self.dtype)
        if v is not None:
            self.values[layer][blocks, :, offsets] = v.to(self.dtype)

    def write_choice(self, layer: int, blocks: torch.Tensor, offsets: torch.Tensor, chosen: torch.Tensor) -> None:
        """`chosen` [rows, top_k]: the experts of the model's `layer`-th layer that has any, of rows as in `write`."""
        if self.experts is not None:
            self.experts[blocks, offsets, layer] = chosen.to(CHOICE)

    def choices(self, blocks: Sequence[int], tokens: int) -> torch.Tensor:
        """The experts of the first `tokens` tokens in `blocks`, [tokens, layers, top_k], on the CPU."""
        assert self.experts is not None
        used = torch.tensor(blocks[:-(-tokens // self.block_size)], dtype=torch.long, device=self._device)
        return self.experts.index_select(0, used).flatten(0, 1)[:tokens].cpu()

    def _zeros(self, kv: int, width: int) -> torch.Tensor:
        shape = (self.blocks, kv, self.block_size, width)
        if self._device.type != "cpu":
            return torch.zeros(shape, dtype=self.dtype, device=self._device)
        # an anonymous mapping is zero, takes memory only where it is written, and goes back to the system at once
        count = self.blocks * kv * self.block_size * width
        return torch.frombuffer(mmap.mmap(-1, count * self.dtype.itemsize), dtype=self.dtype).view(shape)


def cache_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The type that keys and values of a model of `dtype` are held in."""
    return torch.float32 if device.type == "cpu" else dtype


def block_bytes(heads: Sequence[Heads], block_size: int, dtype: torch.dtype, choices: tuple[int, int] | None = None) -> int:
    """Bytes of one block in all layers."""
    numbers = sum(h.kv * (h.key_dim + (0 if h.latent else h.value_dim)) for h in heads)
    return block_size * (numbers * dtype.itemsize + (math.prod(choices) * CHOICE.itemsize if choices else 0))


def block_count(heads: Sequence[Heads], block_size: int, dtype: torch.dtype, device: torch.device, budget: int | None, samples: int,
                tokens: int, choices: tuple[int, int] | None = None) -> int:
    """Blocks for a budget of bytes; None: what `samples` texts of `tokens` need, if a share of the free memory holds that.

    Raises UserError where the budget does not hold one text of two blocks.
    """
    size = block_bytes(heads, block_size, cache_dtype(dtype, device), choices)
    most = samples * (-(-tokens // block_size) + 1)  # a text's own tokens begin in a block of their own
    blocks = budget // size if budget is not None else min(most, max(2, int(MEMORY_SHARE[device.type] * free_memory(device)) // size))
    if blocks < 2:
        raise UserError(f"rollout: kv_cache_bytes is {budget}; one block of {block_size} tokens takes {size}, and a prompt and its answer take "
                        f"a block each: give at least {2 * size}")
    return min(blocks, most) if budget is None else blocks


def free_memory(device: torch.device) -> int:
    """Bytes that are free on the device now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return 4 << 30
