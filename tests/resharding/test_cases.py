"""Faults that users of other stacks reported, where they concern names, layouts and syncs (../shared/cases: A03, A07, B01, B03, B07).

More of A03 and B03, and B05, is in test_layouts.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcore_rl.gates import OffPolicy, check_on_policy
from mcore_rl.sample import Batch
from parallel.config import ParallelConfig
from parallel.model_config import ModelConfig
from resharding.checksum import verify
from resharding.errors import CoverageError, SyncError, WeightsError
from resharding.layout import Layout, canonical_shapes, empty_tensors
from resharding.layouts import hf_layout, mcore_layout, trtllm_layout
from resharding.piece_sums import piece_checksums
from resharding.plan import make_plan
from resharding.sync import WeightSync
from tests.resharding.direct import Tensors, assert_same, canonical_tensors, mcore_shard, simulate, tiny, trtllm_shard
from tests.worker_pool import run_ranks

F32 = torch.float32
IDS = [5, 6, 7, 8]


def held_by(layouts: list[Layout], full: Tensors, model: ModelConfig) -> dict[int, Tensors]:
    out = {x.rank: empty_tensors(x) for x in layouts}
    simulate(make_plan([hf_layout(model, F32)], layouts, canonical_shapes(model)), {0: full}, out)
    return out


@pytest.mark.parametrize("tp", [1, 2])
def test_a03_qk_norms_are_whole_on_every_rank_and_never_made_up(tp: int) -> None:
    model = tiny("qwen3", num_heads=8, head_dim=16)
    full = canonical_tensors(model)
    trainer = [mcore_layout(model, ParallelConfig(tp=tp), r, tp, F32) for r in range(tp)]
    engine = [trtllm_layout(model, tp, r, r, F32) for r in range(tp)]
    for layouts, name in ((trainer, "decoder.layers.1.self_attention.{}_layernorm.weight"), (engine, "model.layers.1.self_attn.{}_norm.weight")):
        for tensors in held_by(layouts, full, model).values():
            for x in "qk":
                assert torch.equal(tensors[name.format(x)], full[f"model.layers.1.self_attn.{x}_norm.weight"])
    files = hf_layout(model, F32)
    without = Layout("hf", 0, tuple(t for t in files.tensors if t.name != "model.layers.1.self_attn.q_norm.weight"))
    with pytest.raises(CoverageError, match="no source holds all of model.layers.1.self_attn.q_norm.weight"):
        make_plan([without], [mcore_layout(model, ParallelConfig(tp=tp), 0, tp, F32)], canonical_shapes(model), True, False)


@pytest.mark.parametrize("family, attention", [
    ("llama", {"q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"}),
    ("qwen2", {"q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "q_proj.bias", "k_proj.bias", "v_proj.bias"}),
    ("qwen3", {"q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "q_norm.weight", "k_norm.weight"}),
])
def test_a03_an_export_has_exactly_the_keys_of_its_model(family: str, attention: set[str]) -> None:
    names = {tensor.name for tensor in hf_layout(tiny(family), F32).tensors}
    assert {name.split("layers.2.self_attn.")[1] for name in names if "layers.2.self_attn." in name} == attention
    assert names == set(canonical_tensors(tiny(family)))


def test_a07_what_padding_rows_hold_never_leaves_them() -> None:
    """203 words over tp 4 with divisor 8: 224 rows, 56 a rank. Garbage in the padding reaches no file, no engine and no other layout."""
    model = tiny(vocab_size=203, num_kv_heads=4, make_vocab_size_divisible_by=8)
    full = canonical_tensors(model)
    trainer = [mcore_layout(model, ParallelConfig(tp=4), r, 4, F32) for r in range(4)]
    held = held_by(trainer, full, model)
    names = ("embedding.word_embeddings.weight", "output_layer.weight")
    assert [held[3][name].shape[0] for name in names] == [56, 56]
    for name in names:
        held[3][name][203 - 168:] = 1e30
    exported = {0: empty_tensors(hf_layout(model, F32))}
    simulate(make_plan(trainer, [hf_layout(model, F32)], canonical_shapes(model)), held, exported)
    assert_same(exported[0], full)
    assert [tuple(exported[0][n].shape) for n in ("model.embed_tokens.weight", "lm_head.weight")] == [(203, 8)] * 2
    for tp in (1, 2):
        other = [mcore_layout(model, ParallelConfig(tp=tp), r, tp, F32) for r in range(tp)]
        resumed = {x.rank: empty_tensors(x) for x in other}
        simulate(make_plan(trainer, other, canonical_shapes(model)), held, resumed)
        for name in names:
            whole = torch.cat([resumed[r][name] for r in range(tp)])
            assert whole.shape[0] == 208 and whole[203:].abs().sum() == 0
    engine = [trtllm_layout(model, 4, r, r, F32) for r in range(4)]
    synced = {x.rank: empty_tensors(x) for x in engine}
    simulate(make_plan(trainer, engine, canonical_shapes(model)), held, synced)
    for r in range(4):
        assert_same(synced[r], trtllm_shard(full, model, 4, r))


class PlainEngine:
    """A receiver of weights."""

    def __init__(self, layout: Layout) -> None:
        self.tensors, self.version = empty_tensors(layout), None

    def begin_update(self) -> None:
        self.version = None

    def weights(self) -> Mapping[str, torch.Tensor]:
        return self.tensors

    def commit(self, version: int, checksums: Mapping[str, int]) -> None:
        self.version = version

    def verify(self) -> None:
        """The tests look at the tensors themselves."""


def tied_syncs(model: ModelConfig, parallel: ParallelConfig) -> list[str]:
    """On a rank: a sync to engines that own a head and to such that do not; then with the last stage's copy of it changed."""
    rank, world = dist.get_rank(), dist.get_world_size()
    trainer = [mcore_layout(model, parallel, r, world, F32) for r in range(world)]
    full = canonical_tensors(model)
    said = []
    for owns_head in (True, False):
        engines = [trtllm_layout(model, 1, 0, r, F32, tied_head=owns_head) for r in range(world)]
        sync = WeightSync(trainer, engines, canonical_shapes(model), rank)
        engine = PlainEngine(engines[rank])
        sync.run(mcore_shard(full, model, parallel, rank, world), engine, 1)
        assert_same(engine.tensors, trtllm_shard(full, model, 1, 0, tied_head=owns_head))
        assert ("lm_head.weight" in engine.tensors) == owns_head
        drifted = {name: t.clone() for name, t in mcore_shard(full, model, parallel, rank, world).items()}
        if rank == world - 1:
            next(t for name, t in drifted.items() if name.endswith("output_layer.weight"))[0] += 1e-3
        try:
            sync.run(drifted, engine, 2)
        except WeightsError as error:
            said.append(str(error))
        assert engine.version is None
    return said


