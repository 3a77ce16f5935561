"""What the launcher's tests run in each process."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from primus_turbo_plugin.errors import ConfigError


def write_environment(argv: list[str]) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    Path(argv[0], f"rank{os.environ['RANK']}").write_text(
        " ".join(os.environ[n] for n in names) + " " + " ".join(argv[1:])
    )


def sum_over_ranks(argv: list[str]) -> None:
    import torch
    import torch.distributed as dist

    from primus_turbo_plugin.training.launch import STORE_VARIABLE

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(os.environ[STORE_VARIABLE], world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    Path(argv[0], f"rank{rank}").write_text(f"{total.item()} {torch.get_num_threads()}")


def refuse_on_rank_1(argv: list[str]) -> None:
    if os.environ["RANK"] == "1":
        raise ConfigError("--knob: at most 11, got 12.")
    time.sleep(0.5)
    raise RuntimeError("a consequence of rank 1's end")


def hang_unless_rank_0(argv: list[str]) -> None:
    Path(argv[0], f"pid{os.environ['RANK']}").write_text(str(os.getpid()))
    if os.environ["RANK"] == "0":
        while not Path(argv[0], "pid1").exists():
            time.sleep(0.01)
        raise ZeroDivisionError("a fault")
    time.sleep(600)


def hang(argv: list[str]) -> None:
    Path(argv[0], f"pid{os.environ['RANK']}").write_text(str(os.getpid()))
    time.sleep(600)


def die(argv: list[str]) -> None:
    os._exit(7)


def exit_with_code(argv: list[str]) -> None:
    sys.exit(int(argv[0]))


def print_something(argv: list[str]) -> None:
    print(f"from rank {os.environ['RANK']}")
    os.write(2, b"from native code\n")


def require_four(heads: int) -> None:
    assert heads == 4  # pytest rewrites assertions in test files only
