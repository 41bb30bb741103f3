"""Context parallelism: attention of cut sequences against dense attention in float64, and predictions that come back whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parallel.config import ParallelConfig
from parallel.errors import UserError
from parallel.micro_batch import Segment, make_micro_batches
from tests.models import TINY
from tests.worker_pool import run_ranks

# the third segment is a response that sees the first as its prompt, 5 tokens of which are no padding
SEGMENTS = (Segment(0, 8), Segment(8, 24), Segment(32, 16, (0, 5)))
TOKENS = 56  # 8 of padding at the end


def visible(window: int | None, segments: tuple[Segment, ...] | None, tokens: int) -> torch.Tensor:
    """Which keys each token sees [tokens, tokens], written down token by token."""
    seen = torch.zeros(tokens, tokens, dtype=torch.bool)
    for s in segments or (Segment(0, tokens),):
        first, before = s.prefix
        own = [*range(first, first + before), *range(s.start, s.start + s.length)]
        for i in range(before, len(own)):
            for j in range(i + 1):
                if window is None or i - j < window:
                    seen[own[i], own[j]] = True
    return seen


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """q [tokens, sequences, heads, d] -> [tokens, sequences, heads, value]; a softmax written out, in the inputs' precision."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("ibhd,jbhd->bhij", q, k) * 0.3
    top = scores.max()
    weights = (scores - top).exp() * seen
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks.view(1, -1, 1, 1) - top).exp()
    return torch.einsum("bhij,jbhv->ibhv", weights / total.clamp_min(1e-300), v)


