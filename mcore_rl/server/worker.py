"""One thread that owns an engine: requests of many callers go in at any time, what the engine makes of them comes out as it is made.

The embedded engine is not thread-safe, and its batch is best when all callers share it. So every call to it, but for those made inside
`paused()`, is made by this thread: it takes what has arrived, calls `engine.step()` once and hands out the result.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist

from parallel.errors import UserError
from trtllm_rollout.protocol import Completion, Engine, EngineRefuses, Progress, Request

logger = logging.getLogger(__name__)

Event = Completion | Progress | Exception
HEARTBEAT = 60.0  # seconds: an idle leader lets the other ranks' broadcast return before it times out


class Stopped(RuntimeError):
    """The worker takes no more work: it was stopped, or its thread died."""


@dataclass
class _Submit:
    requests: Sequence[Request]
    deliver: Callable[[Event], None]
    accepted: concurrent.futures.Future[None] = field(default_factory=concurrent.futures.Future)


@dataclass
class _Open:
    """An unfinished request: who hears of it, and how many of its samples are still to come."""

    deliver: Callable[[Event], None]
    left: int


class EngineWorker:
    """Start with `start`, end with `stop`. `group`: the process group of a tensor-parallel engine, whose other ranks call `follow`.

    The callbacks run on the worker's thread and must return at once.
    """

    def __init__(self, engine: Engine, group: dist.ProcessGroup | None = None) -> None:
        self.engine = engine
        self.failure: BaseException | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self._group = group
        self._changed = threading.Condition()
        self._inbox: list[_Submit | int] = []  # an int: the id of a request to abort
        self._open: dict[int, _Open] = {}
        self._taken: list[_Submit | int] = []
        self._next_id = 0
        self._pauses = 0
        self._stepping = self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine-worker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; unfinished work ends with `Stopped`, and the engine holds nothing of it any more."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def ids(self, count: int) -> range:
        """Request ids that nobody else has."""
        with self._changed:
            self._next_id += count
            return range(self._next_id - count, self._next_id)

    def submit(self, requests: Sequence[Request], deliver: Callable[[Event], None]) -> concurrent.futures.Future[None]:
        """Queue requests with ids from `ids`. The future says whether the engine took them (UserError, EngineRefuses, Stopped).

        Then `deliver` gets every Progress and Completion of theirs, or one exception and nothing after it.
        """
        message = _Submit(requests, deliver)
        message.accepted.set_running_or_notify_cancel()  # a caller that is cancelled while it waits cannot cancel this: the worker will set it
        with self._changed:
            if self._stopping or self.failure is not None:
                raise Stopped("the engine's worker has stopped" + (f": {self.failure!r}" if self.failure else ""))
            self._inbox.append(message)
            self._changed.notify_all()
        return message.accepted

    def abort(self, request_ids: Iterable[int]) -> None:
        """End these requests; nothing more of them is delivered. Unknown and finished ones are no error."""
        with self._changed:
            self._inbox.extend(request_ids)
            self._changed.notify_all()

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """As `Engine.generate`, sharing the engine with all other callers. Ids are given anew and put back."""
        done: list[Completion] = []
        ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        wanted = sum(r.samples for r in requests)
        ids = self.ids(len(requests))

        def deliver(event: Event) -> None:
            if isinstance(event, Exception):
                ended.set_exception(event)
            elif isinstance(event, Completion):
                done.append(event)
                if len(done) == wanted:
                    ended.set_result(None)

        if requests:
            self.submit([_renumbered(r, i) for i, r in zip(ids, requests, strict=True)], deliver).result()
            ended.result()
        return [_renumbered(c, requests[c.request_id - ids.start].request_id)
                for c in sorted(done, key=lambda c: (c.request_id, c.sample))]

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """No step runs inside: the caller may move weights, sleep and wake. Requests that arrive wait."""
        with self._changed:
            self._pauses += 1
            self._changed.wait_for(lambda: not self._stepping)
        try:
            yield
        finally:
            with self._changed:
                self._pauses -= 1
                self._changed.notify_all()

    @property
    def unfinished(self) -> int:
        """Requests that are not answered yet."""
        return len(self._open) + sum(len(m.requests) for m in list(self._inbox) if isinstance(m, _Submit))

    def _run(self) -> None:
        try:
            while (inbox := self._wait()) is not None:
                try:
                    self._turn(inbox)
                finally:
                    with self._changed:
                        self._stepping = False
                        self._changed.notify_all()
            left = list(self._open)
            self._fail(Stopped("the server is shutting down"))
            _share(left, self._group)
            take(self.engine, left)
            with contextlib.suppress(EngineRefuses):
                self.engine.step()  # takes the ended samples out of the engine
            _share(None, self._group)
        except BaseException as error:  # noqa: BLE001 (whoever waits must hear of it)
            logger.exception("the engine's worker died")
            self.failure = error
            for message in self._taken:  # heard, and not answered yet
                if isinstance(message, _Submit) and not message.accepted.done():
                    message.accepted.set_exception(Stopped(f"the engine's worker died: {error!r}"))
            self._fail(Stopped(f"the engine's worker died: {error!r}"))
            self.on_failure()

    def _wait(self) -> list[_Submit | int] | None:
        """What has arrived, once there is something to do; None at the end."""
        with self._changed:
            while not self._changed.wait_for(lambda: self._stopping or not self._pauses and bool(self._inbox or self._open),
                                             None if self._group is None else HEARTBEAT):
                if not self._pauses:
                    break
            if self._stopping:
                return None
            self._taken, self._inbox = self._inbox, []
            self._stepping = True
            return self._taken

    def _turn(self, inbox: Sequence[_Submit | int]) -> None:
        """One iteration: everything that arrived, then a step of the engine."""
        messages = [m if isinstance(m, int) else tuple(m.requests) for m in inbox]
        _share(messages, self._group)
        for message, error in zip(inbox, take(self.engine, messages), strict=True):
            if isinstance(message, int):
                self._open.pop(message, None)
            elif error is None:
                self._open.update((r.request_id, _Open(message.deliver, r.samples)) for r in message.requests)
                message.accepted.set_result(None)
            else:
                message.accepted.set_exception(error)
        try:
            events = self.engine.step()
        except EngineRefuses as error:
            self._fail(error)
            return
        for event in events:
            self._hand_out(event)

    def _hand_out(self, event: Completion | Progress) -> None:
        request = self._open.get(event.request_id)
        if request is None:  # aborted: nobody listens
            return
        if isinstance(event, Completion):
            request.left -= 1
            if not request.left:
                del self._open[event.request_id]
        request.deliver(event)

    def _fail(self, error: Exception) -> None:
        """Tell everyone who waits for an answer, each once; at the end also those who wait to be heard."""
        waiting, self._open = self._open, {}
        for deliver in {id(request.deliver): request.deliver for request in waiting.values()}.values():
            deliver(error)
        if isinstance(error, Stopped):
            with self._changed:
                self._stopping = True
                inbox, self._inbox = self._inbox, []
            for message in inbox:
                if isinstance(message, _Submit):
                    message.accepted.set_exception(error)


def _renumbered(what: Any, request_id: int) -> Any:
    return replace(what, request_id=request_id)


def take(engine: Engine, messages: Sequence[int | tuple[Request, ...]]) -> list[Exception | None]:
    """Submit and abort (a number) what `messages` say; returns for every one why the engine refuses it."""
    refused: list[Exception | None] = []
    for message in messages:
        try:
            if isinstance(message, int):
                engine.abort([message])
            else:
                engine.submit(message)
            refused.append(None)
        except (UserError, EngineRefuses) as error:
            refused.append(error)
    return refused


def _share(messages: list[Any] | None, group: dist.ProcessGroup | None) -> None:
    if group is not None:
        dist.broadcast_object_list([messages], group_src=0, group=group)


def follow(engine: Engine, group: dist.ProcessGroup) -> None:
    """On the other ranks of a tensor-parallel engine: make the leader's calls, in its order, until it stops."""
    while True:
        box: list[Any] = [None]
        dist.broadcast_object_list(box, group_src=0, group=group)
        if box[0] is None:
            return
        take(engine, box[0])
        with contextlib.suppress(EngineRefuses):  # the leader has it too, and says so
            engine.step()
