"""What the workers of these tests do with a candidate. Imports nothing heavy: the processes are spawned."""

from __future__ import annotations

import os
import time
from typing import Any


def launch(task: Any, config: Any) -> None:
    """A word is done as it says; anything else compiles at once."""
    if config == "crash":
        os._exit(139)
    if config == "hang":
        time.sleep(600)
    if isinstance(config, str) and config.startswith("note "):
        with open(config.removeprefix("note "), "a", encoding="utf-8") as file:
            file.write(f"{task}\n")
