"""The local launcher: real processes, one clear error, nothing left running."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from primus_turbo_plugin.training import launch

TARGETS = "tests.training.launch_targets"


def _run(function: str, *argv: str, world_size: int = 2, **options: object) -> None:
    with launch.start_ranks(f"{TARGETS}:{function}", argv, world_size, **options) as ranks:  # type: ignore[arg-type]
        ranks.wait()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] if Path("/proc").exists() else "R"
    return state != "Z"


def _wait_for(path: Path) -> int:
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)
    return int(path.read_text())


def test_every_rank_gets_its_environment_and_the_arguments(tmp_path: Path) -> None:
    _run("write_environment", str(tmp_path), "a", "b", world_size=3)
    assert [(tmp_path / f"rank{r}").read_text() for r in range(3)] == [f"{r} {r} 3 a b" for r in range(3)]


def test_ranks_meet_over_gloo_without_a_port(tmp_path: Path) -> None:
    _run("sum_over_ranks", str(tmp_path), threads=1)
    assert [(tmp_path / f"rank{r}").read_text() for r in range(2)] == ["3.0 1", "3.0 1"]


def test_the_error_is_that_of_the_rank_that_failed_first() -> None:
    with pytest.raises(launch.RanksFailed) as raised:
        _run("refuse_on_rank_1", world_size=3)
    failure = raised.value.failure
    assert (failure.rank, failure.message, failure.expected) == (1, "--knob: at most 11, got 12.", True)


def test_the_others_are_stopped_and_an_unexpected_error_keeps_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(launch.RanksFailed) as raised:
        _run("hang_unless_rank_0", str(tmp_path))
    failure = raised.value.failure
    assert failure.rank == 0
    assert not failure.expected
    assert "ZeroDivisionError: a fault" in failure.trace
    assert "hang_unless_rank_0" in failure.trace
    assert not _alive(int((tmp_path / "pid1").read_text()))


def _start_and_interrupt(folder: Path) -> None:
    with launch.start_ranks(f"{TARGETS}:hang", [str(folder)], 2):
        for rank in range(2):
            _wait_for(folder / f"pid{rank}")
        raise KeyboardInterrupt


def test_leaving_the_block_stops_all_ranks(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        _start_and_interrupt(tmp_path)
    assert not any(_alive(_wait_for(tmp_path / f"pid{rank}")) for rank in range(2))


def test_a_process_that_dies_without_a_word_is_reported() -> None:
    with pytest.raises(launch.RanksFailed, match="ended without a word"):
        _run("die", world_size=1)


@pytest.mark.parametrize("code", [0, 3])
def test_an_exit_code_counts(code: int) -> None:
    if code == 0:
        _run("exit_with_code", "0", world_size=1)
    else:
        with pytest.raises(launch.RanksFailed, match="exit code 3"):
            _run("exit_with_code", "3", world_size=1)


def test_output_goes_to_the_rank_log_if_asked(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _run("print_something", logs=tmp_path)
    assert sorted((tmp_path / "rank1.log").read_text().splitlines()) == ["from native code", "from rank 1"]
    assert "from rank" not in capfd.readouterr().out


@pytest.mark.slow
def test_ranks_end_when_the_parent_is_killed(tmp_path: Path) -> None:
    """A killed launcher must not leave training processes behind."""
    script = (
        "from primus_turbo_plugin.training import launch\n"
        "if __name__ == '__main__':\n"
        f"    with launch.start_ranks('{TARGETS}:hang', [{str(tmp_path)!r}], 2) as ranks:\n"
        "        ranks.wait()\n"
    )
    (tmp_path / "parent.py").write_text(script)
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    parent = subprocess.Popen([sys.executable, str(tmp_path / "parent.py")], env=environment)
    pids = [_wait_for(tmp_path / f"pid{rank}") for rank in range(2)]
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while any(_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "ranks outlived their parent"
        time.sleep(0.05)