@pytest.mark.parametrize("parallel", [ParallelConfig(pp=2), ParallelConfig(pp=4), ParallelConfig(pp=2, vpp=2), ParallelConfig(tp=2, pp=2)])
def test_b03_tied_copies_reach_either_kind_of_engine_and_never_a_drifted_one(parallel: ParallelConfig) -> None:
    for said in run_ranks(parallel.tp * parallel.pp, tied_syncs, tiny("qwen2", tied=True), parallel):
        assert len(said) == 2 and all("model.embed_tokens.weight: the copies in" in text and "output_layer.weight" in text for text in said), said


class CachingEngine:
    """A fake engine with a prefix cache: which prefix was computed under which version. It follows the protocol of a receiver."""

    def __init__(self, layout: Layout) -> None:
        self.layout, self.tensors = layout, empty_tensors(layout)
        self.version: int | None = None
        self.updating = False
        self.cache: dict[tuple[int, ...], int] = {}
        self.events: list[str] = []

    def begin_update(self) -> None:
        self.events.append("begin")
        self.updating, self.version = True, None
        self.cache.clear()

    def weights(self) -> Mapping[str, torch.Tensor]:
        return self.tensors

    def commit(self, version: int, checksums: Mapping[str, int]) -> None:
        verify([self.layout], [piece_checksums(self.layout, self.tensors)], checksums)  # every weight is there by now
        self.events.append(f"commit {version}")
        self.updating, self.version = False, version

    def verify(self) -> None:
        verify([self.layout], [piece_checksums(self.layout, self.tensors)])

    def generate(self, prompt: list[int], samples: int = 1, prefix_cache: bool = True) -> list[dict[str, Any]]:
        if self.updating or self.version is None:
            raise RuntimeError("the engine has no committed weights")
        out = []
        for sample in range(samples):
            computed = self.cache.get(tuple(prompt)) if prefix_cache else None
            out.append({"cached_tokens": 0 if computed is None else len(prompt), "version": self.version if computed is None else computed,
                        "text": self.sampled(prompt, sample)})
            self.cache.setdefault(tuple(prompt), self.version)
        return out

    def sampled(self, prompt: list[int], seed: int) -> list[int]:
        logits = self.tensors["model.embed_tokens.weight"][prompt] @ self.tensors["lm_head.weight"].T
        return torch.multinomial(logits.softmax(-1), 3, generator=torch.Generator().manual_seed(seed)).flatten().tolist()


