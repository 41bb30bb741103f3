"""What is reported of every token, and what ends a sample: against transformers' logits and the definitions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from parallel.errors import UserError
from tests.models import reference_logits, write_model
from tests.trtllm_rollout.engines import greedy_reference, make_engine, prompts, requests
from tests.worker_pool import run_ranks
from trtllm_rollout.embedded.stop_strings import met_stop
from trtllm_rollout.protocol import Completion, Progress, Request, SamplingParams

PROMPT = (9, 8, 7, 40, 9)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), "llama", seed=5)


def text(ids: object) -> str:
    """A tokenizer of the tests: every id is a character, so stop strings span tokens."""
    return "".join(chr(0x100 + i) for i in ids)  # type: ignore[attr-defined]


def _logits(directory: Path, done: Completion, prompt: tuple[int, ...] = PROMPT) -> torch.Tensor:
    """transformers' logits [tokens, vocab] from which each token was drawn."""
    return reference_logits(directory, [[*prompt, *done.token_ids]])[0, len(prompt) - 1:-1].double()


def _penalised(logits: torch.Tensor, sampling: SamplingParams, prompt: tuple[int, ...], answer: tuple[int, ...]) -> torch.Tensor:
    """The definitions, token by token."""
    out = logits.clone()
    for token in {*prompt, *answer}:
        out[token] = out[token] / sampling.repetition_penalty if out[token] > 0 else out[token] * sampling.repetition_penalty
    for token in set(answer):
        out[token] -= sampling.presence_penalty
    if len(answer) < sampling.min_tokens:
        out[list(sampling.stop_token_ids)] = -torch.inf
    return out


def test_the_three_log_probs_are_those_of_temperature_of_the_model_and_of_what_was_drawn_from(directory: Path) -> None:
    sampling = SamplingParams(0.7, 30, 0.9, 20, min_p=0.02, repetition_penalty=1.3, presence_penalty=0.4)
    for done in make_engine(directory).generate([Request(0, PROMPT, sampling, 3, (4,))]):
        logits = _logits(directory, done)
        for t, token in enumerate(done.token_ids):
            assert done.log_probs[t] == pytest.approx(float(torch.log_softmax(logits[t] / 0.7, -1)[token]), abs=1e-4)
            assert done.raw_log_probs[t] == pytest.approx(float(torch.log_softmax(logits[t], -1)[token]), abs=1e-4)
            p = torch.softmax(_penalised(logits[t], sampling, PROMPT, done.token_ids[:t]) / 0.7, -1)
            p = torch.where(p >= p.topk(30).values[-1], p, 0)
            ranked, order = (p / p.sum()).sort(descending=True)
            kept = order[:int((ranked.cumsum(-1) < 0.9).sum()) + 1]
            kept = kept[p[kept] >= 0.02 * p.max()]
            assert token in kept
            assert done.sampled_log_probs[t] == pytest.approx(float((p[token] / p[kept].sum()).log()), abs=1e-3)


def test_greedy_draws_from_one_token_and_penalties_move_it(directory: Path) -> None:
    sampling = SamplingParams(0, max_tokens=25, repetition_penalty=1.8, presence_penalty=0.5)
    (done,) = make_engine(directory).generate([Request(0, PROMPT, sampling)])
    logits = _logits(directory, done)
    assert list(done.token_ids) == [int(_penalised(logits[t], sampling, PROMPT, done.token_ids[:t]).argmax()) for t in range(25)]
    assert done.token_ids != greedy_reference(directory, [PROMPT], 25, stop=None)[0], "the penalties change something here"
    assert set(done.sampled_log_probs) == {0.0} and done.log_probs == done.raw_log_probs


def test_without_extras_the_three_log_probs_are_one(directory: Path) -> None:
    (done,) = make_engine(directory).generate(requests([PROMPT], max_tokens=12))
    assert done.log_probs == done.raw_log_probs == done.sampled_log_probs


