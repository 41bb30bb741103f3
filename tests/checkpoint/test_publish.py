"""A checkpoint is there whole or not at all; what is newest, what is damaged and what is deleted follow stated rules."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoint.run_state import clean_leftovers, find_latest, keep_newest, resume_point, verify
from parallel.errors import UserError
from tests.checkpoint import writers
from tests.worker_pool import run_ranks


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Steps 10 and 20, one process."""
    writers.save(str(tmp_path), 10)
    writers.save(str(tmp_path), 20)
    return tmp_path


def weights(run_dir: Path, step: int = 20) -> Path:
    return run_dir / f"checkpoints/step_{step:06d}/weights.rank00000.pt"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "shard cut to nothing": (lambda d: weights(d).write_bytes(b""), "weights.rank00000.pt has 0 bytes"),
    "manifest cut in half": (lambda d: half(d / "checkpoints/step_000020/manifest.json"), "manifest.json cannot be read"),
    "shard deleted": (lambda d: weights(d).unlink(), "weights.rank00000.pt is missing"),
    "one bit flipped": (lambda d: flip(weights(d)), "weights.rank00000.pt has changed"),
    "no manifest": (lambda d: (d / "checkpoints/step_000020/manifest.json").unlink(), "manifest.json is missing"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_newest_is_passed_over_by_name_and_refused_when_asked_for(kind: str, run_dir: Path,
                                                                            caplog: pytest.LogCaptureFixture) -> None:
    damage, reason = DAMAGE[kind]
    damage(run_dir)
    with caplog.at_level(logging.WARNING):
        latest = find_latest(run_dir)
    assert latest is not None and writers.content(latest) == 10
    assert any("step_000020" in message and reason in message for message in caplog.messages)
    with pytest.raises(UserError, match="step_000020.*is not complete"):
        resume_point(run_dir, run_dir / "checkpoints/step_000020")
    writers.save(str(run_dir), 20)  # the run comes by step 20 again and replaces the damaged one
    assert (latest := find_latest(run_dir)) is not None and writers.content(latest) == 20


@pytest.mark.parametrize(("text", "warned"), [("", True), ("30", True), ("step_000030\n", True),
                                              ("20\r\n", False), ("step_000020\n", False)])
def test_pointer_is_checked_never_trusted(text: str, warned: bool, run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    (run_dir / "checkpoints/latest").write_bytes(text.encode())
    latest = find_latest(run_dir)
    assert latest is not None and writers.content(latest) == 20
    assert any("latest names" in message for message in caplog.messages) == warned


def test_leftovers_are_no_checkpoints_and_are_removed(run_dir: Path) -> None:
    root = run_dir / "checkpoints"
    (root / ".tmp-step_000030-7").mkdir()
    (root / ".tmp-step_000030-7/a").write_text("part")
    (root / "step_000010").rename(root / ".old-step_000010-3")  # died while replacing step 10
    assert resume_point(run_dir) == root / "step_000020"
    assert sorted(path.name for path in root.iterdir()) == ["latest", "step_000010", "step_000020"]
    assert clean_leftovers(run_dir) == []


def test_no_checkpoint_and_no_usable_checkpoint_are_different(tmp_path: Path) -> None:
    assert find_latest(tmp_path) is None
    writers.save(str(tmp_path), 5)
    flip(weights(tmp_path, 5))
    with pytest.raises(UserError, match="none is complete.*step_000005"):
        find_latest(tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        verify(tmp_path / "checkpoints/step_000006")


def test_all_ranks_write_and_agree(tmp_path: Path) -> None:
    assert run_ranks(3, writers.save_steps, str(tmp_path), [1, 2]) == ["step_000002 2"] * 3
    assert len(list((tmp_path / "checkpoints/step_000002").glob("weights.rank*"))) == 3
    flip(tmp_path / "checkpoints/step_000002/weights.rank00002.pt")
    assert run_ranks(3, writers.save_steps, str(tmp_path), []) == ["step_000001 1"] * 3


@pytest.mark.parametrize(("failing", "kind"), [(0, "value"), (2, "value"), (1, "dcp")])
def test_an_error_on_one_rank_reaches_all_and_leaves_the_previous_checkpoint(failing: int, kind: str, tmp_path: Path) -> None:
    run_ranks(3, writers.save_steps, str(tmp_path), [1])
    for seen in run_ranks(3, writers.save_with_failure, str(tmp_path), 2, failing, kind):
        assert f"failed on rank {failing}" in seen and "step_000002" in seen
    assert run_ranks(3, writers.save_steps, str(tmp_path), []) == ["step_000001 1"] * 3
    assert not list((tmp_path / "checkpoints").glob(".tmp*"))


def test_kill_at_random_moments_always_leaves_the_newest_published_state(tmp_path: Path) -> None:
    """What was said to be published is there after the kill, or the one after it; nothing is ever half there."""
    done = subprocess.run([sys.executable, "-m", "tests.checkpoint.writers", "kill_rounds", str(tmp_path), "30", "5"],
                          capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "passed over" not in done.stderr, "a kill left a damaged checkpoint under its name"
    rounds = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    found = 0
    for resumed, told, now, _ in rounds:
        assert resumed == found and now in (told, told + 1)
        found = now
    assert len(rounds) == 30 and found > 30
    assert sum(left for *_, left in rounds) >= 5, "the kills did not hit the writing"


def retention(run_dir: Path) -> Path:
    """The names that real directories hold, each numbered one complete."""
    root = run_dir / "checkpoints"
    for step in (9, 10, 100, 2, 7):
        writers.save(str(run_dir), step)
    for step, name in ((9, "step_9"), (10, "step_10"), (100, "step_100"), (2, "step_2"), (7, "step_007")):
        (root / f"step_{step:06d}").rename(root / name)
    writers.save(str(run_dir), 100)
    shutil.rmtree(root / "step_100")
    (root / "best").mkdir()
    (root / "step_11.tmp").mkdir()
    (root / "notes.txt").write_text("mine")
    return root


OTHERS = {"best", "latest", "notes.txt", "step_11.tmp"}


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()} - OTHERS


def test_retention_counts_numbers_and_touches_nothing_else(tmp_path: Path) -> None:
    root = retention(tmp_path)
    everything = names(root)
    for keep in (None, -1):
        assert keep_newest(tmp_path, keep) == [] and names(root) == everything
    with pytest.raises(UserError, match="keep is 0"):
        keep_newest(tmp_path, 0)
    assert sorted(keep_newest(tmp_path, 2)) == ["step_007", "step_2", "step_9"]
    assert names(root) == {"step_10", "step_000100"} and OTHERS <= {path.name for path in root.iterdir()}
    writers.save(str(tmp_path), 110)
    keep_newest(tmp_path, 1)
    assert names(root) == {"step_000110"}


def test_retention_on_a_branch_keeps_the_newest_publication(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Resumed from 10 while 100 exists: the new 11 is what a restart takes, and is never deleted for its low number."""
    for step in (10, 99, 100, 11):
        writers.save(str(tmp_path), step)
    keep_newest(tmp_path, 2, protect=("step_000010",))
    assert names(tmp_path / "checkpoints") == {"step_000010", "step_000011", "step_000099", "step_000100"}
    assert any("earlier branch" in message for message in caplog.messages)
    assert (latest := find_latest(tmp_path)) is not None and latest.name == "step_000011"


def test_retention_does_not_count_damaged_ones_and_removes_only_the_link_of_a_link(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        writers.save(str(tmp_path), step)
    root = tmp_path / "checkpoints"
    elsewhere = tmp_path / "elsewhere"
    (root / "step_000001").rename(elsewhere)
    (root / "step_000001").symlink_to(elsewhere)
    weights(tmp_path, 3).unlink()
    keep_newest(tmp_path, 2)
    assert names(root) == {"step_000002", "step_000003", "step_000004"} and (elsewhere / "manifest.json").is_file()
