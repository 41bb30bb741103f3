"""What clients of the server rely on, seen through the `openai` client and raw sockets; behind it an engine without a model."""

from __future__ import annotations

import http.client
import json
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from mcore_rl.server.asked import Serving
from mcore_rl.server.server import Server, check_address, libraries
from mcore_rl.server.text import TextStream, visible
from mcore_rl.server.worker import EngineWorker, Stopped
from mcore_rl.tokens import character_tokenizer
from parallel.errors import UserError
from tests.mcore_rl.fake_engine import FakeEngine, expected, log_prob
from trtllm_rollout.protocol import EngineRefuses, Request, SamplingParams

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 "
TEMPLATE = ("{{ bos_token }}{% for m in messages %}{{ m['role'][0] }} {{ m['content'] }}{{ ending or eos_token }}{% endfor %}"
            "{% if add_generation_prompt %}a {% endif %}")


def make_tokenizer() -> Any:
    tokenizer = character_tokenizer(CHARACTERS)
    tokenizer.chat_template = TEMPLATE
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])  # as Llama's adds its BOS
    return tokenizer


class Behind:
    """A server, the engine behind it and a client before it."""

    def __init__(self, **options: Any) -> None:
        self.tokenizer = make_tokenizer()
        self.engine = FakeEngine(self.tokenizer, len(self.tokenizer))
        self.server = Server(self.engine, Serving("tiny", self.tokenizer, 64, (2,)), port=0, **options)
        self.server.start()
        self.client = openai.OpenAI(base_url=self.server.url, api_key=options.get("api_key") or "none", max_retries=0, timeout=30)

    def ids(self, prompt: list[int], stream: tuple[int, ...], sample: int, count: int) -> list[int]:
        request = Request(0, tuple(prompt), SamplingParams(), 1, stream)
        return [expected(request, sample, k, self.engine.vocab) for k in range(count)]

    def text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids))

    def post(self, path: str, body: bytes, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        request = urllib.request.Request(self.server.url + path, body, {"Content-Type": "application/json", **(headers or {})})
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)


@pytest.fixture
def behind() -> Iterator[Behind]:
    made = Behind()
    yield made
    made.engine.may_step.set()
    made.server.stop()


