"""Samples and the batch of one step: ragged, no padding anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Sample:
    """One trajectory, possibly of several turns: token ids and, per token, who made it and with which weights.

    All per-token tuples have the length of `token_ids`. `mask` is true where the policy produced the token; elsewhere (prompt,
    tool output, the user's next turn) `rollout_log_probs` is 0.0 and `versions` is -1.
    """

    group: int
    index: int
    row: int
    token_ids: tuple[int, ...]
    mask: tuple[bool, ...]
    rollout_log_probs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: str
    prompt: str = ""
    response: str = ""
    attempt: int = 0
    reward: float | None = None

    def __post_init__(self) -> None:
        sizes = {name: len(getattr(self, name)) for name in ("token_ids", "mask", "rollout_log_probs", "versions")}
        if len(set(sizes.values())) != 1:
            raise ValueError(f"sample {self.group}.{self.index}: per-token columns differ in length: {sizes}")
        if self.mask and self.mask[0]:
            raise ValueError(f"sample {self.group}.{self.index}: its first token has no context and cannot be the policy's")

    @property
    def response_length(self) -> int:
        """Tokens that the policy produced."""
        return sum(self.mask)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Sample:
        known = {f.name for f in fields(cls)}
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in data.items() if k in known})


SAMPLE_COLUMNS = frozenset(f.name for f in fields(Sample)) - {"reward"}


@dataclass
class Batch:
    """The samples of one step in canonical order (group, index), the same on every rank, and the columns computed for them.

    A column holds one entry per sample, in that order: a number, or a tensor [tokens] aligned with `token_ids` (entry t is about
    token t given the tokens before it). `metrics` collects what phases report.
    """

    step: int
    rows: list[int] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    columns: dict[str, Sequence[Any]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    def has(self, column: str) -> bool:
        return column in self.columns or column in ("rows",) or (column in SAMPLE_COLUMNS and bool(self.samples))

    def __getitem__(self, column: str) -> Sequence[Any]:
        return self.columns[column]

    def put(self, column: str, values: Sequence[Any]) -> None:
        if len(values) != len(self.samples):
            raise ValueError(f"column {column} has {len(values)} entries for {len(self.samples)} samples")
        self.columns[column] = values
