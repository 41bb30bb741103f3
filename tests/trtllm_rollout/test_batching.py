"""What a request gets depends on the request alone; slots, prompts and aborted work are accounted for."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from parallel.errors import UserError
from tests.models import write_model
from tests.trtllm_rollout.engines import greedy_reference, make_engine, prompts, requests, tokens
from tests.worker_pool import run_ranks
from trtllm_rollout.protocol import Completion, EngineRefuses, Request, SamplingParams


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), "qwen2", seed=3)


def test_a_request_comes_out_the_same_alone_among_others_in_any_order_and_after_a_restart(directory: Path) -> None:
    work = requests(prompts(9), samples=3, temperature=1.0, max_tokens=14)
    work += requests(prompts(4, seed=1), first_id=50, temperature=0.8, top_k=9, max_tokens=25)
    together = {(c.request_id, c.sample): c for c in make_engine(directory).generate(work)}
    shuffled = list(work)
    random.Random(0).shuffle(shuffled)
    for engine, parts in ((make_engine(directory), [shuffled]), (make_engine(directory, max_batch_size=5), [shuffled]),
                          (make_engine(directory, max_batch_size=1), [[w] for w in work])):
        done = [c for part in parts for c in engine.generate(part)]
        assert tokens(done) == tokens(list(together.values()))
        for c in done:
            assert c.log_probs == pytest.approx(together[c.request_id, c.sample].log_probs, abs=1e-5)


def test_the_random_stream_is_all_that_tells_samples_apart(directory: Path) -> None:
    engine = make_engine(directory)
    sampling = SamplingParams(max_tokens=12)
    same = engine.generate([Request(i, (5, 6, 7), sampling, 1, (1, 2, 3)) for i in range(3)])
    assert len({c.token_ids for c in same}) == 1
    others = engine.generate([Request(0, (5, 6, 7), sampling, 4, (1, 2, 3)), Request(1, (5, 6, 7), sampling, 4, (1, 2, 4))])
    assert len({c.token_ids for c in others}) == 8
    assert others[0].token_ids == same[0].token_ids


def test_samples_of_a_prompt_are_separate_requests_with_the_prompt_computed_once(directory: Path) -> None:
    texts = prompts(5)
    for max_batch_size in (2, 3, 64):
        engine = make_engine(directory, max_batch_size=max_batch_size)
        done = engine.generate(requests(texts, samples=7, max_tokens=9))
        assert engine.stats()["prefill_tokens"] == sum(map(len, texts))
        assert engine.stats()["tokens"] == 5 * 7 * 9
        alone = make_engine(directory, max_batch_size=max_batch_size)
        singles = [c for r in requests(texts, samples=7, max_tokens=9) for c in alone.generate([r])]
        assert [c.token_ids for c in done] == [c.token_ids for c in singles]
        assert [(c.request_id, c.sample) for c in done] == [(i, k) for i in range(5) for k in range(7)]


def test_stop_ids_end_a_sample_and_stay_in_it(directory: Path) -> None:
    text = (9, 8, 7)
    (free,) = greedy_reference(directory, [text], 30, stop=None)
    stop = free[6]
    (done,) = make_engine(directory).generate(requests([text], temperature=0, max_tokens=30, stop_token_ids=(199, stop)))
    assert done.token_ids == free[:free.index(stop) + 1] and done.finish_reason == "stop"
    exactly = free.index(stop) + 1
    (done,) = make_engine(directory).generate(requests([text], temperature=0, max_tokens=exactly, stop_token_ids=(stop,)))
    assert done.finish_reason == "stop", "a stop id in the last allowed place is a stop, not a cut"
    (done,) = make_engine(directory).generate(requests([text], temperature=0, max_tokens=exactly - 1, stop_token_ids=(stop,)))
    assert done.finish_reason == "length" and len(done.token_ids) == exactly - 1


def test_settings_of_an_earlier_request_do_not_linger_in_its_slot(directory: Path) -> None:
    engine = make_engine(directory, max_batch_size=1)
    strict = Request(0, (9, 8, 7), SamplingParams(0.5, 3, 0.9, 12, tuple(range(3, 203))), 1, (1,))
    plain = Request(1, (9, 8, 7), SamplingParams(max_tokens=12), 1, (1,))
    expected = make_engine(directory).generate([plain])
    assert engine.generate([strict, plain])[1:] == expected and expected[0].finish_reason == "length"


def test_every_token_has_a_log_prob_and_a_version(directory: Path) -> None:
    engine = make_engine(directory, version=41)
    for c in engine.generate(requests(prompts(6), samples=2, max_tokens=11, stop_token_ids=(4, 5, 6, 7, 8))):
        assert len(c.token_ids) == len(c.log_probs) == len(c.versions) and set(c.versions) == {41}
        assert all(p <= 0 for p in c.log_probs)


def test_stream_yields_as_samples_finish_and_takes_new_work_on_the_way(directory: Path) -> None:
    engine = make_engine(directory, max_batch_size=4)
    short, long = requests([(5,)], max_tokens=2)[0], requests([(6,)], first_id=1, max_tokens=40)[0]
    late = requests([(7,), (8,)], first_id=2, samples=3, max_tokens=50)
    engine.submit([long, short])
    seen: list[Completion] = []
    for c in engine.stream():
        if not seen:
            engine.submit(late)
        seen.append(c)
    assert [c.request_id for c in seen[:2]] == [0, 1]
    assert tokens(seen) == tokens(make_engine(directory).generate([short, long, *late]))


def test_an_aborted_request_ends_with_what_it_has_and_disturbs_nobody(directory: Path) -> None:
    work = requests(prompts(5), samples=2, max_tokens=20)
    work.insert(0, Request(90, (5,), SamplingParams(max_tokens=3), 1, (0,)))
    undisturbed = tokens(make_engine(directory, max_batch_size=3).generate(work))
    engine = make_engine(directory, max_batch_size=3)
    engine.submit(work)
    seen = []
    for c in engine.stream():
        if c.request_id == 90:
            engine.abort([0, 3, 12345])
        seen.append(c)
    result = tokens(seen)
    assert result.keys() == undisturbed.keys()
    for c in seen:
        expected = undisturbed[c.request_id, c.sample]
        if c.request_id in (0, 3):
            assert c.finish_reason == "abort" and c.token_ids == expected[:len(c.token_ids)] and len(c.token_ids) < 20
        else:
            assert c.finish_reason == "length" and c.token_ids == expected
    assert any(c.token_ids for c in seen if c.request_id == 0) and not any(c.token_ids for c in seen if c.request_id == 3)


def test_all_slots_come_back_after_random_mixes_with_aborts(directory: Path) -> None:
    """And every sample is the one it would have been, or its beginning where it was aborted."""
    rng = random.Random(5)
    engine, undisturbed = make_engine(directory, max_batch_size=6), make_engine(directory)
    for trial in range(12):
        work = []
        for i, text in enumerate(prompts(rng.randint(1, 6), seed=trial, longest=9)):
            sampling = SamplingParams(max_tokens=rng.randint(1, 9), stop_token_ids=(3, 4, 5))
            work.append(Request(100 * trial + i, text, sampling, rng.randint(1, 8), (trial, i)))
        expected = {(c.request_id, c.sample): c for c in undisturbed.generate(work)}
        engine.submit(work)
        seen = []
        for c in engine.stream():
            seen.append(c)
            if rng.random() < 0.15:
                engine.abort([rng.choice(work).request_id])
        assert {(c.request_id, c.sample) for c in seen} == expected.keys() and len(seen) == len(expected)
        for c in seen:
            whole = expected[c.request_id, c.sample]
            assert c.token_ids == whole.token_ids[:len(c.token_ids)]
            assert c.finish_reason in (whole.finish_reason, "abort") and (c.finish_reason == "abort" or c.token_ids == whole.token_ids)
        stats = engine.stats()
        assert (stats["running_samples"], stats["waiting_samples"], stats["held_prompts"]) == (0, 0, 0)


@pytest.mark.parametrize("make, words", [
    (lambda: Request(3, ()), ["request 3", "empty"]),
    (lambda: Request(3, (1,), samples=0), ["request 3", "samples is 0", "at least 1"]),
    (lambda: Request(3, (1,), stream=(-1,)), ["request 3", "-1"]),
    (lambda: SamplingParams(temperature=-0.5), ["temperature is -0.5", "0 (greedy)"]),
    (lambda: SamplingParams(temperature=float("nan")), ["temperature is nan"]),
    (lambda: SamplingParams(top_p=0.0), ["top_p is 0.0", "at most 1"]),
    (lambda: SamplingParams(top_k=-1), ["top_k is -1"]),
    (lambda: SamplingParams(max_tokens=0), ["max_tokens is 0"]),
    (lambda: SamplingParams(stop_token_ids=(-2,)), ["stop token id is -2"]),
    # numbers that arrays do not hold, and those under which the logits of good weights are no numbers any more
    (lambda: SamplingParams(top_k=1 << 63), ["top_k is 9223372036854775808", "at most"]),
    (lambda: SamplingParams(stop_token_ids=(1 << 63,)), ["stop token id is", "at most"]),
    (lambda: SamplingParams(temperature=1e-40), ["temperature is 1e-40", "1e-05"]),
    (lambda: SamplingParams(temperature=10 ** 400), ["temperature is 1000", "100000"]),
    (lambda: SamplingParams(repetition_penalty=1e-40), ["repetition_penalty is 1e-40", "0.01 to 100"]),
    (lambda: SamplingParams(presence_penalty=-1e39), ["presence_penalty is -1e+39", "-100 to 100"]),
    (lambda: SamplingParams(presence_penalty=10 ** 400), ["presence_penalty is 1000"]),
])
def test_requests_that_make_no_sense_are_refused(make: object, words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        make()  # type: ignore[operator]
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("sampling", [
    dict(temperature=1e-5), dict(temperature=1e5), dict(temperature=1e-5, repetition_penalty=0.01), dict(temperature=1e-5, presence_penalty=-100),
    dict(temperature=1e5, repetition_penalty=100, presence_penalty=100), dict(top_k=1 << 31, stop_token_ids=(1 << 31,), top_log_probs=1 << 31)])
def test_the_most_extreme_settings_that_are_taken_leave_the_engine_serving(sampling: dict[str, float], directory: Path) -> None:
    engine = make_engine(directory)
    (done,) = engine.generate(requests([(5, 6, 7)], max_tokens=5, **sampling))
    assert len(done.token_ids) == 5 and all(math.isfinite(p) for p in (*done.log_probs, *done.raw_log_probs, *done.sampled_log_probs))
    assert engine.generate(requests([(5, 6, 7)], max_tokens=2)), "one request's settings are nothing that others suffer from"


def test_requests_that_do_not_fit_the_engine_are_refused_with_the_numbers(directory: Path) -> None:
    engine = make_engine(directory, max_seq_len=30)
    assert len(engine.generate(requests([(5,) * 20], max_tokens=10))[0].token_ids) == 10, "exactly full is allowed"
    for work, words in ((requests([(5,) * 21], max_tokens=10), ["21", "10", "31", "30", "256"]),
                        (requests([(5, 203)]), ["203", "vocabulary"]), (requests([(5, -1)]), ["-1", "vocabulary"]),
                        (2 * requests([(5,)], max_tokens=2), ["request 0", "differ"])):
        with pytest.raises(UserError) as error:
            engine.generate(work)
        assert all(word in str(error.value) for word in words), error.value
    with pytest.raises(UserError, match="max_seq_len is 300.*256"):
        make_engine(directory, max_seq_len=300)
    assert engine.stats()["waiting_samples"] == 0, "a refused submission queues nothing"


def _different_work(directory: str) -> list[str]:
    import torch.distributed as dist

    engine = make_engine(directory, tp=2)
    said = []
    try:
        engine.generate(requests([(5, 6 + dist.get_rank())], max_tokens=3))
    except EngineRefuses as error:
        said.append(str(error))
    return said


def test_ranks_that_submit_different_requests_are_told_so(directory: Path) -> None:
    for (message,) in run_ranks(2, _different_work, str(directory)):
        assert "requests differ" in message


def _mixed(directory: str) -> list[Completion]:
    engine = make_engine(directory, tp=2, max_batch_size=5)
    engine.submit(requests(prompts(6), samples=3, max_tokens=12, stop_token_ids=(3, 4, 5, 6)))
    seen = []
    for c in engine.stream():
        if len(seen) == 4:
            engine.abort([5])
        seen.append(c)
    return seen


def test_ranks_see_the_same_completions_in_the_same_order(directory: Path) -> None:
    first, second = run_ranks(2, _mixed, str(directory))
    assert first == second and len(first) == 18