def until(condition: Callable[[], bool]) -> None:
    """Wait for another thread."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_prompts_of_every_form_are_completed_in_order(behind: Behind) -> None:
    word = behind.tokenizer("ab")["input_ids"]
    assert len(word) == 3 and word[0] == 1
    for prompt, count in (("ab", 1), (["ab", "ab"], 2), (word, 1), ([word, word], 2)):
        done = behind.client.completions.create(model="tiny", prompt=prompt, max_tokens=5, seed=7, n=2, temperature=0.5)
        want = [behind.text(behind.ids(word, (7, 0, p), k, 5)) for p in range(count) for k in range(2)]
        assert [c.text for c in done.choices] == want and len(set(want)) == len(want)
        assert [c.index for c in done.choices] == list(range(2 * count)) and {c.finish_reason for c in done.choices} == {"length"}
        assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (3 * count, 10 * count, 13 * count)
        assert done.system_fingerprint == "weights-3" and done.model == "tiny"
    default = behind.client.completions.create(model="tiny", prompt="ab")
    again = behind.client.completions.create(model="tiny", prompt="ab")
    assert default.usage.completion_tokens == 16 and default.choices[0].text != again.choices[0].text, "no seed: fresh randomness"


def test_a_chat_goes_through_the_template_once(behind: Behind) -> None:
    """One BOS, the generation prompt, parts of content joined, variables passed on."""
    def ids(text: str) -> list[int]:
        return [behind.tokenizer.convert_tokens_to_ids(c) for c in text]

    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": parts}]
    for extra, end in (({}, [2]), ({"chat_template_kwargs": {"ending": "0"}}, ids("0"))):
        done = behind.client.chat.completions.create(model="tiny", messages=messages, max_tokens=4, seed=1,
                                                     extra_body={"return_token_ids": True, **extra})
        prompt = [1, *ids("s be"), *end, *ids("u hi"), *end, *ids("a ")]
        choice = done.choices[0]
        assert choice.prompt_token_ids == prompt and done.usage.prompt_tokens == len(prompt)
        assert choice.token_ids == behind.ids(prompt, (1, 0, 0), 0, 4) and choice.weights_versions == [3] * 4
        assert choice.log_probs == [log_prob(k) / 2 for k in range(4)], "at the sampling temperature"
        assert (choice.message.role, choice.message.content) == ("assistant", behind.text(choice.token_ids))
    unlimited = behind.client.chat.completions.create(model="tiny", messages=messages)
    assert unlimited.usage.total_tokens == 64, "without a limit a chat may fill the context"


@pytest.mark.parametrize("chat", [False, True])
def test_a_stream_adds_up_to_the_whole(behind: Behind, chat: bool) -> None:
    create: Any = behind.client.chat.completions.create if chat else behind.client.completions.create
    options: dict[str, Any] = dict(model="tiny", n=3, seed=5, max_tokens=20, stop=["a", "b", "cd"], extra_body={"return_token_ids": True})
    options |= {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2} if chat else {"prompt": "x", "logprobs": 2}
    whole = create(**options)
    chunks = list(create(**options, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage and len({c.id for c in chunks}) == 1
    for want in whole.choices:
        mine = [c.choices[0] for c in chunks[:-1] if c.choices[0].index == want.index]
        texts = [c.delta.content if chat else c.text for c in mine]
        assert "".join(t or "" for t in texts) == (want.message.content if chat else want.text)
        assert [c.finish_reason for c in mine[:-1]] == [None] * (len(mine) - 1) and mine[-1].finish_reason == want.finish_reason
        assert mine[-1].logprobs.model_dump() == want.logprobs.model_dump() and mine[-1].token_ids == want.token_ids
    assert len(chunks) > 3 * 2 + 1, "text came in pieces"
    reasons = {c.finish_reason for c in whole.choices}
    assert "stop" in reasons
    for choice in whole.choices:
        text = choice.message.content if chat else choice.text
        held = behind.text(choice.token_ids)
        assert held.startswith(text) and not any(s in text for s in ("a", "b", "cd"))
        assert held == text + (choice.stop_reason or ""), "the text ends before the stop string, the tokens keep it"


def test_log_probs_are_raw_and_belong_to_their_tokens(behind: Behind) -> None:
    word = behind.tokenizer("xy", add_special_tokens=False)["input_ids"]
    made = behind.ids(word, (2, 0, 0), 0, 3)
    whole = behind.client.completions.create(model="tiny", prompt=word, max_tokens=3, seed=2, logprobs=2).choices[0].logprobs
    assert whole.tokens == [behind.text([i]) for i in made] and whole.token_logprobs == [log_prob(k) for k in range(3)]
    for k, top in enumerate(whole.top_logprobs):
        other = (made[k] + 1) % behind.engine.vocab
        assert top == {behind.text([made[k]]): log_prob(k), behind.text([other]): log_prob(k) - 1}
    echoed = behind.client.completions.create(model="tiny", prompt=word, max_tokens=3, seed=2, logprobs=0, echo=True).choices[0]
    assert echoed.text == "xy" + behind.text(made) and echoed.logprobs.tokens == ["x", "y", *whole.tokens]
    assert echoed.logprobs.token_logprobs == [None, -9.0, *whole.token_logprobs] and echoed.logprobs.text_offset == [0, 1, 2, 3, 4]
    message = [{"role": "user", "content": "q"}]
    chat = behind.client.chat.completions.create(model="tiny", messages=message, max_tokens=2, logprobs=True, top_logprobs=1).choices[0].logprobs
    assert [e.logprob for e in chat.content] == [log_prob(0), log_prob(1)] and [len(e.top_logprobs) for e in chat.content] == [1, 1]
    assert bytes(chat.content[0].bytes).decode() == chat.content[0].token == chat.content[0].top_logprobs[0].token
    assert behind.client.completions.create(model="tiny", prompt=word, max_tokens=3).choices[0].logprobs is None


def test_clients_share_one_batch_and_one_thread(behind: Behind) -> None:
    behind.engine.may_step.clear()
    answers: dict[int, str] = {}

    def ask(seed: int) -> None:
        answers[seed] = behind.client.completions.create(model="tiny", prompt="ab", max_tokens=3, seed=seed).choices[0].text

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    until(lambda: behind.server.worker.unfinished == 6)
    own: list[Any] = []
    mine = threading.Thread(target=lambda: own.extend(behind.server.worker.generate([Request(90, (5, 6), SamplingParams(max_tokens=2), 2, (1,))])))
    mine.start()
    until(lambda: behind.server.worker.unfinished == 7)
    behind.engine.may_step.set()
    for thread in (*threads, mine):
        thread.join()
    word = behind.tokenizer("ab")["input_ids"]
    assert answers == {seed: behind.text(behind.ids(word, (seed, 0, 0), 0, 3)) for seed in range(6)}
    assert max(behind.engine.batches) >= 7 and len(behind.engine.threads) == 1
    assert [(c.request_id, c.sample, list(c.token_ids)) for c in own] == [(90, k, behind.ids([5, 6], (1,), k, 2)) for k in range(2)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_work(behind: Behind, stream: bool) -> None:
    behind.engine.may_step.clear()
    body = json.dumps({"model": "tiny", "prompt": "abc", "max_tokens": 60, "ignore_eos": True, "stream": stream, "n": 2})
    with closing(http.client.HTTPConnection(*behind.server.url.split("/")[2].split(":"), timeout=30)) as connection:  # type: ignore[arg-type]
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        until(lambda: len(behind.engine.running) == 2)
    until(lambda: any(isinstance(message, int) for message in behind.server.worker._inbox))  # told to abort, while a step runs
    behind.engine.may_step.set()
    other = behind.client.completions.create(model="tiny", prompt="ab", max_tokens=3, extra_body={"ignore_eos": True})
    assert other.usage.completion_tokens == 3
    assert behind.engine.aborted == [0] and not behind.engine.running and len(behind.engine.batches) == 4 and not behind.server.worker.unfinished


def test_nothing_is_ignored_silently(behind: Behind) -> None:
    """Every parameter that is not understood is named; values that ask for nothing pass."""
    for name, value in {"logit_bias": {"5": 1}, "frequency_penalty": 0.5, "best_of": 2, "suffix": "x", "tools": [{}],
                        "response_format": {"type": "json_object"}, "functions": [{}], "reasoning_effort": "low", "store": True,
                        "metadata": {"a": "b"}, "best_off": 1, "messages": [], "temprature": 1, "frequency_penalty ": 0, "logprobs": True,
                        "n": 0, "seed": "x", "stream": 1, "echo": "no", "stop": [""], "temperature": -1, "temperature ": 1, "top_p": 0,
                        "top_k": 1.5, "min_p": 2, "max_tokens": 0, "stream_options": {"usage": True}, "stop_token_ids": 3,
                        "stop_token_ids ": [], "min_tokens": 99, "prompt": [], "model": "other"}.items():
        status, answer = behind.post("/completions", json.dumps({"model": "tiny", "prompt": "a", name: value}).encode())
        error = answer["error"]
        assert status == (404 if name == "model" else 400) and name.strip() in error["message"], (name, answer)
        assert error["type"] == "invalid_request_error" and error["param"] in (name, None) and set(error) == {"message", "type", "param", "code"}
    assert "did you mean 'temperature'" in behind.post("/completions", b'{"model": "tiny", "prompt": "a", "temprature": 1}')[1]["error"]["message"]
    neutral = {"logit_bias": {}, "frequency_penalty": 0.0, "best_of": 1, "suffix": None, "tools": [], "response_format": {"type": "text"},
               "user": "me", "store": False, "service_tier": "auto", "top_k": -1, "anything": None}
    status, answer = behind.post("/completions", json.dumps({"model": "tiny", "prompt": "", "max_tokens": 1, **neutral}).encode())
    assert status == 200 and answer["usage"]["prompt_tokens"] == 1, "an empty prompt is the BOS alone"


def test_bad_input_is_refused_in_openais_form(behind: Behind) -> None:
    prompt = {"model": "tiny", "prompt": "a"}
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
    cases: list[tuple[str, Any, int, str]] = [
        ("/completions", {**prompt, "prompt": [3, 999]}, 400, "999"), ("/completions", {**prompt, "prompt": [1.5]}, 400, "float"),
        ("/completions", {**prompt, "prompt": [["a"]]}, 400, "list"), ("/completions", {"model": "tiny"}, 400, "prompt"),
        ("/completions", {**prompt, "max_tokens": 64}, 400, "at most 62"), ("/completions", {**prompt, "prompt": "a" * 64}, 400, "65 tokens"),
        ("/completions", {**prompt, "echo": True, "logprobs": 1}, 400, "set logprobs to 0"), ("/completions", {"prompt": "a"}, 400, "'tiny'"),
        ("/completions", {**prompt, "prompt": "\ud800"}, 400, "Unicode"), ("/completions", {**prompt, "prompt": ["a"] * 600, "n": 2}, 400, "1024"),
        ("/completions", [], 400, "object"), ("/chat/completions", {**chat, "messages": []}, 400, "messages"),
        ("/chat/completions", {**chat, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "image_url"),
        ("/chat/completions", {**chat, "top_logprobs": 2}, 400, "logprobs: true"), ("/chat/completions", {**chat, "prompt": "a"}, 400, "prompt"),
        ("/chat/completions", {**chat, "messages": [{"role": "user", "content": "\ud800"}]}, 400, "Unicode"),
        *(("/chat/completions", {**chat, "chat_template_kwargs": {name: value}}, 400, "chat_template_kwargs") for name, value in
          {"chat_template": "{{ 1 }}", "continue_final_message": True, "return_dict": True, "return_assistant_tokens_mask": True}.items()),
        ("/completions", {**prompt, "stop_token_ids": [[1]]}, 400, "stop_token_ids"), ("/completions", {**prompt, "top_k": 1 << 63}, 400, "top_k"),
        ("/completions", {**prompt, "stop_token_ids": [1 << 63]}, 400, "stop token"), ("/completions", {**prompt, "temperature": 1e-40}, 400, "temp"),
        ("/completions", {**prompt, "presence_penalty": 10 ** 400}, 400, "presence_penalty"),
        ("/chat/completions", {**chat, "max_tokens": 3, "max_completion_tokens": 4}, 400, "differ"), ("/nothing", prompt, 404, "/v1/nothing")]
    for path, body, status, word in cases:
        found, answer = behind.post(path, json.dumps(body).encode())
        assert found == status and word in answer["error"]["message"], (body, answer)
    assert behind.post("/completions", b"{")[0] == 400
    assert behind.post("/completions", b'{"model": "tiny", "prompt": "a", "\\ud800": 1}')[0] == 400, "half a surrogate pair, quoted in the error"
    assert behind.post("/completions", json.dumps(prompt).encode(), {"Content-Type": "text/plain"})[0] == 415, "what a page of another site can send"
    assert behind.post("/completions", json.dumps(prompt).encode(), {"Host": "evil.example"})[0] == 400
    with pytest.raises(openai.NotFoundError, match="other"):
        behind.client.models.retrieve("other")
    assert [m.id for m in behind.client.models.list()] == [behind.client.models.retrieve("tiny").id] == ["tiny"]
    assert not behind.engine.running


def test_a_key_is_asked_for_and_required_where_others_can_connect() -> None:
    behind = Behind(api_key="s3cret")
    try:
        assert behind.client.completions.create(model="tiny", prompt="a", max_tokens=1).usage.completion_tokens == 1
        for key in ("s3cre", "s3cret2", "S3cret", "none"):
            with pytest.raises(openai.AuthenticationError, match="API key"):
                behind.client.with_options(api_key=key).completions.create(model="tiny", prompt="a")
        assert behind.post("/completions", b"{}")[0] == 401 and behind.post("/nothing", b"{}")[0] == 401
        with urllib.request.urlopen(behind.server.url.removesuffix("/v1") + "/health", timeout=30) as response:
            assert json.load(response)["weights_version"] == 3
    finally:
        behind.server.stop()
    for host in ("0.0.0.0", "::", "", socket.gethostbyname("localhost").replace("127.0.0.1", "10.0.0.1")):
        with pytest.raises(UserError, match="an API key is required"):
            check_address(host, 0, None)
        assert not check_address(host, 0, "key")
    assert check_address("localhost", 0, None) and check_address("::1", 0, None) and check_address("127.3.2.1", 0, None)
    with pytest.raises(UserError, match="no address"):
        check_address("no.such.host.invalid", 0, "key")
    with pytest.raises(UserError, match="ASCII"):
        check_address("127.0.0.1", 0, "a b")


def test_a_port_that_is_taken_is_named(behind: Behind) -> None:
    port = int(behind.server.url.split(":")[2].split("/")[0])
    with pytest.raises(UserError, match=f"port {port}"):
        Server(behind.engine, Serving("tiny", behind.tokenizer, 64), port=port)


def test_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(UserError, match=r"pip install 'mcore-rl\[serve\]'"):
        libraries()


def test_weights_change_between_two_steps(behind: Behind) -> None:
    """What is unfinished ends as `abort` with its tokens; what arrives meanwhile waits, and is answered by the new version."""
    behind.engine.may_step.clear()
    answers: list[Any] = []
    inside, finish = threading.Event(), threading.Event()

    def ask() -> None:
        answers.append(behind.client.completions.create(model="tiny", prompt="ab", max_tokens=40, extra_body={"return_token_ids": True, "ignore_eos": True}))

    def update() -> None:
        with behind.server.worker.paused():
            inside.set()
            behind.engine.begin_update()
            finish.wait(30)
            behind.engine.commit(4)

    first, trainer, second = (threading.Thread(target=f) for f in (ask, update, ask))
    first.start()
    until(lambda: bool(behind.engine.running))
    trainer.start()
    until(lambda: behind.server.worker._pauses == 1)
    assert not inside.is_set(), "a step is running"
    behind.engine.may_step.set()
    assert inside.wait(30)
    second.start()
    until(lambda: behind.server.worker.unfinished == 2)
    assert len(behind.engine.batches) == 1 and not answers, "no step while the trainer writes"
    finish.set()
    for thread in (first, trainer, second):
        thread.join()
    old, new = sorted(answers, key=lambda a: len(a.choices[0].token_ids))
    assert old.choices[0].weights_versions == [3] and old.choices[0].finish_reason == "abort"
    assert new.choices[0].weights_versions == [4] * 40 and new.choices[0].finish_reason == "length" and new.system_fingerprint == "weights-4"


def test_an_engine_that_refuses_or_breaks_is_reported_and_nobody_waits(behind: Behind) -> None:
    behind.engine.version = None
    with pytest.raises(openai.InternalServerError, match="weights update is under way"):
        behind.client.completions.create(model="tiny", prompt="ab")
    behind.engine.commit(5)
    assert behind.client.completions.create(model="tiny", prompt="ab").system_fingerprint == "weights-5"
    behind.engine.break_with = EngineRefuses("engine: the logits are not finite")
    with pytest.raises(openai.APIError, match="not finite"):
        list(behind.client.completions.create(model="tiny", prompt="ab", stream=True))
    behind.engine.break_with = MemoryError("no room")
    for _ in range(2):
        with pytest.raises(openai.InternalServerError, match="no room"):
            behind.client.completions.create(model="tiny", prompt="ab")
    with pytest.raises(urllib.error.HTTPError) as health:
        urllib.request.urlopen(behind.server.url.removesuffix("/v1") + "/health", timeout=30)
    assert health.value.code == 503 and "no room" in json.load(health.value)["status"]


def test_a_server_in_the_foreground_ends_with_its_engine() -> None:
    tokenizer = make_tokenizer()
    engine = FakeEngine(tokenizer, len(tokenizer))
    server = Server(engine, Serving("tiny", tokenizer, 64), port=0)
    said: list[BaseException] = []

    def run() -> None:
        try:
            server.run()
        except RuntimeError as error:
            said.append(error)

    running = threading.Thread(target=run)
    running.start()
    engine.break_with = MemoryError("no room")
    with pytest.raises(openai.APIError, match="no room"):
        openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=30).completions.create(model="tiny", prompt="ab")
    running.join(30)
    assert not running.is_alive() and "no room" in repr(said[0].__cause__)


def test_a_request_at_which_the_worker_dies_is_told_so() -> None:
    tokenizer = make_tokenizer()
    engine = FakeEngine(tokenizer, len(tokenizer))
    engine.submit = lambda requests: 1 / 0  # type: ignore[assignment, method-assign]
    worker = EngineWorker(engine)
    worker.start()
    with pytest.raises(Stopped, match="ZeroDivisionError"):
        worker.submit([Request(worker.ids(1)[0], (4,))], lambda event: None).result(timeout=30)


def test_stopping_ends_what_is_under_way_and_leaves_the_engine_clean() -> None:
    tokenizer = make_tokenizer()
    engine = FakeEngine(tokenizer, len(tokenizer))
    engine.may_step.clear()
    worker = EngineWorker(engine)
    worker.start()
    heard: list[Any] = []
    accepted = worker.submit([Request(i, (5,), SamplingParams(max_tokens=60)) for i in worker.ids(2)], heard.append)
    until(lambda: bool(engine.running))
    late = worker.submit([Request(i, (5,), SamplingParams(max_tokens=60)) for i in worker.ids(1)], heard.append)
    stopping = threading.Thread(target=worker.stop)
    stopping.start()
    until(lambda: worker._stopping)
    engine.may_step.set()
    stopping.join()
    assert accepted.result() is None and isinstance(late.exception(), Stopped)
    assert [type(e) for e in heard] == [Stopped] and not engine.running and engine.aborted == [0, 1]
    with pytest.raises(Stopped):
        worker.generate([Request(0, (5,))])


def test_a_caller_that_is_cancelled_while_it_waits_does_not_take_the_worker_along() -> None:
    tokenizer = make_tokenizer()
    worker = EngineWorker(FakeEngine(tokenizer, len(tokenizer)))
    worker.start()
    with worker.paused():
        accepted = worker.submit([Request(i, (5,), SamplingParams(max_tokens=2)) for i in worker.ids(1)], lambda event: None)
        accepted.cancel()  # as asyncio does for a connection whose task is ended
    assert len(worker.generate([Request(0, (5,), SamplingParams(max_tokens=2))])) == 1 and worker.failure is None
    worker.stop()
    assert worker.failure is None


def byte_tokenizer() -> Any:
    """One id a byte: characters come in pieces."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=False)


