"""Megatron-Core models equal transformers', and training does not depend on how the work is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.models import LLAMA3_ROPE, reference_logits, write_model
from tests.worker_pool import run_ranks

IDS = [[5, 6, 7, 8, 150, 202, 1, 9], [3, 3, 40, 2, 11, 77, 100, 4]]
LAYOUTS = [(1, {}), (2, dict(tp=2)), (2, dict(pp=2)), (4, dict(tp=2, pp=2))]


def open_model(directory: str, parallel: dict[str, Any], train: bool = False, divisor: int = 8, dtype: str = "float32", options: Any = None, **optimizer: Any) -> Any:
    """A TrainingModel with the weights of a HF directory, on this rank of the pool's world."""
    import torch.distributed as dist

    from checkpoint.hf import read_hf
    from parallel.config import ParallelConfig
    from parallel.device import Device, prepare_megatron
    from parallel.model_config import ModelConfig
    from parallel.options import TrainingOptions
    from parallel.training import OptimizerConfig, build
    from resharding.layouts import mcore_layout

    device = Device("cpu", "gloo")
    prepare_megatron(device)
    rank, world = dist.get_rank(), dist.get_world_size()
    model = ModelConfig.from_directory(directory, make_vocab_size_divisible_by=divisor)
    layout = ParallelConfig(**parallel)
    layout.validate(world, model)
    training = build(model, layout, dtype, device, rank, world, 7, OptimizerConfig(**optimizer) if train else None,
                     options=options or TrainingOptions())
    read_hf(directory, mcore_layout(model, layout, rank, world, training.dtype), training.tensors, model)
    training.reload_main_params()
    return training


def log_probs_of(directory: str, parallel: dict[str, Any], ids: list[list[int]]) -> Any:
    """Full log-softmax [sequences, tokens, vocab] through the vocabulary-parallel log-probs of every token id."""
    import torch.distributed as dist

    from parallel.log_probs import head_log_probs
    from parallel.micro_batch import make_micro_batches

    training = open_model(directory, parallel)
    out: list[torch.Tensor] = []
    with training.entered(), torch.no_grad():
        from megatron.core import parallel_state

        group = parallel_state.get_tensor_model_parallel_group()

        def forward_step(iterator: Any, chunk: Any) -> Any:
            micro_batch = next(iterator)
            output = chunk(micro_batch.tokens, micro_batch.positions, None)

            def loss(hidden: torch.Tensor) -> Any:
                module = training.modules[-1]
                weight = module.shared_embedding_or_output_weight() if training.model.tied else module.output_layer.weight
                every = [head_log_probs(hidden[0], weight, torch.full(hidden.shape[1:2], v), training.model.vocab_size, 1.0, group)[0]
                         for v in range(training.model.vocab_size)]
                out.append(torch.stack(every, -1)[None])
                return hidden.sum(), torch.ones((), dtype=torch.int), {}

            return output, loss

        from megatron.core.pipeline_parallel import get_forward_backward_func

        batches = make_micro_batches(ids, [[i] for i in range(len(ids))], training.parallel, "padded")
        several = len(training.chunks) > 1
        get_forward_backward_func()(forward_step_func=forward_step, data_iterator=[iter(batches) for _ in training.chunks] if several else iter(batches),
                                    model=training.chunks if several else training.chunks[0], num_microbatches=len(batches), seq_length=len(ids[0]), micro_batch_size=1, forward_only=True)
    assert dist.is_initialized()
    return torch.cat(out) if training.is_output_rank else None


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_equal_transformers(tmp_path: Any, family: str, tied: bool) -> None:
    directory = str(write_model(tmp_path / "m", family, tie_word_embeddings=tied))
    want = reference_logits(directory, IDS).log_softmax(-1)
    for world, parallel in LAYOUTS:
        got = next(r for r in run_ranks(world, log_probs_of, directory, parallel, IDS) if r is not None)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=0, msg=lambda m: f"{family} tied={tied} {parallel}: {m}")


def test_logits_with_llama3_rope_head_dim_and_one_kv_head(tmp_path: Any) -> None:
    """Frequencies that Megatron's own scaling would get wrong, head_dim != hidden / heads, tp above the key/value heads."""
    directory = str(write_model(tmp_path / "m", "llama", rope_parameters=LLAMA3_ROPE, head_dim=32, num_key_value_heads=1))
    ids = [[(7 * i + s) % 200 + 1 for i in range(120)] for s in (0, 3)]
    want = reference_logits(directory, ids).log_softmax(-1)
    for world, parallel in [(1, {}), (2, dict(tp=2))]:
        got = next(r for r in run_ranks(world, log_probs_of, directory, parallel, ids) if r is not None)
        torch.testing.assert_close(got, want, atol=2e-4, rtol=0)