def attend(case: dict[str, Any]) -> dict[str, torch.Tensor]:
    """On a rank: errors of this rank's part of the output and of all gradients, against dense attention in float64."""
    import torch.distributed as dist

    from parallel.attention import SDPACoreAttention
    from parallel.context_parallel import held_columns

    cp, rank = dist.get_world_size(), dist.get_rank()
    config = SimpleNamespace(context_parallel_size=cp, window_size=case["window"] and (case["window"] - 1, 0), window_attn_skip_freq=None,
                             softmax_type="learnable" if case["sinks"] else "vanilla", num_attention_heads=4, tensor_model_parallel_size=1,
                             params_dtype=torch.float64, init_method=lambda x: torch.nn.init.normal_(x))
    torch.manual_seed(3)
    core = SDPACoreAttention(config, 1, None, "self", softmax_scale=0.3, pg_collection=SimpleNamespace(cp=dist.group.WORLD, tp=None))
    segments = SEGMENTS if case["packed"] else None
    sequences = 1 if case["packed"] else 3
    shapes = ((4, 16), (case["kv"], 16), (case["kv"], case["value"]))
    whole = [torch.randn(TOKENS, sequences, *shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    lengths = (*(s.length for s in SEGMENTS), 8) if case["packed"] else (TOKENS,)
    columns = held_columns(lengths, cp)
    mine = [x.detach()[columns[rank]].requires_grad_() for x in whole]
    row = SimpleNamespace(segments=segments) if case["packed"] else None
    out = core(*(x.squeeze(1) for x in mine) if row else mine, packed_seq_params=row)
    want = dense(*whole, visible(case["window"], segments, TOKENS), core.softmax_offset)
    want = want.reshape(TOKENS, -1) if row else want.flatten(2)
    weights = torch.randn_like(want)
    parameters = [core.softmax_offset] if case["sinks"] else []
    expected = torch.autograd.grad((want * weights).sum(), [*whole, *parameters])
    got = torch.autograd.grad((out * weights[columns[rank]]).sum(), [*mine, *parameters])
    errors = {"output": (out - want[columns[rank]]).abs().max().item()}
    for name, g, e in zip("qkv", got, expected, strict=False):
        errors[name] = (g - e[columns[rank]]).abs().max().item()
    if parameters:  # a parameter's gradient is each rank's part, as every other of the model
        total = got[3].clone()
        dist.all_reduce(total)
        errors["sinks"] = (total - expected[3]).abs().max().item()
    return errors


@pytest.mark.parametrize(("cp", "case"), [
    (2, dict(packed=True, window=None, sinks=False, kv=2, value=16)), (4, dict(packed=True, window=None, sinks=False, kv=1, value=12)),
    (2, dict(packed=True, window=5, sinks=True, kv=4, value=16)), (2, dict(packed=False, window=None, sinks=False, kv=2, value=16)),
    (2, dict(packed=False, window=9, sinks=True, kv=2, value=16))])
def test_attention_of_cut_sequences_is_dense_attention(cp: int, case: dict[str, Any]) -> None:
    for errors in run_ranks(cp, attend, case):
        assert max(errors.values()) < 1e-12, errors


def test_ranks_hold_an_early_and_a_late_chunk_of_every_sequence() -> None:
    from parallel.context_parallel import held_columns

    assert held_columns((8, 4), 2).tolist() == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]
    with pytest.raises(ValueError, match="6 tokens is not cut over cp 2: it must be padded to a multiple of 4"):
        held_columns((8, 6), 2)


@pytest.mark.parametrize("packing", ["packed", "shared_prompt", "padded"])
@pytest.mark.parametrize("parallel", [ParallelConfig(cp=2), ParallelConfig(cp=3, tp=2, sequence_parallel=True)])
def test_rows_and_sequences_are_padded_to_whole_chunks(packing: Any, parallel: ParallelConfig) -> None:
    ids = [list(range(1, n + 1)) for n in (7, 4, 13, 2)]
    masks = [[False] * 2 + [True] * (len(i) - 2) for i in ids]
    batch, = make_micro_batches(ids, [[0, 1, 2, 3]], parallel, packing, masks)
    assert batch.tokens.shape[1] % (2 * parallel.cp) == 0 and batch.tokens.shape[1] // parallel.cp % (parallel.tp) == 0
    for segment in batch.segments or ():
        assert segment.length % (2 * parallel.cp) == 0 and segment.start % (2 * parallel.cp) == 0


def test_windows_over_ranks_are_refused_where_transformer_engine_attends() -> None:
    from parallel.model import transformer_config
    from parallel.model_config import ModelConfig

    model = ModelConfig.from_hf({"model_type": "mistral", **TINY, "sliding_window": 5})
    with pytest.raises(UserError, match="cp=2: sliding windows .mistral.*layer_implementation: torch"):
        transformer_config(model, ParallelConfig(cp=2), torch.float32, "te")


def predictions(packing: Any) -> Any:
    """On a rank: whether every cut prediction is made from the token before its target, and the whole of values that name the target's place."""
    import torch.distributed as dist

    from parallel.context_parallel import cut

    ids = [[100 * s + t for t in range(n)] for s, n in enumerate((7, 5, 11), start=1)]
    batch, = make_micro_batches(ids, [[0, 1, 2]], ParallelConfig(cp=dist.get_world_size()), packing, None)
    part, whole = cut(batch, dist.group.WORLD)
    assert torch.equal(part.tokens.flatten()[part.rows] + 1, part.targets), "a target follows its token, whatever chunk it is in"
    start = torch.stack([part.targets.double(), -part.targets.double()], -1).requires_grad_()
    values = whole(start)
    (values[:, 0] * torch.arange(len(values))).sum().backward()
    assert start.grad is not None
    return part.tokens.numel(), batch.targets, values.detach(), dict(zip(part.targets.tolist(), start.grad[:, 0].tolist(), strict=True))


@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_predictions_come_back_whole_in_their_order_and_gradients_once(packing: str) -> None:
    ranks = run_ranks(2, predictions, packing)
    targets = ranks[0][1]
    assert targets.tolist() == [*range(101, 107), *range(201, 205), *range(301, 311)]
    for tokens, _, values, _ in ranks:
        assert tokens == ranks[0][0] and torch.equal(values, torch.stack([targets.double(), -targets.double()], -1))
    gradients = [g for *_, g in ranks]
    assert not gradients[0].keys() & gradients[1].keys(), "every prediction is one rank's"
    assert {**gradients[0], **gradients[1]} == {t: float(i) for i, t in enumerate(targets.tolist())}