def test_the_most_likely_tokens_and_the_prompts_own_log_probs(directory: Path) -> None:
    """Also in chunks, for some requests of a batch only, and with a beginning that the prefix cache knows."""
    long = tuple(range(3, 90))
    plain = requests([long[:70]], first_id=5, max_tokens=8)
    asked = [Request(i, ids, SamplingParams(0.5, max_tokens=6, top_log_probs=4 - i, prompt_log_probs=True), 2, (i,))
             for i, ids in enumerate((long, PROMPT))]
    engine = make_engine(directory, max_batch_size=8, max_num_tokens=40)
    for done in engine.generate([*plain, *asked]):
        if done.request_id == 5:
            assert done.top_log_probs == () == done.prompt_log_probs
            continue
        prompt = asked[done.request_id].prompt_ids
        whole = torch.log_softmax(reference_logits(directory, [[*prompt, *done.token_ids]])[0].double(), -1)
        expected = whole[:len(prompt) - 1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        np.testing.assert_allclose(done.prompt_log_probs, expected, atol=1e-4)
        for t, top in enumerate(done.top_log_probs):
            values, ids = whole[len(prompt) - 1 + t].topk(4 - done.request_id)
            assert [token for token, _ in top] == ids.tolist()
            np.testing.assert_allclose([value for _, value in top], values, atol=1e-4)
        assert len(done.top_log_probs) == 6


def test_a_stop_string_ends_a_sample_with_the_token_that_completes_it(directory: Path) -> None:
    (free,) = greedy_reference(directory, [PROMPT], 30, stop=None)
    at = next(i for i in range(8, 29) if text(free[i - 1:i + 1]) not in text(free[:i]))
    stop = text(free[i - 1:i + 1]) if (i := at) else ""
    engine = make_engine(directory, detokenize=text)
    (done,) = engine.generate(requests([PROMPT], temperature=0, max_tokens=30, stop=("zz", stop)))
    assert (done.token_ids, done.finish_reason, done.stop_reason) == (free[:at + 1], "stop", stop)
    (done,) = engine.generate(requests([PROMPT], temperature=0, max_tokens=30, stop=(stop,), min_tokens=at + 2))
    assert len(done.token_ids) >= at + 2, "min_tokens holds for strings too"
    with pytest.raises(UserError, match="stop strings.*tokenizer"):
        make_engine(directory).generate(requests([PROMPT], stop=("x",)))


def test_a_stop_string_that_came_before_min_tokens_ends_nothing_later(directory: Path) -> None:
    engine = make_engine(directory, detokenize=text)
    ids = engine.generate(requests([PROMPT], temperature=3.0, max_tokens=12))[0].token_ids
    assert len(set(ids)) == len(ids), "no token comes twice, so the stop string below does neither"
    early = engine.generate(requests([PROMPT], temperature=3.0, max_tokens=12, stop=(text(ids[1:3]),), min_tokens=5))[0]
    assert (early.token_ids, early.finish_reason) == (ids, "length"), "its last token was the third"
    at = engine.generate(requests([PROMPT], temperature=3.0, max_tokens=12, stop=(text(ids[3:5]),), min_tokens=5))[0]
    assert (at.token_ids, at.stop_reason) == (ids[:5], text(ids[3:5]))


def test_a_stop_string_is_found_however_many_tokens_its_characters_take() -> None:
    """Bytes as tokens, and a last token that alone is longer than the stop string."""
    words = [*(bytes([b]) for b in range(256)), b"c and much more than the stop string is long"]

    def decode(ids: Sequence[int]) -> str:
        return b"".join(words[i] for i in ids).decode("utf-8", "replace")

    birds = 6 * "\N{PARROT}"
    for answer, stop in (([*f"ab{birds}".encode(), 256], f"b{birds}c"), ([*birds.encode()], "\N{PARROT}")):
        holds = [stop in decode(answer[:n]) for n in range(1, len(answer) + 1)]
        met = [met_stop(answer[:n], (stop,), decode) == stop for n in range(1, len(answer) + 1)]
        first = holds.index(True)
        assert met[:first + 1] == holds[:first + 1], (answer, stop)


def test_no_stop_id_comes_before_min_tokens_and_the_one_that_ends_it_is_named(directory: Path) -> None:
    (free,) = greedy_reference(directory, [PROMPT], 30, stop=None)
    sampling = SamplingParams(0, max_tokens=30, stop_token_ids=(free[2], free[4]), min_tokens=9)
    (done,) = make_engine(directory).generate([Request(0, PROMPT, sampling)])
    logits = _logits(directory, done)
    assert list(done.token_ids[:9]) == [int(_penalised(logits[t], sampling, PROMPT, done.token_ids[:t]).argmax()) for t in range(9)]
    assert not {free[2], free[4]} & set(done.token_ids[:9])
    (done,) = make_engine(directory).generate(requests([PROMPT], temperature=0, max_tokens=30, stop_token_ids=(free[2], 199)))
    assert done.stop_reason == free[2] and done.finish_reason == "stop"


def test_step_tells_tokens_as_they_come_and_takes_work_in_between(directory: Path) -> None:
    engine = make_engine(directory, max_batch_size=3)
    first = Request(0, PROMPT, SamplingParams(max_tokens=6), 2, (1,), every_token=True)
    quiet, late = Request(1, PROMPT, SamplingParams(max_tokens=4), 1, (2,)), Request(2, (5,), SamplingParams(max_tokens=3), 1, (3,), every_token=True)
    expected = {(c.request_id, c.sample): c for c in make_engine(directory).generate([first, quiet, late])}
    assert engine.step() == []
    engine.submit([first, quiet])
    told: dict[tuple[int, int], list[int]] = {}
    done: list[Completion] = []
    for number in range(40):
        if number == 2:
            engine.submit([late])
        for event in engine.step():
            key = event.request_id, event.sample
            if isinstance(event, Progress):
                assert len(event.token_ids) == len(event.log_probs) == 1 and key not in {(c.request_id, c.sample) for c in done}
                told.setdefault(key, []).extend(event.token_ids)
            else:
                done.append(event)
    assert {(c.request_id, c.sample): c for c in done} == expected
    assert {key: tuple(ids) for key, ids in told.items()} == {key: c.token_ids for key, c in expected.items() if key[0] != 1}


def test_timing_and_aggregates_are_those_of_the_samples(directory: Path) -> None:
    engine = make_engine(directory, max_batch_size=2)
    done = engine.generate(requests(prompts(3), samples=2, max_tokens=5))
    for c in done:
        assert 0 <= c.timing.queued <= c.timing.first_token <= c.timing.total and c.timing.preemptions == 0
    stats = engine.stats()
    assert stats["longest_seconds"] == max(c.timing.total for c in done)
    assert stats["mean_first_token_seconds"] == pytest.approx(np.mean([c.timing.first_token for c in done]))
    assert stats["batch_occupancy"] > 0.8 and stats["kv_blocks_used"] == 0 < stats["kv_blocks_total"]
    assert stats["seconds"] == pytest.approx(sum(stats[f"seconds_{p}"] for p in ("prefill", "decode", "sampling", "other")), rel=0.2)


def _everything(directory: str) -> list[Completion]:
    engine = make_engine(directory, tp=2, max_batch_size=4, detokenize=text)
    sampling = SamplingParams(0.9, 50, 0.95, 9, (4, 5), 0.01, 1.1, 0.1, 2, (text([60]),), 3, True)
    return engine.generate([Request(i, ids, sampling, 2, (i,)) for i, ids in enumerate(prompts(4))])


def test_every_rank_hears_everything_that_the_leader_draws(directory: Path) -> None:
    first, second = run_ranks(2, _everything, str(directory))
    assert first == second and all(len(c.top_log_probs[0]) == 3 for c in first)
