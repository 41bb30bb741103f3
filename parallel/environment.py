"""Which rank this process is: read from what torchrun, mpirun or srun put into the environment, or a world of one.

All ranks compute the same master address and port from the environment alone; nothing is asked of the network before
`start`. An explicit MASTER_ADDR or MASTER_PORT wins everywhere. Where there is none:

* srun: the first host of the step's host list by name (127.0.0.1 on one node), and a port from job and step id;
* mpirun on one host: 127.0.0.1 and a port from the job's PMIx namespace (else the id of the common parent process);
* mpirun on several hosts: rank 0's choice, broadcast with mpi4py where it is installed, else a UserError.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

from parallel.errors import UserError
from parallel.slurm import number, slurm_hosts, slurm_tasks

logger = logging.getLogger(__name__)

LAUNCHERS = ("torchrun", "mpirun", "srun")
ALLOW_LOOPBACK = "MCORE_RL_ALLOW_LOOPBACK_MASTER"
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Environment:
    """This process's place in the world. `launcher` is torchrun, mpirun, srun, env (RANK set by hand) or plain."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    launcher: str

    def __post_init__(self) -> None:
        for name, value, size in (("rank", self.rank, self.world_size), ("local rank", self.local_rank, self.local_world_size)):
            if not 0 <= value < size:
                raise UserError(f"{self.launcher}: {name} is {value} in a world of {size}; it must lie between 0 and {size - 1}")
        if not 0 < self.master_port < 65536:
            raise UserError(f"{self.launcher}: MASTER_PORT is {self.master_port}; it must lie between 1 and 65535")

    @property
    def nodes(self) -> int:
        """Number of hosts."""
        return -(-self.world_size // self.local_world_size)


def read_environment(env: Mapping[str, str] = os.environ,
                     broadcast: Callable[[Mapping[str, str]], tuple[str, int]] | None = None) -> Environment:
    """Rank, world and master from the launcher's variables; nothing is started.

    An explicit RANK and WORLD_SIZE (torchrun) win over Open MPI's variables, these over a Slurm step's, these over PMI's:
    the innermost launcher sets its own. `broadcast` settles the master for mpirun on several hosts (default: mpi4py).
    Raises UserError for contradictory variables and for a loopback master with several nodes.
    """
    if "RANK" in env and "WORLD_SIZE" in env:
        found = _from_rank(env)
    elif "OMPI_COMM_WORLD_RANK" in env:
        found = _from_mpi(env, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", ("OMPI_COMM_WORLD_LOCAL_RANK",),
                          ("OMPI_COMM_WORLD_LOCAL_SIZE",), broadcast or mpi_broadcast)
    elif "SLURM_PROCID" in env and ("SLURM_STEP_ID" in env or "SLURM_STEP_NUM_TASKS" in env):
        found = _from_slurm(env)
    elif "PMI_RANK" in env:
        found = _from_mpi(env, "PMI_RANK", "PMI_SIZE", ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
                          ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"), broadcast or mpi_broadcast)
    else:
        if number(env, "SLURM_NTASKS", default=1) > 1 and "SLURM_PROCID" in env:
            logger.warning("SLURM_NTASKS=%s but this process was not started by srun: it runs as a world of one", env["SLURM_NTASKS"])
        found = Environment(0, 1, 0, 1, env.get("MASTER_ADDR") or "127.0.0.1", number(env, "MASTER_PORT", default=29500), "plain")
    if found.nodes > 1 and is_loopback(found.master_addr) and env.get(ALLOW_LOOPBACK) != "1":
        raise UserError(f"{found.launcher}: MASTER_ADDR is {found.master_addr!r} in a world of {found.nodes} nodes; "
                        f"other nodes cannot reach it: unset it or give a name or address of the first node "
                        f"(where all nodes are one machine, set {ALLOW_LOOPBACK}=1)")
    return found


def _from_rank(env: Mapping[str, str]) -> Environment:
    rank, world = number(env, "RANK"), number(env, "WORLD_SIZE")
    launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in env else "env"
    return Environment(rank, world, number(env, "LOCAL_RANK", default=rank), number(env, "LOCAL_WORLD_SIZE", default=world),
                       env.get("MASTER_ADDR") or "127.0.0.1", number(env, "MASTER_PORT", default=29500), launcher)


def _from_slurm(env: Mapping[str, str]) -> Environment:
    tasks = slurm_tasks(env)
    if tasks.torchrun_per_node:
        raise UserError(f"srun started one task on each of {len(tasks.per_node)} nodes that have {tasks.per_node[0]} GPUs; "
                        f"start torchrun --nproc-per-node={tasks.per_node[0]} in each task (world {tasks.world_size}), "
                        f"or use --ntasks-per-node={tasks.per_node[0]}")
    rank, node, local = number(env, "SLURM_PROCID"), number(env, "SLURM_NODEID", default=0), number(env, "SLURM_LOCALID", default=0)
    each = tasks.per_node[0]
    if rank != node * each + local:
        raise UserError(f"srun: rank {rank} is task {local} of node {node} with {each} tasks a node; neighbouring ranks must share a node: "
                        "use --distribution=block")
    port = derived_port(f"slurm {env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', '')}")
    return Environment(rank, tasks.world_size, local, each, slurm_master(env), number(env, "MASTER_PORT", default=port), "srun")


def slurm_master(env: Mapping[str, str]) -> str:
    """MASTER_ADDR where set, else the first host of the step by name; 127.0.0.1 on one node.

    SLURM_LAUNCH_NODE_IPADDR is not used: it is the node that submitted, often a login node.
    """
    if env.get("MASTER_ADDR"):
        return env["MASTER_ADDR"]
    hosts = slurm_hosts(env)
    if not hosts and number(env, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", default=1) > 1:
        raise UserError("srun: neither SLURM_STEP_NODELIST nor SLURM_JOB_NODELIST is set for a step of several nodes; "
                        "set MASTER_ADDR to the first node")
    return hosts[0] if len(hosts) > 1 else "127.0.0.1"


def _from_mpi(env: Mapping[str, str], rank_name: str, size_name: str, local_names: tuple[str, ...], local_sizes: tuple[str, ...],
              broadcast: Callable[[Mapping[str, str]], tuple[str, int]]) -> Environment:
    rank, world = number(env, rank_name), number(env, size_name)
    local, local_world = number(env, *local_names), number(env, *local_sizes)
    if env.get("MASTER_ADDR"):
        address, port = env["MASTER_ADDR"], number(env, "MASTER_PORT", default=derived_port("mpirun " + env["MASTER_ADDR"]))
    elif local_world == world:
        address, port = "127.0.0.1", number(env, "MASTER_PORT", default=derived_port("mpirun " + _mpi_job(env)))
    else:
        address, port = broadcast(env)
    return Environment(rank, world, local, local_world, address, port, "mpirun")


def _mpi_job(env: Mapping[str, str]) -> str:
    """What all ranks of one mpirun share and two mpiruns do not: the job's namespace, else the parent process."""
    for name in ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID"):
        if env.get(name):
            return env[name]
    return f"parent {os.getppid()}"


def mpi_broadcast(env: Mapping[str, str]) -> tuple[str, int]:
    """Rank 0's host name and port for all ranks, over mpi4py. Raises UserError where mpi4py is not installed."""
    try:
        from mpi4py import MPI
    except ImportError:
        raise UserError("mpirun: the ranks are on several hosts, MASTER_ADDR is not set and mpi4py is not installed; "
                        "pass -x MASTER_ADDR=<first host> -x MASTER_PORT=<port> to mpirun, or install mpi4py") from None
    mine = (socket.gethostname(), number(env, "MASTER_PORT", default=derived_port("mpirun " + _mpi_job(env))))
    address, port = MPI.COMM_WORLD.bcast(mine, root=0)
    return str(address), int(port)


def derived_port(key: str) -> int:
    """A port in 20000-29999 (below Linux's ephemeral range) that is a function of `key` alone."""
    return 20000 + zlib.crc32(key.encode()) % 10000


def is_loopback(address: str) -> bool:
    return address in ("localhost", "::1", "localhost.localdomain") or address.startswith("127.")


def check_master(environment: Environment, resolve: Callable[[str], str] = socket.gethostbyname) -> None:
    """With several nodes: refuse a master that does not resolve, or that another node resolves to a loopback address.

    (On the first node itself its name may well be 127.0.1.1, as Debian's hosts file has it.) Raises UserError.
    """
    if environment.nodes == 1 or is_loopback(environment.master_addr):
        return
    try:
        address = resolve(environment.master_addr)
    except OSError as error:
        raise UserError(f"master address {environment.master_addr!r} does not resolve on {socket.gethostname()}: {error}; "
                        "set MASTER_ADDR to a name or address of the first node that all nodes know") from None
    if is_loopback(address) and environment.rank >= environment.local_world_size:
        raise UserError(f"master address {environment.master_addr!r} resolves to {address} on {socket.gethostname()}, "
                        "which is not that node; set MASTER_ADDR to an address of the first node that all nodes can reach")


def start(environment: Environment, backend: str, timeout: timedelta = timedelta(minutes=30)) -> None:
    """Initialise torch.distributed. `timeout` bounds each collective: a rank may wait that long for the slowest one.

    Sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which libraries below read.
    A plain process uses a store in memory: no port is taken. Raises UserError where the master cannot be used.
    """
    import torch.distributed as dist

    check_master(environment)
    os.environ.update(RANK=str(environment.rank), WORLD_SIZE=str(environment.world_size), LOCAL_RANK=str(environment.local_rank),
                      LOCAL_WORLD_SIZE=str(environment.local_world_size), MASTER_ADDR=environment.master_addr,
                      MASTER_PORT=str(environment.master_port))
    if environment.launcher == "plain":
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    try:
        dist.init_process_group(backend, init_method="env://", timeout=timeout)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise UserError(f"rank {environment.rank} cannot meet the others at {environment.master_addr}:{environment.master_port} "
                        f"({environment.launcher}): {str(error).splitlines()[0]}; set MASTER_ADDR to the first node and MASTER_PORT "
                        "to a free port") from None


def die_with_parent() -> None:
    """Linux: the kernel sends this process SIGKILL when the thread that started it ends. Elsewhere: no effect."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _init_is_launcher() -> bool:
    """Whether process 1 is the launcher itself, as in a container started with it; else a child of 1 is an orphan."""
    try:
        with open("/proc/1/cmdline", encoding="utf-8", errors="replace") as file:
            command = file.read()
    except OSError:
        return False
    return any(name in command for name in ("torchrun", "torch.distributed", "launch.local", "mpirun", "mpiexec", "prte", "hydra", "slurm"))


def exit_with_launcher(environment: Environment, poll_s: float = 0.5) -> bool:
    """End this rank at once (SIGKILL) when its launcher is gone; True where that was armed.

    An orphaned rank would go on writing into a run directory that a restart has taken over. Armed only under torchrun,
    mpirun and srun: a plain process may outlive its shell. The kernel's signal covers Linux; a thread that compares the
    parent's id covers other systems and a launcher that dies just before the signal is set.
    """
    if environment.launcher not in LAUNCHERS:
        return False
    parent = os.getppid()
    if parent == 1 and not _init_is_launcher():
        print(f"rank {environment.rank}: its launcher ({environment.launcher}) is gone already; exiting", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    die_with_parent()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(poll_s)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="exit-with-launcher", daemon=True).start()
    return True
