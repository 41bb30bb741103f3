"""A server around an engine: in a process of its own (`mcore-rl serve`), or beside a trainer that owns the engine.

    server = Server(engine, Serving("policy", tokenizer, max_seq_len, stop_ids), port=8000)
    server.start()                       # in threads of its own; server.url
    with server.worker.paused():         # between two updates of the policy
        engine.begin_update(); ...; engine.commit(version)
    completions = server.worker.generate(requests)   # the trainer's own, batched with the clients'
    server.stop()
"""

from __future__ import annotations

import contextlib
import ipaddress
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from mcore_rl.server.asked import Serving
from mcore_rl.server.worker import EngineWorker
from parallel.errors import UserError
from trtllm_rollout.protocol import Engine

_MISSING = "serving needs starlette and uvicorn ({}): pip install 'mcore-rl[serve]'"
DRAIN = 20  # seconds that running answers have to end when the server stops (torchrun kills its ranks after 30)


def check_address(host: str, port: int, api_key: str | None) -> bool:
    """Whether `host` is a loopback address. Raises UserError for one that is not, without a key, and for no address at all."""
    if not 0 <= port < 65536:
        raise UserError(f"--port is {port}; it must be from 0 (any that is free) to 65535")
    try:
        found = {ipaddress.ip_address(str(info[4][0]).partition("%")[0]) for info in socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError) as error:
        raise UserError(f"--host {host!r} is no address of this machine: {error}") from None
    loopback = bool(host) and all(address.is_loopback for address in found)
    if api_key is not None and (not api_key.isascii() or not api_key.isprintable() or not api_key.strip() or " " in api_key):
        raise UserError("the API key must be printable ASCII characters without spaces")
    if not loopback and api_key is None:
        raise UserError(f"--host {host!r} can be reached from other machines, so an API key is required: set MCORE_RL_API_KEY (or --api-key), "
                        "or bind to 127.0.0.1")
    return loopback


class Server:
    """Serves `engine` on `host` and `port` (0: any that is free). The socket is open from here on; `url` says where.

    `group`: the process group of a tensor-parallel engine, of which this rank is the first; the others call `worker.follow`.
    Raises UserError where the address cannot be had, and where starlette or uvicorn is missing.
    """

    def __init__(self, engine: Engine, serving: Serving, host: str = "127.0.0.1", port: int = 8000, api_key: str | None = None,
                 group: dist.ProcessGroup | None = None) -> None:
        loopback = check_address(host, port, api_key)
        uvicorn, make_app, names = libraries()
        self.worker = EngineWorker(engine, group)
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family, backlog=1024)
        except OSError as error:
            raise UserError(f"cannot listen on {host} port {port}: {error.strerror or error}; choose another --port or --host") from None
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._socket.getsockname()[1]}/v1"
        app = make_app(self.worker, serving, api_key, [*names, shown] if loopback and api_key is None else None)
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=DRAIN))
        self._thread: threading.Thread | None = None

    def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Serve until SIGTERM or SIGINT: requests that are being answered end first, a second signal ends them too.

        Raises RuntimeError where the engine failed: whoever looks after the process shall start it again.
        """
        self.worker.on_failure = lambda: setattr(self._server, "should_exit", True)
        self.worker.start()
        try:
            with _ending_quietly():
                ready()
                self._server.run(sockets=[self._socket])
        finally:
            self.worker.stop()
            self._socket.close()
        if self.worker.failure is not None:
            raise RuntimeError("the engine failed; its traceback is above") from self.worker.failure

    def start(self) -> None:
        """Serve in a thread until `stop`."""
        self.worker.start()
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, name="http-server", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the answers that are under way, the server and the worker. The engine is left without their work."""
        self.worker.stop()
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join()
        self._socket.close()


def libraries() -> tuple[Any, Any, list[str]]:
    """(uvicorn, make_app, LOOPBACK_NAMES). Raises UserError where they are not installed."""
    try:
        import uvicorn

        from mcore_rl.server.app import LOOPBACK_NAMES, make_app
    except ImportError as error:
        raise UserError(_MISSING.format(error)) from None
    return uvicorn, make_app, LOOPBACK_NAMES


@contextlib.contextmanager
def _ending_quietly() -> Iterator[None]:
    """uvicorn raises the signal that ended it once more when it is done; then it shall do nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {s: signal.signal(s, lambda *_: None) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