class BreaksHalfWay(dict):
    """An engine's tensors that break when the move comes to one of them (the check before looks at it once); part has changed by then."""

    looked = 0

    def __getitem__(self, name: str) -> torch.Tensor:
        if name == "model.layers.2.mlp.down_proj.weight":
            self.looked += 1
            if self.looked > 1:
                super().__getitem__("model.layers.0.mlp.down_proj.weight").zero_()
                raise RuntimeError("injected: the receiver broke half way")
        return super().__getitem__(name)


def synchronised(model: ModelConfig) -> tuple[WeightSync, Callable[[int], Tensors], Layout]:
    """A trainer and an engine of one rank, and the trainer's weights of a seed."""
    trainer, engine = mcore_layout(model, ParallelConfig(), 0, 1, F32), trtllm_layout(model, 1, 0, 0, F32)
    sync = WeightSync([trainer], [engine], canonical_shapes(model))
    return sync, lambda seed: mcore_shard(canonical_tensors(model, seed=seed), model, ParallelConfig(), 0, 1), engine


def test_b01_no_block_of_an_old_version_is_served_after_a_sync() -> None:
    sync, trainer, layout = synchronised(tiny())
    engine = CachingEngine(layout)

    def served(samples: int) -> tuple[list[int], set[int]]:
        found = engine.generate(IDS, samples)
        return [x["cached_tokens"] for x in found], {x["version"] for x in found}

    sync.run(trainer(1), engine, 1)
    assert served(4) == ([0, 4, 4, 4], {1})
    sync.run(trainer(2), engine, 2)
    assert served(4) == ([0, 4, 4, 4], {2})
    sync.run(trainer(2), engine, 3)  # nothing has changed: still a new version, still a fresh cache
    assert served(1) == ([0], {3})
    assert engine.events == ["begin", "commit 1", "begin", "commit 2", "begin", "commit 3"]
    whole, engine.tensors = engine.tensors, BreaksHalfWay(engine.tensors)
    with pytest.raises(SyncError, match="version 4 is not committed: .*broke half way"):
        sync.run(trainer(4), engine, 4)
    assert engine.events[-1] == "begin" and not engine.cache
    with pytest.raises(RuntimeError, match="no committed weights"):
        engine.generate(IDS)
    engine.tensors = whole
    sync.run(trainer(4), engine, 5)
    assert served(2) == ([0, 4], {5})
    with_cache = [x["text"] for x in engine.generate(IDS, 3)]
    assert [x["text"] for x in engine.generate(IDS, 3, prefix_cache=False)] == with_cache


class KernelEngine:
    """A fake engine that rewrites its weights after a load: expert rows in reverse, and the sum of q, k and v rows kept apart.

    `fault` "once": it rewrites after the first load only; "stale": it keeps the first sum; "twice": it rewrites what it has not undone.
    """

    def __init__(self, layout: Layout, model: ModelConfig, fault: str = "") -> None:
        self.layout, self.model, self.fault = layout, model, fault
        self.tensors = empty_tensors(layout)
        self.version: int | None = None
        self.sums: dict[int, torch.Tensor] = {}
        self.loads = 0

    def begin_update(self) -> None:
        self.version = None

    def weights(self) -> Mapping[str, torch.Tensor]:
        return self.tensors

    def commit(self, version: int, checksums: Mapping[str, int]) -> None:
        verify([self.layout], [piece_checksums(self.layout, self.tensors)], checksums)
        self.loads += 1
        for _ in range(2 if self.fault == "twice" and self.loads > 1 else 0 if self.fault == "once" and self.loads > 1 else 1):
            for tensor in self.experts():
                tensor.copy_(tensor.flip(1))
        for i in range(self.model.num_layers):
            if not (self.fault == "stale" and i in self.sums):
                self.sums[i] = self.tensors[f"model.layers.{i}.self_attn.qkv_proj.weight"].sum(0)
        self.version = version

    def verify(self) -> None:
        """What was committed was compared before the rewriting."""

    def experts(self) -> Iterator[torch.Tensor]:
        return (tensor for name, tensor in self.tensors.items() if ".mlp.experts." in name)

    def sleep(self) -> None:
        self.version = None
        self.sums.clear()
        for tensor in self.tensors.values():
            tensor.fill_(float("nan"))

    def log_probs(self, ids: list[int]) -> torch.Tensor:
        """[tokens, vocabulary] of a toy model that uses every rewritten weight, as the kernels hold them."""
        assert self.version is not None
        x = self.tensors["model.embed_tokens.weight"][ids]
        for i in range(self.model.num_layers):
            p = f"model.layers.{i}.mlp.experts."
            up_gate, down = (self.tensors[p + name].flip(1) for name in ("w3_w1_weight", "w2_weight"))
            x = x + toy_layer(x, self.sums[i], [u.chunk(2) for u in up_gate], list(down))
        return (x @ self.tensors["lm_head.weight"].T).log_softmax(-1)


