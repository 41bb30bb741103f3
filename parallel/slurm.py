"""What Slurm's environment variables say about hosts and tasks, read without the `scontrol` binary.

Sources: the sbatch(1) and srun(1) manual pages, "OUTPUT ENVIRONMENT VARIABLES". Variables of the step (`SLURM_STEP_*`)
win over those of the job: a step may run on a part of the allocation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from parallel.errors import UserError

_NUMBER = re.compile(r"\d+")
_RANGE = re.compile(r"(\d+)-(\d+)")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand_hostlist(text: str) -> list[str]:
    """The host names of a Slurm host list, in its order: `"n[01-03,7],big1"` -> n01, n02, n03, n7, big1.

    Zero padding is that of the first number of a range. Raises UserError that quotes the list where it is malformed.
    """
    hosts = [host for entry in _entries(text) for host in _expand_entry(entry, text)]
    if not hosts:
        raise _malformed(text, "it is empty")
    return hosts


def _malformed(text: str, why: str) -> UserError:
    return UserError(f"Slurm host list {text!r} cannot be read: {why}; allowed are names and ranges such as 'login0,gpu[003,007-009]'")


def _entries(text: str) -> list[str]:
    """Split at the commas outside brackets."""
    entries, current, inside = [], "", False
    for char in text.strip():
        if char == "[" and inside or char == "]" and not inside:
            raise _malformed(text, f"a {char!r} without its partner")
        inside = char == "[" or inside and char != "]"
        if char == "," and not inside:
            entries.append(current)
            current = ""
        else:
            current += char
    if inside:
        raise _malformed(text, "a '[' is not closed")
    if not all([*entries, current]):
        raise _malformed(text, "a name is empty")
    return [*entries, current]


def _expand_entry(entry: str, text: str) -> list[str]:
    """Expand the brackets of one entry from left to right (several brackets multiply)."""
    head, bracket, rest = entry.partition("[")
    if not bracket:
        return [entry]
    inner, _, tail = rest.partition("]")
    numbers = [number for part in inner.split(",") for number in _numbers(part, text)]
    return [head + number + end for number in numbers for end in (_expand_entry(tail, text) if tail else [""])]


def _numbers(part: str, text: str) -> list[str]:
    if _NUMBER.fullmatch(part):
        return [part]
    bounds = _RANGE.fullmatch(part)
    if not bounds:
        raise _malformed(text, f"{part!r} in brackets is neither a number nor a range")
    first, last = bounds.groups()
    if int(first) > int(last):
        raise _malformed(text, f"the range {part!r} runs backwards")
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


@dataclass(frozen=True)
class SlurmTasks:
    """Processes of this step: `per_node[i]` ranks on node i; with `torchrun_per_node` srun started one launcher a node."""

    per_node: tuple[int, ...]
    torchrun_per_node: bool = False

    @property
    def world_size(self) -> int:
        return sum(self.per_node)


def slurm_tasks(env: Mapping[str, str]) -> SlurmTasks:
    """Ranks per node. One task a node on several nodes of several GPUs means one torchrun a node: world = nodes x GPUs.

    Raises UserError for counts that contradict each other, uneven nodes, and more tasks than GPUs on a node.
    """
    nodes = number(env, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", default=1)
    gpus = number(env, "SLURM_GPUS_ON_NODE", default=0)
    total = number(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS", default=0)
    per_node = _tasks_per_node(env, nodes, total)
    if len(per_node) != nodes or total and sum(per_node) != total:
        raise UserError(f"Slurm: tasks per node {list(per_node)} do not agree with {nodes} nodes and {total or sum(per_node)} tasks; "
                        "start the step with --nodes=N --ntasks-per-node=M")
    if len(set(per_node)) > 1:
        raise UserError(f"Slurm: nodes hold different numbers of tasks {list(per_node)}; every node must hold the same: "
                        "use --nodes=N --ntasks-per-node=M")
    if gpus and per_node[0] > gpus:
        raise UserError(f"Slurm: {per_node[0]} tasks on a node with SLURM_GPUS_ON_NODE={gpus}; "
                        f"one rank needs one GPU: use --ntasks-per-node={gpus}")
    if nodes > 1 and per_node[0] == 1 and gpus > 1:
        return SlurmTasks((gpus,) * nodes, torchrun_per_node=True)
    return SlurmTasks(per_node)


def _tasks_per_node(env: Mapping[str, str], nodes: int, total: int) -> tuple[int, ...]:
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if env.get(name):
            return _run_lengths(name, env[name])
    each = number(env, "SLURM_NTASKS_PER_NODE", default=0)
    if not each:
        each, left = divmod(total or nodes, nodes)
        return tuple(each + (node < left) for node in range(nodes))
    return (each,) * nodes


def _run_lengths(name: str, text: str) -> tuple[int, ...]:
    """`"8(x3),4"` -> (8, 8, 8, 4)."""
    counts: list[int] = []
    for part in text.split(","):
        match = _TASKS.fullmatch(part.strip())
        if not match:
            raise UserError(f"{name}={text!r} cannot be read; Slurm writes it like '8(x3),4'")
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def number(env: Mapping[str, str], *names: str, default: int | None = None) -> int:
    """The first of the variables `names` that is set, as a whole number. Raises UserError that names variable and value."""
    for name in names:
        if env.get(name, "").strip():
            try:
                return int(env[name])
            except ValueError:
                raise UserError(f"environment variable {name}={env[name]!r} is not a whole number; "
                                "unset it or start through a launcher") from None
    if default is None:
        raise UserError(f"environment variable {names[0]} is not set although the others of its launcher are; "
                        "start all ranks with torchrun, mpirun or srun")
    return default


def slurm_hosts(env: Mapping[str, str]) -> list[str]:
    """Hosts of this step (else of the job); an empty list where Slurm names none."""
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if env.get(name):
            return expand_hostlist(env[name])
    return []
