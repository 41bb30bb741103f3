"""No process of an engine outlives the rank that owns it."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any


class Closing:
    """Closes an engine once: when asked, at exit, and when SIGTERM or SIGINT comes.

    SIGKILL leaves no time: Ray ends the actors of a driver that is gone.
    """

    def __init__(self, close: Callable[[], None]) -> None:
        self._close: Callable[[], None] | None = close
        self._before: dict[int, Any] = {}
        this = weakref.ref(self)
        self._at_exit = lambda: this() is not None and this().close()  # type: ignore[union-attr]
        atexit.register(self._at_exit)
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._on_signal)

    def close(self) -> None:
        close, self._close = self._close, None
        if close is None:
            return
        atexit.unregister(self._at_exit)
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, handler)
        close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(number)
        self.close()
        if callable(before):
            before(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL if before is None else before)
            os.kill(os.getpid(), number)
