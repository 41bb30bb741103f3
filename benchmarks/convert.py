"""Conversion from Hugging Face to Megatron's format (TP2, PP2) and back, beside a plain copy of the safetensors files.

    mcore-rl bench convert --json
    mcore-rl bench convert --direction mcore-to-hf --model models/SmolLM2-135M-Instruct

Every figure is of a process of its own, from opening the source to the published, synced directory; of the repetitions the fastest
counts. The plain copy loads every tensor of every file and saves it again, synced. Sources are in the page cache on all sides.
Without `--direction`, `seconds`, `gb_per_s` and the others are those of the slower direction, and each has its own beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from parallel.errors import UserError
from parallel.model_config import ModelConfig

ROOT = Path(__file__).resolve().parents[1]
DIRECTIONS = ("hf-to-mcore", "mcore-to-hf")
# a llama of 0.6 billion parameters: 1.2 GB in bfloat16
MADE_UP = dict(model_type="llama", hidden_size=2048, intermediate_size=5632, num_hidden_layers=10, num_attention_heads=16, num_key_value_heads=4,
               vocab_size=32000, max_position_embeddings=2048, rope_theta=10000.0, rms_norm_eps=1e-5, dtype="bfloat16")


def measure(options: list[str]) -> dict[str, float]:
    """seconds, GB/s and growth of peak memory of each direction, and GB/s of the plain copy in the same run."""
    arguments = _options(options)
    with tempfile.TemporaryDirectory(prefix="mcore-rl-convert-", dir=arguments.dir) as folder:
        source = Path(arguments.model) if arguments.model else _made_up(Path(folder) / "hf")
        wanted = (arguments.direction,) if arguments.direction else DIRECTIONS
        figures = {d: _direction(d, source, Path(folder), arguments.repeat) for d in wanted}
    slower = min(figures, key=lambda d: figures[d]["of_plain_copy"])
    out = dict(figures[slower])
    for direction, values in figures.items() if len(figures) > 1 else ():
        out.update({f"{direction.replace('-', '_')}_{name}": value for name, value in values.items() if name != "bytes"})
    return out


def _options(options: list[str]) -> argparse.Namespace:
    p = argparse.ArgumentParser("mcore-rl bench convert", description="Measure conversion between Hugging Face and Megatron directories.")
    p.add_argument("--model", metavar="DIR", help="a Hugging Face directory (default: a llama of 1.2 GB is made for the run)")
    p.add_argument("--direction", choices=DIRECTIONS, help="one direction by itself (default: both)")
    p.add_argument("--repeat", type=int, default=3, metavar="N", help="the fastest of N counts (default 3)")
    p.add_argument("--dir", metavar="DIR", help="where to write (default: the system's temporary directory)")
    arguments = p.parse_args(options)
    if arguments.repeat < 1:
        raise UserError(f"bench convert: --repeat is {arguments.repeat}; it must be at least 1")
    return arguments


def _made_up(directory: Path) -> Path:
    """A directory of the made-up model with random weights."""
    from checkpoint.hf_writer import HFWriter
    from resharding.layouts import hf_layout

    model = ModelConfig.from_hf(MADE_UP)
    generator = torch.Generator().manual_seed(0)
    with HFWriter(directory, hf_layout(model, torch.bfloat16), model, torch.bfloat16) as writer:
        for local in writer.layout.tensors:
            writer.write(local.name, torch.empty(local.shape, dtype=torch.bfloat16).normal_(std=0.02, generator=generator))
    return directory


def _direction(direction: str, source: Path, folder: Path, repeat: int) -> dict[str, float]:
    stored = source
    if direction == "mcore-to-hf":
        stored = folder / "mcore-source"
        if not stored.exists():
            _run("hf-to-mcore", source, stored)
    runs: list[dict[str, float]] = []
    plain: list[float] = []
    for _ in range(repeat):  # in turn, so that both meet the same disk
        for name, place in (("plain", source), (direction, stored)):
            written = folder / "written"
            figures = _run(name, place, written)
            shutil.rmtree(written)
            runs.append(figures) if name == direction else plain.append(figures["seconds"])
    size = sum(p.stat().st_size for p in source.glob("*.safetensors"))
    seconds = min(r["seconds"] for r in runs)
    return {"bytes": float(size), "seconds": seconds, "gb_per_s": size / seconds / 1e9, "plain_copy_seconds": min(plain),
            "plain_copy_gb_per_s": size / min(plain) / 1e9, "of_plain_copy": min(plain) / seconds,
            "peak_rss_growth_bytes": max(r["peak_rss_growth_bytes"] for r in runs)}


def _run(name: str, source: Path, destination: Path) -> dict[str, float]:
    """One job in a process of its own."""
    done = subprocess.run([sys.executable, "-m", "benchmarks.convert", name, str(source), str(destination)], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name} of {source} failed:\n{done.stderr}")
    out: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return out


def _job(name: str, source: Path, destination: Path) -> dict[str, float]:
    work = {"plain": _plain_copy, "hf-to-mcore": _to_mcore, "mcore-to-hf": _to_hf}[name]
    import checkpoint.convert  # noqa: F401  (loading code is not part of the work)

    os.sync()
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    started = time.perf_counter()
    work(source, destination)
    return {"seconds": time.perf_counter() - started, "peak_rss_growth_bytes": float(max(0, _memory("VmHWM") - before))}


def _plain_copy(source: Path, destination: Path) -> None:
    from safetensors.torch import load_file, save_file

    destination.mkdir()
    for path in sorted(source.glob("*.safetensors")):
        save_file(load_file(path), destination / path.name)
    for path in [*destination.iterdir(), destination]:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def _to_mcore(source: Path, destination: Path) -> None:
    from checkpoint.convert import open_model, write_mcore
    from parallel.config import ParallelConfig

    with open_model("hf", source) as opened:
        write_mcore(opened, destination, ParallelConfig(tp=2, pp=2))


def _to_hf(source: Path, destination: Path) -> None:
    from checkpoint.convert import open_model, write_hf

    with open_model("mcore", source) as opened:
        write_hf(opened, destination)


def _memory(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    print(json.dumps(_job(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))))