def test_the_real_story_model(stories260k: Any) -> None:
    if stories260k is None:  # the property is shown by the models above; this one is real
        return
    ids = [[1, 403, 407, 261, 378, 9, 20, 31]]
    want = reference_logits(stories260k, ids).log_softmax(-1)
    for world, parallel in LAYOUTS[:2]:
        got = next(r for r in run_ranks(world, log_probs_of, str(stories260k), parallel, ids) if r is not None)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


SEQUENCES = [[(11 * i + 7 * s) % 200 + 1 for i in range(n)] for s, n in enumerate((9, 5, 12, 7, 8, 6, 10, 4))]


def train(directory: str, parallel: dict[str, Any], size: int, steps: int = 3, **optimizer: Any) -> Any:
    """Steps on the mean negative log-likelihood: (losses, gradient norms, canonical weights, canonical gradients of the first step)."""
    import torch.distributed as dist

    from mcore_rl.exchange import Exchange
    from mcore_rl.policy import Policy

    training = open_model(directory, parallel, True, lr=1e-3, weight_decay=0.01, **optimizer)
    policy = Policy(training, Exchange(), dist.get_world_size())
    total = sum(len(s) - 1 for s in SEQUENCES)
    losses, norms, grads = [], [], {}
    for step in range(steps):
        reports, norm, _ = policy.update(SEQUENCES, range(len(SEQUENCES)), size, 1.0,
                                         lambda i, lp, h: (-lp[1:].sum() / total, -lp[1:].sum().detach() / total))
        losses.append(float(torch.stack(reports).double().sum()))
        norms.append(norm)
        if step or optimizer.get("distributed", True):  # the distributed optimizer reduces only each rank's part
            continue
        chunks = training.modules
        grads = gathered(training, {(f"chunk{i}." if len(chunks) > 1 else "") + n: p.main_grad for i, c in enumerate(chunks) for n, p in c.named_parameters()})
    return losses, norms, gathered(training, training.tensors), grads


def gathered(training: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors in the model's layout as canonical tensors, on rank 0."""
    import torch.distributed as dist

    from resharding.layout import canonical_shapes
    from resharding.layouts import hf_layout, mcore_layout
    from resharding.plan import make_plan
    from resharding.transport import point_to_point

    rank, world = dist.get_rank(), dist.get_world_size()
    destination = hf_layout(training.model, torch.float32, 0)
    plan = make_plan([mcore_layout(training.model, training.parallel, r, world, torch.float32) for r in range(world)], [destination],
                     canonical_shapes(training.model))
    out = {t.name: torch.empty(t.shape) for t in destination.tensors} if rank == 0 else {}
    point_to_point.execute(plan, tensors, out, rank)
    return out


CUTS = [(1, {}, 3, {}), (2, dict(tp=2), 4, {}), (2, dict(tp=2, sequence_parallel=True), 3, dict(distributed=False)), (2, dict(pp=2), 2, {}),
        (2, {}, 2, {}), (2, {}, 3, dict(distributed=False)), (2, dict(pp=2, vpp=2), 2, dict(distributed=False)),
        (4, dict(tp=2, pp=2), 1, dict(distributed=False)), (2, dict(cp=2), 3, {}), (4, dict(tp=2, cp=2), 3, {}), (4, dict(pp=2, cp=2), 2, {})]


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_training_is_the_same_however_it_is_cut(tmp_path: Any, tied: bool) -> None:
    """Loss, gradient norm, every gradient and every weight, at a large initial std where faults show.

    Adam's first steps are lr x sign(gradient) where a gradient is rounding noise; eps 1e-4 keeps them proportional to it, so that
    weights can be compared one by one.
    """
    directory = str(write_model(tmp_path / "m", "qwen2", tie_word_embeddings=tied, initializer_range=0.3))
    want = run_ranks(1, train, directory, {}, 8, eps=1e-4, distributed=False)[0]
    for world, parallel, size, options in CUTS:
        losses, norms, weights, grads = run_ranks(world, train, directory, parallel, size, eps=1e-4, **options)[0]
        name = f"{parallel} micro-batch {size} {options}"
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(want[0]), atol=1e-6, rtol=1e-6, msg=lambda m: f"loss, {name}: {m}")
        torch.testing.assert_close(torch.tensor(norms), torch.tensor(want[1]), atol=0, rtol=1e-4, msg=lambda m: f"norm, {name}: {m}")
        assert weights.keys() == want[2].keys()
        for key, value in want[2].items():
            torch.testing.assert_close(weights[key], value, atol=1e-6, rtol=1e-4, msg=lambda m: f"{key}, {name}: {m}")
        for key, value in grads.items():
            off = (value - want[3][key]).abs().max() / want[3][key].abs().max()
            assert off < 2e-5, f"gradient of {key}, {name}: off by {off:.1e} of its largest"
