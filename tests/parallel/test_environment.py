"""Rank, world and master follow from the launcher's variables alone; what cannot work is refused with its reason."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from parallel.environment import Environment, check_master, derived_port, exit_with_launcher, read_environment, slurm_master
from parallel.errors import UserError
from parallel.slurm import expand_hostlist, slurm_tasks

HOSTLISTS = {
    "node[01-03,07]": "node01 node02 node03 node07", "gpu3": "gpu3",
    "login0,gpu[003,007-009],big1": "login0 gpu003 gpu007 gpu008 gpu009 big1",
    "n[9-11]": "n9 n10 n11", "n[009-011]": "n009 n010 n011", "a1,a2": "a1 a2", " node[1-2] ": "node1 node2", "n[08,8]": "n08 n8",
    "r[1-2]n[0-1]": "r1n0 r1n1 r2n0 r2n1", "c[1-2]-ib": "c1-ib c2-ib",
}


@pytest.mark.parametrize("text", HOSTLISTS)
def test_host_list_is_expanded_in_order_with_its_padding(text: str) -> None:
    assert expand_hostlist(text) == HOSTLISTS[text].split()


@pytest.mark.parametrize("text", ["", "node[01-03", "node[03-01]", "node[]", "node[1-x]", "node01]", "a,,b", "n[[1]]"])
def test_malformed_host_list_is_quoted_in_the_error(text: str) -> None:
    with pytest.raises(UserError, match="host list") as error:
        expand_hostlist(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize(("env", "per_node", "world"), [
    (dict(SLURM_NNODES="2", SLURM_TASKS_PER_NODE="4(x2)", SLURM_NTASKS="8", SLURM_GPUS_ON_NODE="4"), (4, 4), 8),
    (dict(SLURM_NNODES="2", SLURM_NTASKS_PER_NODE="8"), (8, 8), 16),
    (dict(SLURM_NNODES="1", SLURM_TASKS_PER_NODE="2", SLURM_NTASKS="2"), (2,), 2),
    (dict(SLURM_NNODES="4", SLURM_NTASKS="32", SLURM_TASKS_PER_NODE="8(x4)", SLURM_STEP_NUM_NODES="2", SLURM_STEP_NUM_TASKS="4",
          SLURM_STEP_TASKS_PER_NODE="2(x2)"), (2, 2), 4),
])
def test_slurm_task_counts(env: dict[str, str], per_node: tuple[int, ...], world: int) -> None:
    tasks = slurm_tasks(env)
    assert (tasks.per_node, tasks.world_size, tasks.torchrun_per_node) == (per_node, world, False)


def test_one_task_a_node_with_many_gpus_means_one_torchrun_a_node() -> None:
    env = dict(SLURM_NNODES="2", SLURM_NTASKS="2", SLURM_TASKS_PER_NODE="1(x2)", SLURM_GPUS_ON_NODE="8")
    tasks = slurm_tasks(env)
    assert tasks.torchrun_per_node and tasks.world_size == 16
    with pytest.raises(UserError, match="nproc-per-node=8"):
        read_environment({**env, "SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_JOB_NODELIST": "a[1-2]"})


@pytest.mark.parametrize(("env", "message"), [
    (dict(SLURM_NNODES="4", SLURM_TASKS_PER_NODE="8(x3),4", SLURM_NTASKS="28"), r"\[8, 8, 8, 4\]"),
    (dict(SLURM_NNODES="2", SLURM_NTASKS="16", SLURM_TASKS_PER_NODE="8(x2)", SLURM_GPUS_ON_NODE="4"),
     "8 tasks on a node with SLURM_GPUS_ON_NODE=4"),
    (dict(SLURM_NNODES="2", SLURM_NTASKS="9", SLURM_TASKS_PER_NODE="4(x2)"), r"\[4, 4\] do not agree with 2 nodes and 9 tasks"),
    (dict(SLURM_NNODES="2", SLURM_TASKS_PER_NODE="4x2"), "SLURM_TASKS_PER_NODE='4x2'"),
])
def test_slurm_task_counts_that_cannot_work_are_refused(env: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        slurm_tasks(env)


def test_master_address_under_slurm() -> None:
    assert slurm_master(dict(SLURM_JOB_NODELIST="gpu[04-05]", SLURM_LAUNCH_NODE_IPADDR="10.0.0.9")) == "gpu04"
    assert slurm_master(dict(SLURM_JOB_NODELIST="gpu[01-05]", SLURM_STEP_NODELIST="gpu[04-05]")) == "gpu04"
    assert slurm_master(dict(SLURM_JOB_NODELIST="gpu[04-05]", MASTER_ADDR="ib-gpu04")) == "ib-gpu04"
    assert read_environment({}).master_addr == "127.0.0.1"


def srun(rank: int, **more: str) -> dict[str, str]:
    return dict(SLURM_PROCID=str(rank), SLURM_NODEID=str(rank // 2), SLURM_LOCALID=str(rank % 2), SLURM_NNODES="2", SLURM_NTASKS="4",
                SLURM_TASKS_PER_NODE="2(x2)", SLURM_JOB_ID="77", SLURM_STEP_ID="0", SLURM_JOB_NODELIST="gpu[04-05]", **more)


def test_all_ranks_of_srun_compute_the_same_world() -> None:
    worlds = [read_environment(srun(rank)) for rank in range(4)]
    assert [(w.rank, w.local_rank, w.local_world_size) for w in worlds] == [(0, 0, 2), (1, 1, 2), (2, 0, 2), (3, 1, 2)]
    assert {(w.world_size, w.master_addr, w.master_port, w.launcher) for w in worlds} == {(4, "gpu04", derived_port("slurm 77.0"), "srun")}
    other_step = read_environment(srun(0) | {"SLURM_STEP_ID": "1"})
    assert other_step.master_port != worlds[0].master_port and 20000 <= other_step.master_port < 30000


def test_cyclic_distribution_and_loopback_master_are_refused() -> None:
    with pytest.raises(UserError, match="--distribution=block"):
        read_environment(srun(1) | {"SLURM_NODEID": "1", "SLURM_LOCALID": "0"})
    for address in ("localhost", "127.0.1.1", "::1"):
        with pytest.raises(UserError, match=f"'{address}' in a world of 2 nodes"):
            read_environment(srun(3, MASTER_ADDR=address))
    assert read_environment(srun(3, MASTER_ADDR="localhost", MCORE_RL_ALLOW_LOOPBACK_MASTER="1")).rank == 3


def test_a_batch_script_is_not_a_rank() -> None:
    """Inside `sbatch` without `srun` SLURM_PROCID is 0 for the script itself."""
    env = srun(0)
    del env["SLURM_STEP_ID"]
    assert read_environment(env).launcher == "plain" and read_environment(env).world_size == 1


def test_torchrun_inside_srun_wins() -> None:
    inner = dict(RANK="5", WORLD_SIZE="16", LOCAL_RANK="5", LOCAL_WORLD_SIZE="8",
                 MASTER_ADDR="gpu04", MASTER_PORT="29501", TORCHELASTIC_RUN_ID="x")
    assert read_environment(srun(0) | inner) == Environment(5, 16, 5, 8, "gpu04", 29501, "torchrun")
    del inner["TORCHELASTIC_RUN_ID"]
    assert read_environment(inner).launcher == "env"


def ompi(rank: int, local: int, size: int, local_size: int, **more: str) -> dict[str, str]:
    return dict(OMPI_COMM_WORLD_RANK=str(rank), OMPI_COMM_WORLD_SIZE=str(size), OMPI_COMM_WORLD_LOCAL_RANK=str(local),
                OMPI_COMM_WORLD_LOCAL_SIZE=str(local_size), **more)


def test_mpirun_on_one_host_and_on_several() -> None:
    one = [read_environment(ompi(r, r, 2, 2, PMIX_NAMESPACE="prterun-box-41@1")) for r in range(2)]
    assert {(w.master_addr, w.master_port) for w in one} == {("127.0.0.1", derived_port("mpirun prterun-box-41@1"))}
    by_parent = [read_environment(ompi(r, r, 2, 2)).master_port for r in range(2)]
    assert len(set(by_parent)) == 1
    several = read_environment(ompi(3, 1, 4, 2), broadcast=lambda env: ("box1", 23456))
    assert (several.master_addr, several.master_port, several.nodes, several.launcher) == ("box1", 23456, 2, "mpirun")
    assert read_environment(ompi(3, 1, 4, 2, MASTER_ADDR="box1")).master_addr == "box1"
    mpich = dict(PMI_RANK="1", PMI_SIZE="2", MPI_LOCALRANKID="1", MPI_LOCALNRANKS="2")
    assert read_environment(mpich).rank == 1


def test_bad_numbers_name_the_variable() -> None:
    with pytest.raises(UserError, match="WORLD_SIZE='two'"):
        read_environment(dict(RANK="0", WORLD_SIZE="two"))
    with pytest.raises(UserError, match="rank is 4 in a world of 4"):
        read_environment(dict(RANK="4", WORLD_SIZE="4", LOCAL_RANK="0"))


def test_master_that_cannot_be_reached_is_found_before_the_rendezvous() -> None:
    def fails(name: str) -> str:
        raise OSError("Name or service not known")

    with pytest.raises(UserError, match="'gpu04' does not resolve"):
        check_master(read_environment(srun(3)), fails)
    with pytest.raises(UserError, match="resolves to 127.0.1.1"):
        check_master(read_environment(srun(3)), lambda name: "127.0.1.1")
    check_master(read_environment(srun(0)), lambda name: "127.0.1.1")  # its own name may be loopback on the first node
    check_master(read_environment(srun(3)), lambda name: "10.0.1.4")


def test_a_plain_process_may_outlive_its_parent() -> None:
    assert exit_with_launcher(read_environment({})) is False


PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", '''
import time
from parallel.environment import exit_with_launcher, Environment
assert exit_with_launcher(Environment(0, 1, 0, 1, "127.0.0.1", 29500, "mpirun"))
print("armed", flush=True)
time.sleep(60)
'''])
print(child.pid, flush=True)
child.wait()
"""


def test_a_rank_dies_with_its_launcher() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    lines = {parent.stdout.readline().strip(), parent.stdout.readline().strip()}
    assert "armed" in lines
    pid = int((lines - {"armed"}).pop())
    parent.kill()
    parent.wait()
    assert gone(pid)


def gone(pid: int, seconds: float = 10.0) -> bool:
    """Whether the process ended (a zombie has ended) within the time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] in "ZX":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False
