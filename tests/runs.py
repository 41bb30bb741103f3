"""Small real runs for tests: a configuration in a temporary directory, run on ranks of the pool or as processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from tests.models import write_model

CHARACTERS = "0123456789+="


def parity(response: str, row: Any) -> float:
    """A reward that a random model earns about half the time."""
    return float(sum(map(ord, response)) % 2)


def write_run(directory: Path, family: str = "qwen2", **sections: dict[str, Any]) -> Path:
    """A model with a character tokenizer and a configuration of a three-step run on random arithmetic; returns the config file."""
    from mcore_rl.tokens import character_tokenizer

    tokenizer = character_tokenizer(CHARACTERS)
    model = write_model(directory / "model", family, vocab_size=len(tokenizer), max_position_embeddings=32, initializer_range=0.3,
                        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id)
    tokenizer.save_pretrained(model)
    config: dict[str, Any] = {
        "run": {"dir": str(directory / "run"), "steps": 3, "seed": 5},
        "model": {"path": str(model), "dtype": "float32", "make_vocab_size_divisible_by": 8},
        "actor": {"micro_batch_size": 4, "log_prob_micro_batch_size": 8, "optimizer": {"lr": 1e-3, "eps": 1e-4}},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_tokens": 6},
        "data": {"train": "builtin:addition-train", "max_prompt_tokens": 16},
        "reward": {"name": "function", "function": "tests.runs:parity"},
        "log": {"plots": False, "tensorboard": False},
    }
    for name, values in sections.items():
        config[name] = _merged(config.get(name, {}), values)
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def _merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    return {**old, **{k: _merged(old.get(k, {}), v) if isinstance(v, dict) else v for k, v in new.items()}}


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]


def values(row: dict[str, Any]) -> dict[str, Any]:
    """A metrics record without what depends on the clock and on the process, and without what the engine had to compute (a resume finds no cached prompts)."""
    return {k: v for k, v in row.items() if not k.startswith(("time/", "engine/", "memory/")) and not k.endswith(("seconds", "_per_second"))}


def run_training(config: str, overrides: list[str], with_weights: bool = False) -> Any:
    """On a rank of the pool: the whole `mcore-rl train`. Rank 0 returns (metrics, canonical weights or None)."""
    import torch.distributed as dist

    from mcore_rl.commands.train import open_run, take_directory
    from mcore_rl.config import load_config
    from mcore_rl.loop import train
    from mcore_rl.record import Recorder
    from mcore_rl.run import joined
    from tests.parallel.test_models import gathered

    loaded = load_config(config, overrides, "train")
    with joined("cpu", 1) as world:
        directory, lease = take_directory(loaded)
        with lease:
            run = open_run(loaded, world, directory)
            run.lease = lease
            recorder = Recorder(run)
            recorder.resume(run)
            try:
                train(run, recorder)
            finally:
                recorder.close()
            run.actor.training.memory.restore(["parameters"])
            weights = gathered(run.actor.training, run.actor.training.tensors) if with_weights else None
    return (read_metrics(directory), weights) if dist.get_rank() == 0 else None
