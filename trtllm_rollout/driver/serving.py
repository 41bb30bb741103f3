"""The event loop that TensorRT-LLM's asynchronous calls run in, and the samples under way there."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any, TypeVar

from trtllm_rollout.driver.outputs import Output, read_output
from trtllm_rollout.protocol import EngineRefuses

T = TypeVar("T")
Key = int  # of a sample under way; never used twice, so that late news of an abandoned one is no other's


class EngineTimeout(EngineRefuses):
    """TensorRT-LLM did not answer in time; the message says what was waited for."""


@dataclass(frozen=True)
class Event:
    """News of one sample: its output so far, whether that is all, the moment; or the error that ended it."""

    key: Key
    output: Output | None
    finished: bool
    at: float
    error: str | None = None


class Loop:
    """An asyncio event loop in a daemon thread: `call` runs a coroutine there and waits for it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="tensorrt_llm", daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, T], seconds: float, what: str) -> T:
        """Raises EngineTimeout after `seconds`, saying that it waited for TensorRT-LLM to `what`."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(seconds)
        except FutureTimeout:
            if future.done():  # the coroutine's own timeout
                raise
            future.cancel()
            raise EngineTimeout(waited(seconds, what)) from None

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=10)


def waited(seconds: float, what: str) -> str:
    return (f"engine: waited {seconds:g} s for TensorRT-LLM to {what}; it may still be at work. Look at the logs of its workers, and raise the "
            "timeout of that step in rollout.tensorrt_llm (start_timeout_s, update_timeout_s, generate_timeout_s) if it only needs longer")


def within(seconds: float, what: str, function: Callable[[], T]) -> T:
    """`function()` of a blocking call that has no timeout of its own. Raises EngineTimeout; the call is then left behind in its thread."""
    done: queue.Queue[tuple[bool, Any]] = queue.Queue()

    def run() -> None:
        try:
            done.put((True, function()))
        except BaseException as error:
            done.put((False, error))

    threading.Thread(target=run, name="tensorrt_llm call", daemon=True).start()
    try:
        good, value = done.get(timeout=seconds)
    except queue.Empty:
        raise EngineTimeout(waited(seconds, what)) from None
    if not good:
        raise value
    return value  # type: ignore[no-any-return]


class Serving:
    """Samples under way. `start(prompt, sampling, streaming)` gives TensorRT-LLM's result object; it is called in the loop."""

    def __init__(self, loop: Loop, start: Callable[[tuple[int, ...], Any, bool], Any]) -> None:
        self._loop, self._start = loop, start
        self._news: queue.Queue[Event] = queue.Queue()
        self._results: dict[Key, Any] = {}
        self._wanted: set[Key] = set()  # aborted before their result was there

    def submit(self, key: Key, prompt: tuple[int, ...], sampling: Any, streaming: bool) -> None:
        asyncio.run_coroutine_threadsafe(self._serve(key, prompt, sampling, streaming), self._loop.loop)

    def abort(self, keys: Iterable[Key]) -> None:
        def do() -> None:
            for key in keys:
                if key in self._results:
                    self._results[key].abort()
                else:
                    self._wanted.add(key)

        self._loop.loop.call_soon_threadsafe(do)

    def news(self, seconds: float, what: str) -> list[Event]:
        """At least one event; all there are. Raises EngineTimeout."""
        try:
            events = [self._news.get(timeout=seconds)]
        except queue.Empty:
            raise EngineTimeout(waited(seconds, what)) from None
        while True:
            try:
                events.append(self._news.get_nowait())
            except queue.Empty:
                return events

    async def _serve(self, key: Key, prompt: tuple[int, ...], sampling: Any, streaming: bool) -> None:
        try:
            result = self._results[key] = self._start(prompt, sampling, streaming)
            if key in self._wanted:
                result.abort()
            if streaming:
                async for part in result:
                    if not part.finished:
                        self._news.put(Event(key, read_output(part), False, time.perf_counter()))
            else:
                await result
            self._news.put(Event(key, read_output(result), True, time.perf_counter()))
        except Exception as error:
            self._news.put(Event(key, None, True, time.perf_counter(), f"{type(error).__name__}: {error}"))
        finally:
            self._results.pop(key, None)
            self._wanted.discard(key)
