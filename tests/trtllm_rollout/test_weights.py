"""The engine generates from committed, verified, resident weights, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from checkpoint.hf import read_hf
from parallel.errors import UserError
from parallel.model_config import ModelConfig
from tests.models import write_model
from tests.trtllm_rollout.engines import checksums, greedy_reference, make_engine, prompts, requests
from tests.worker_pool import run_ranks
from trtllm_rollout.embedded.engine import EmbeddedEngine
from trtllm_rollout.protocol import EngineRefuses

WORK = requests(prompts(3), samples=2, max_tokens=6)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("one"), seed=1)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("two"), seed=2)


def load(engine: EmbeddedEngine, directory: str | Path, rank: int = 0) -> None:
    read_hf(directory, engine.layouts[rank], engine.weights(), ModelConfig.from_directory(directory))


def test_the_weights_are_the_layout(directory: Path) -> None:
    engine = make_engine(directory)
    (layout,) = engine.layouts
    assert {n: (tuple(t.shape), t.dtype) for n, t in engine.weights().items()} == {t.name: (t.shape, t.dtype) for t in layout.tensors}


def test_nothing_is_generated_without_a_committed_version(directory: Path) -> None:
    engine = make_engine(directory, version=None)
    assert engine.version is None
    with pytest.raises(EngineRefuses, match="no weights version is committed"):
        engine.generate(WORK)
    engine.commit(1)
    engine.generate(WORK)
    engine.begin_update()
    assert engine.version is None
    with pytest.raises(EngineRefuses, match="update is under way"):
        engine.generate(WORK)
    engine.commit(2)
    assert {v for c in engine.generate(WORK) for v in c.versions} == {2}
    with pytest.raises(EngineRefuses, match="without begin_update"):
        engine.commit(3)


def test_new_weights_are_used_at_once_and_old_ones_give_the_old_answer(directory: Path, other: Path) -> None:
    """Nothing derived from weights is kept: W, W again, other, W give A, A, B, A, each that of a fresh engine."""
    expected = {d: [c.token_ids for c in make_engine(d).generate(WORK)] for d in (directory, other)}
    engine = make_engine(directory)
    for version, source in enumerate((directory, directory, other, directory), start=2):
        engine.begin_update()
        load(engine, source)
        engine.commit(version, checksums(source))
        before = engine.stats()["prefill_tokens"]
        done = engine.generate(WORK)
        assert [c.token_ids for c in done] == expected[source]
        computed = engine.stats()["prefill_tokens"] - before
        assert computed == sum(len(r.prompt_ids) for r in WORK), "a prompt is computed anew under new weights"
        assert {v for c in done for v in c.versions} == {version}


def test_an_update_in_the_middle_ends_unfinished_samples_as_aborted(directory: Path, other: Path) -> None:
    engine = make_engine(directory)
    engine.submit(requests([(5,)], max_tokens=3) + requests([(6, 7)], first_id=1, samples=2, max_tokens=20))
    stream = engine.stream()
    assert next(stream).finish_reason == "length"
    engine.begin_update()
    load(engine, other)
    rest = list(engine.stream())
    assert [(c.finish_reason, set(c.versions)) for c in rest] == [("abort", {1})] * 2
    engine.commit(2, checksums(other))
    answer = engine.generate(requests([(6, 7)], temperature=0, max_tokens=10))
    assert [c.token_ids for c in answer] == greedy_reference(other, [(6, 7)], 10, stop=None)


def test_a_failed_update_is_never_served(directory: Path, other: Path) -> None:
    """The receiver stops half way: some tensors are new, no commit comes."""
    engine = make_engine(directory)
    engine.begin_update()
    for tensor in list(engine.weights().values())[:5]:
        tensor.zero_()
    with pytest.raises(EngineRefuses):
        engine.generate(WORK)
    engine.commit(2, checksums(other))
    with pytest.raises(EngineRefuses, match="not what was committed"):
        engine.generate(WORK)


def test_one_changed_byte_is_found_before_the_first_token_and_named(directory: Path) -> None:
    engine = make_engine(directory)
    engine.weights()["model.layers.2.mlp.gate_up_proj.weight"].view(torch.uint8)[130, 17] ^= 1
    for _ in range(2):
        with pytest.raises(EngineRefuses, match=r"model\.layers\.2\.mlp\.up_proj\.weight"):
            engine.generate(WORK)
    assert engine.stats()["tokens"] == 0
    engine.begin_update()
    load(engine, directory)
    engine.commit(2, checksums(directory))
    assert len(engine.generate(WORK)) == 6


def test_checksums_are_computed_once_a_version_and_their_cost_reported(directory: Path) -> None:
    engine = make_engine(directory)
    engine.generate(WORK)
    cost = engine.stats()["checksum_seconds"]
    assert cost > 0
    engine.generate(WORK)
    assert engine.stats()["checksum_seconds"] == cost


def test_sleep_frees_storage_and_weights_that_slept_must_be_written_again(directory: Path) -> None:
    engine = make_engine(directory)
    first = [c.token_ids for c in engine.generate(WORK)]
    held, resident = engine.weights(), engine.stats()["weights_bytes"]
    assert engine.stats()["kv_cache_bytes"] > 0 and resident == sum(t.nbytes for t in engine.layouts[0].tensors)
    engine.sleep(["kv_cache"])
    assert engine.stats()["kv_cache_bytes"] == 0 and engine.version == 1
    with pytest.raises(EngineRefuses, match="kv_cache asleep"):
        engine.generate(WORK)
    engine.wake(["kv_cache"])
    assert [c.token_ids for c in engine.generate(WORK)] == first, "waking the cache alone needs no new weights"
    engine.sleep(["kv_cache", "weights"])
    assert engine.stats()["weights_bytes"] == engine.stats()["kv_cache_bytes"] == 0 and engine.version is None
    for refused in (lambda: engine.generate(WORK), engine.weights, lambda: engine.commit(2)):
        with pytest.raises(EngineRefuses, match="asleep"):
            refused()
    engine.wake(["weights", "kv_cache"])
    with pytest.raises(EngineRefuses, match="freed by sleep"):
        engine.generate(WORK)
    engine.begin_update()
    load(engine, directory)
    engine.commit(2, checksums(directory))
    assert [c.token_ids for c in engine.generate(WORK)] == first
    assert all(held[n].data_ptr() == t.data_ptr() for n, t in engine.weights().items()), "tensors handed out before stay the engine's"
    with pytest.raises(UserError, match="'kvcache'.*'kv_cache'"):
        engine.sleep(["kvcache"])


def test_one_tag_is_as_good_as_a_list_of_it(directory: Path) -> None:
    engine = make_engine(directory)
    held = engine.stats()["weights_bytes"]
    engine.sleep("weights")
    assert engine.stats()["weights_bytes"] == 0
    with pytest.raises(EngineRefuses, match="asleep"):
        engine.weights()
    engine.wake("weights")
    assert engine.stats()["weights_bytes"] == held
    load(engine, directory)
    engine.commit(2)
    assert engine.generate(requests([(5, 6)], max_tokens=2))


def test_weights_that_give_no_numbers_are_refused_and_leave_nothing_behind(directory: Path) -> None:
    engine = make_engine(directory)
    short = requests([(5, 6)], temperature=0, max_tokens=8)
    expected = [c.token_ids for c in engine.generate(short)]
    engine.begin_update()
    engine.weights()["model.layers.0.self_attn.qkv_proj.weight"].fill_(float("nan"))
    engine.commit(2)
    with pytest.raises(EngineRefuses, match="version 2 are not finite"):
        engine.generate(requests([(5,) * 30]))
    engine.begin_update()
    load(engine, directory)
    engine.commit(3)
    assert [c.token_ids for c in engine.generate(short)] == expected, "the long prompt's slot still held NaN behind the short one"


def _refusals(directory: str, tensor: str, at_rank: int, expect: bool) -> list[str]:
    engine = make_engine(directory, version=None, tp=2)
    engine.commit(5, checksums(directory) if expect else None)
    if dist.get_rank() == at_rank:
        engine.weights()[tensor].view(torch.uint8).view(-1)[1001 % engine.weights()[tensor].nbytes] ^= 4
    said = []
    for _ in range(2):
        try:
            engine.generate(WORK)
        except EngineRefuses as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("tensor, at_rank, expect, named", [
    ("model.layers.1.self_attn.o_proj.weight", 1, True, "model.layers.1.self_attn.o_proj.weight"),
    ("lm_head.weight", 0, True, "lm_head.weight"),
    ("model.norm.weight", 1, False, "model.norm.weight"),  # a replica: caught even without checksums to compare with
])
def test_one_changed_byte_on_one_rank_makes_every_rank_refuse(tensor: str, at_rank: int, expect: bool, named: str, directory: Path) -> None:
    for messages in run_ranks(2, _refusals, str(directory), tensor, at_rank, expect):
        assert len(messages) == 2 and all(named in m for m in messages), messages


def _version_mix(directory: str) -> str:
    engine = make_engine(directory, version=1 + dist.get_rank(), tp=2)
    try:
        engine.generate(WORK)
    except EngineRefuses as error:
        return str(error)
    return ""


def test_ranks_with_different_versions_refuse(directory: Path) -> None:
    for message in run_ranks(2, _version_mix, str(directory)):
        assert "versions [1, 2]" in message


def _half_committed(directory: str) -> list[str]:
    engine = make_engine(directory, version=None if dist.get_rank() else 1, tp=2)
    said = []
    for _ in range(2):
        try:
            engine.generate(WORK)
        except EngineRefuses as error:
            said.append(str(error))
    engine.begin_update()
    engine.commit(2)
    return [*said, str(len(engine.generate(WORK)))]


def test_every_rank_refuses_where_one_has_no_version_and_all_recover_together(directory: Path) -> None:
    for first, second, count in run_ranks(2, _half_committed, str(directory)):
        assert "tp rank 1: no weights version is committed" in first and "refuses" not in second and count == "6"


def _padding_ids(directory: str) -> set[int]:
    engine = make_engine(directory, tp=2)
    for name in ("lm_head.weight", "model.embed_tokens.weight"):  # the row past the vocabulary, as loud as can be
        if dist.get_rank() == 1:
            engine.weights()[name][-1] = 1000.0
    return {t for c in engine.generate(requests(prompts(4), samples=20, temperature=3.0, max_tokens=15)) for t in c.token_ids}


def test_padding_rows_of_the_vocabulary_are_never_sampled(directory: Path) -> None:
    """203 ids over 2 ranks leave one padding row; its content is part of no tensor and must not matter."""
    first, second = run_ranks(2, _padding_ids, str(directory))
    assert first == second and max(first) < 203 and len(first) > 100


def test_an_engine_must_match_its_group(directory: Path) -> None:
    with pytest.raises(ValueError, match="tp rank 0 of 2"):
        EmbeddedEngine(ModelConfig.from_directory(directory), torch.float32, None, tp=2)



def test_the_embedded_engine_has_every_call_of_the_protocol() -> None:
    from trtllm_rollout.protocol import Engine

    missing = [n for n in vars(Engine) if not n.startswith("_") and not hasattr(EmbeddedEngine, n)]
    assert missing == []
