"""Short messages between two ranks, and who is lost: a peer whose connection broke is left out, the others are served to the end."""

from __future__ import annotations

import torch
import torch.distributed as dist

OFFER, READY, ACK, DONE = 11, 12, 13, 14  # tags


class Control:
    """Messages of one execution. The first error with a peer is kept in `failures`; it gets and sends nothing after that."""

    def __init__(self, group: dist.ProcessGroup | None, failures: list[Exception]) -> None:
        self.group, self.failures = group, failures
        self.lost: set[int] = set()
        self._sent: list[tuple[int, dist.Work | None, torch.Tensor]] = []

    def send(self, peer: int, content: bytes, tag: int) -> None:
        """Send without waiting. READY carries one byte, ACK and DONE none; an OFFER may be of any length."""
        if tag == OFFER:
            self._send(peer, torch.tensor([len(content)]), tag)
        if content or tag != OFFER:
            self._send(peer, torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8), tag)

    def receive(self, peer: int, tag: int) -> bytes:
        """Wait for a message. Empty where there is nothing in it or the peer is lost."""
        length = torch.tensor([1])
        if tag == OFFER and not self._receive(peer, length, tag):
            return b""
        content = torch.empty(int(length), dtype=torch.uint8)
        if not len(content) or not self._receive(peer, content, tag):
            return b""
        return bytes(content.numpy())

    def finish(self) -> None:
        """Wait until everything sent has left."""
        for peer, work, _ in self._sent:
            if work is not None and peer not in self.lost:
                try:
                    work.wait()
                except Exception as error:
                    self._lose(peer, error)
        self._sent.clear()

    def _send(self, peer: int, tensor: torch.Tensor, tag: int) -> None:
        if peer not in self.lost:
            try:
                self._sent.append((peer, dist.isend(tensor, peer, group=self.group, tag=tag), tensor))
            except Exception as error:
                self._lose(peer, error)

    def _receive(self, peer: int, tensor: torch.Tensor, tag: int) -> bool:
        if peer in self.lost:
            return False
        try:
            dist.recv(tensor, peer, group=self.group, tag=tag)
            return True
        except Exception as error:
            self._lose(peer, error)
            return False

    def _lose(self, peer: int, error: Exception) -> None:
        self.lost.add(peer)
        self.failures.append(RuntimeError(f"rank {peer} is lost: {error}"))