def test_text_never_shows_half_a_character_nor_half_a_stop_string() -> None:
    tokenizer = byte_tokenizer()
    text = "naïve 漢字 🙂 end STOP"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    stream = TextStream(tokenizer, ("STOP",))
    pieces = [stream.add([i]) for i in ids]
    whole = visible(tokenizer, ids, "STOP")
    assert whole == "naïve 漢字 🙂 end " and "\ufffd" not in "".join(pieces)
    assert "".join(pieces) + stream.finish(whole) == whole and sum(map(bool, pieces)) > 10
    for answer, stop in (("a 🙂", "🙂"), ("a 語🙂", "語🙂")):
        ids = tokenizer(answer)["input_ids"]
        ending, before = TextStream(tokenizer, (stop,)), answer.removesuffix(stop)
        assert visible(tokenizer, ids, stop) == before, "its last byte completed it"
        assert "".join(ending.add([i]) for i in ids) + ending.finish(before) == before
    passed, ids = TextStream(tokenizer, ("b",)), tokenizer("abc")["input_ids"]
    assert [passed.add([i]) for i in ids] == ["a", "", "bc"], "it did not end the sample, so min_tokens passed it over"
    broken, ids = TextStream(tokenizer), tokenizer(text)["input_ids"]
    assert [broken.add([i]) for i in ids[:3]] == ["n", "a", ""]
    assert broken.finish(visible(tokenizer, ids[:3], None)) == "\ufffd", "what never became a character is shown at the end"
    assert visible(tokenizer, tokenizer("ab ab")["input_ids"], "ab") == "ab ", "an occurrence that min_tokens passed over stays"
