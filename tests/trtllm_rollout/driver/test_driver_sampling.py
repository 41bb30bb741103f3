"""SamplingParams in TensorRT-LLM's words and its outputs in ours: what is computed there is what the protocol says, or is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.errors import UserError
from tests.models import reference_logits, write_model
from tests.trtllm_rollout.driver.harness import running, sync
from trtllm_rollout.driver.outputs import Output, completion
from trtllm_rollout.driver.sampling import CPP, NO_END, TORCH, Dialect, seed_of, translate
from trtllm_rollout.driver.seam.build import Features
from trtllm_rollout.protocol import Completion, EngineRefuses, Request, SamplingParams

FEATURES = Features("1.3.0rc15", "sleep_config", frozenset(), True, frozenset({"min_p"}), (), frozenset(), False)
PROMPT = (5, 17, 99, 3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> Path:
    return write_model(tmp_path_factory.mktemp("sampling") / "llama", "llama", num_hidden_layers=2)


def ask(**sampling: Any) -> Request:
    return Request(3, PROMPT, SamplingParams(**sampling), 2, (7, 1))


def recomputed(directory: Path, done: Completion, temperature: float) -> torch.Tensor:
    logits = reference_logits(directory, [[*PROMPT, *done.token_ids]])[0, len(PROMPT) - 1:-1].double()
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]


def test_what_would_mean_something_else_there_is_spelt_out() -> None:
    plain = translate(ask(max_tokens=50), 0, Dialect(FEATURES, TORCH))
    assert plain["max_tokens"] == 50 and plain["n"] == 1 and (plain["temperature"], plain["top_k"], plain["top_p"]) == (1.0, 0, 1.0)
    assert plain["detokenize"] is False and plain["include_stop_str_in_output"] is True and plain["end_id"] == NO_END
    greedy = translate(ask(temperature=0.0, top_p=0.5), 0, Dialect(FEATURES, CPP))
    assert (greedy["temperature"], greedy["top_k"], greedy["top_p"]) == (1.0, 1, 1.0)


def test_the_stop_token_stays_whichever_sampler() -> None:
    """The C++ sampler leaves its end_id out, so there nothing is the end_id; the other one stops for certain at its end_id alone."""
    torch_, cpp = (translate(ask(stop_token_ids=(2, 9)), 0, Dialect(FEATURES, s)) for s in (TORCH, CPP))
    assert (torch_["end_id"], torch_["stop_token_ids"]) == (2, [2, 9]) and (cpp["end_id"], cpp["stop_token_ids"]) == (NO_END, [2, 9])


def test_seeds_belong_to_stream_and_sample() -> None:
    seeds = [seed_of((1, 2), 3), seed_of((1, 2), 4), seed_of((1, 23), 4), seed_of((12, 3), 4)]
    assert len(set(seeds)) == 4 and all(0 <= s < 1 << 63 for s in seeds) and seed_of((1, 2), 3) == seeds[0]
    assert translate(ask(), 1, Dialect(FEATURES, CPP))["seed"] == seed_of((7, 1), 1)


@pytest.mark.parametrize(("sampler", "sampling", "words"), [
    (TORCH, dict(min_p=0.1), "min_p 0.1: TorchSampler of tensorrt_llm 1.3.0rc15 ignores it"),
    (TORCH, dict(repetition_penalty=1.1), "repetition_penalty 1.1: TorchSampler .* ignores it"),
    (TORCH, dict(presence_penalty=0.5), "presence_penalty 0.5"),
    (TORCH, dict(temperature=0.7), "temperature 0.7: TorchSampler .* reports log-probs at temperature 1"),
    (TORCH, dict(min_tokens=2, stop_token_ids=(2, 9)), "min_tokens 2 with 2 stop ids"),
    (CPP, dict(presence_penalty=0.5), "presence_penalty 0.5: TRTLLMSampler .* before penalties"),
    (CPP, dict(top_log_probs=3), "top_log_probs 3"), (CPP, dict(min_tokens=2, stop_token_ids=(2,)), "min_tokens 2"),
    (CPP, dict(stop=("x",)), "keeps no tokenizer")])
def test_what_a_sampler_cannot_do_is_refused_by_name(sampler: str, sampling: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=f"request 3: .*{words}"):
        translate(ask(**sampling), 0, Dialect(FEATURES, sampler))


@pytest.mark.parametrize(("temperature", "options", "sampling"), [
    (1.0, {}, {}), (1.0, {}, dict(top_k=5, top_p=0.8)), (0.7, {}, {}), (0.7, {}, dict(top_k=4, min_p=0.01)), (0.0, {}, {}),
    (0.7, {"log_probs": "logits"}, dict(top_p=0.9)), (1.0, {"sampler": CPP}, {}), (0.0, {"sampler": CPP}, {})])
def test_log_probs_are_those_at_the_temperature_before_cuts(model: Path, temperature: float, options: dict[str, Any],
                                                            sampling: dict[str, Any]) -> None:
    """Against transformers. The fake reports as the samplers do: one at temperature 1, one scaled, a neighbour first in each dict."""
    with running(model, temperature=temperature, **options) as (engine, cluster):
        sync(engine, model)
        done = engine.generate([Request(0, PROMPT, SamplingParams(temperature=temperature, max_tokens=6, **sampling), 2, (7, 1))])
        assert cluster.arguments["sampler_type"] == options.get("sampler", CPP if temperature == 0.7 and not options else TORCH)
    for one in done:
        torch.testing.assert_close(torch.tensor(one.log_probs).double(), recomputed(model, one, temperature or 1.0), atol=2e-5, rtol=0)
        if one.raw_log_probs:
            torch.testing.assert_close(torch.tensor(one.raw_log_probs).double(), recomputed(model, one, 1.0), atol=2e-5, rtol=0)
    assert temperature == 0 or done[0].token_ids != done[1].token_ids


@pytest.mark.parametrize("sampler", [TORCH, CPP])
def test_samples_end_with_their_stop_token(model: Path, sampler: str) -> None:
    with running(model, sampler=sampler) as (engine, _):
        sync(engine, model)
        free = engine.generate([Request(0, PROMPT, SamplingParams(temperature=0, max_tokens=6))])[0]
        stop = free.token_ids[2]
        done = engine.generate([Request(0, PROMPT, SamplingParams(temperature=0, max_tokens=6, stop_token_ids=(201, stop)))])[0]
    end = free.token_ids.index(stop) + 1
    assert (done.token_ids, done.finish_reason, done.stop_reason) == (free.token_ids[:end], "stop", stop)
    assert done.log_probs == pytest.approx(free.log_probs[:end])


def test_a_stop_token_that_was_left_out_is_noticed(model: Path) -> None:
    with running(model, fake={"cut_stops": True}) as (engine, _):
        sync(engine, model)
        stop = engine.generate([Request(0, PROMPT, SamplingParams(temperature=0, max_tokens=1))])[0].token_ids[0]
        with pytest.raises(EngineRefuses, match="left the stop token out of the sample"):
            engine.generate([Request(0, PROMPT, SamplingParams(temperature=0, stop_token_ids=(stop,)))])


def test_top_and_prompt_log_probs(model: Path) -> None:
    with running(model) as (engine, _):
        sync(engine, model)
        done = engine.generate([Request(0, PROMPT, SamplingParams(max_tokens=3, top_log_probs=2, prompt_log_probs=True))])[0]
    logits = torch.log_softmax(reference_logits(model, [[*PROMPT, *done.token_ids]])[0].double(), -1)
    expected = logits[:len(PROMPT) - 1].gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(done.prompt_log_probs).double(), expected, atol=2e-5, rtol=0)
    assert [[t for t, _ in position] for position in done.top_log_probs] == logits[len(PROMPT) - 1:-1].topk(2).indices.tolist()


def output(tokens: tuple[int, ...], finish: str | None, **more: Any) -> Output:
    return Output(tokens, tuple({0: -0.1, t: -float(t)} for t in tokens), finish, **more)


@pytest.mark.parametrize(("theirs", "ours"), [("length", "length"), ("cancelled", "abort"), ("timeout", "abort"), (None, "abort")])
def test_finish_reasons(theirs: str | None, ours: str) -> None:
    done = completion(ask(max_tokens=2), 1, output((4, 5), theirs), Dialect(FEATURES, TORCH), 7)
    assert (done.finish_reason, done.log_probs, done.versions, done.sample) == (ours, (-4.0, -5.0), (7, 7), 1)


def test_a_sample_that_ran_past_a_stop_id_ends_there_but_not_before_min_tokens() -> None:
    request = ask(stop_token_ids=(9,), min_tokens=2)
    done = completion(request, 0, output((9, 4, 9, 5), "length"), Dialect(FEATURES, TORCH), 1)
    assert (done.token_ids, done.finish_reason, done.stop_reason, len(done.log_probs)) == ((9, 4, 9), "stop", 9, 3)


def test_missing_log_probs_and_unknown_endings_are_refused() -> None:
    for broken, words in ((Output((4,), ({5: -1.0},), "length"), "do not have the token drawn there, 4"),
                          (Output((4, 6), ({4: -1.0},), "length"), "2 tokens with log-probs of 1"), (output((4,), "melted"), "'melted'")):
        with pytest.raises(EngineRefuses, match=words):
            completion(ask(), 0, broken, Dialect(FEATURES, TORCH), 1)