def toy_layer(x: torch.Tensor, qkv_sum: torch.Tensor, up_gate: list[tuple[torch.Tensor, torch.Tensor]], down: list[torch.Tensor]) -> torch.Tensor:
    h = torch.tanh(x * qkv_sum)
    return sum((torch.nn.functional.silu(h @ gate.T) * (h @ up.T)) @ d.T for (up, gate), d in zip(up_gate, down))  # type: ignore[return-value]


def trainers_log_probs(full: Tensors, model: ModelConfig, ids: list[int]) -> torch.Tensor:
    """The same toy model from the canonical tensors."""
    x = full["model.embed_tokens.weight"][ids]
    for i in range(model.num_layers):
        s = f"model.layers.{i}."
        qkv = torch.cat([full[f"{s}self_attn.{n}_proj.weight"] for n in "qkv"]).sum(0)
        experts = [[full[f"{s}mlp.experts.{e}.{n}_proj.weight"] for n in ("up", "gate", "down")] for e in range(model.moe.num_experts)]
        x = x + toy_layer(x, qkv, [(up, gate) for up, gate, _ in experts], [down for _, _, down in experts])
    return (x @ full["lm_head.weight"].T).log_softmax(-1)


def gate(engine: KernelEngine, full: Tensors, model: ModelConfig) -> None:
    """The product's own check of the trainer's log-probs against the engine's, on a fixed prompt."""
    gap = (engine.log_probs(IDS) - trainers_log_probs(full, model, IDS)).abs().max().item()
    run = SimpleNamespace(config=SimpleNamespace(log_prob_gap_gate=0.2, ratio_deviation_gate=None, run=SimpleNamespace(strict=True)))
    check_on_policy(run, Batch(1, metrics={"actor/log_prob_gap_max": gap}), "actor/log_prob_gap_max")  # type: ignore[arg-type]


def kernel_model() -> tuple[ModelConfig, Tensors, Tensors]:
    model = tiny("qwen3_moe", num_layers=2)
    full = {name: tensor * 0.4 for name, tensor in canonical_tensors(model).items()}
    return model, full, {name: 2 * tensor for name, tensor in full.items()}


def test_b07_weights_that_an_engine_rewrites_are_right_after_every_sync() -> None:
    """W, W again, 2W, sleep, W: the same answer for the same weights, and that of a fresh engine for others."""
    model, once, twice = kernel_model()
    sync, _, layout = synchronised(model)

    def load(engine: KernelEngine, full: Tensors, version: int) -> torch.Tensor:
        sync.run(mcore_shard(full, model, ParallelConfig(), 0, 1), engine, version)
        gate(engine, full, model)
        return engine.log_probs(IDS)

    engine = KernelEngine(layout, model)
    first = load(engine, once, 1)
    assert torch.equal(load(engine, once, 2), first)
    changed = load(engine, twice, 3)
    assert torch.equal(changed, load(KernelEngine(layout, model), twice, 1)) and not torch.allclose(changed, first)
    engine.sleep()
    assert torch.equal(load(engine, once, 4), first)


@pytest.mark.parametrize("fault", ["once", "twice", "stale"])
def test_b07_an_engine_that_skips_or_repeats_its_rewriting_is_stopped_by_the_gate(fault: str) -> None:
    model, once, twice = kernel_model()
    sync, _, layout = synchronised(model)
    engine = KernelEngine(layout, model, fault)
    sync.run(mcore_shard(once, model, ParallelConfig(), 0, 1), engine, 1)
    gate(engine, once, model)
    sync.run(mcore_shard(twice, model, ParallelConfig(), 0, 1), engine, 2)
    with pytest.raises(OffPolicy, match=r"step 1: actor/log_prob_gap_max is .*above algorithm.log_prob_gap_max 0.2"):
        gate(engine, twice, model)
