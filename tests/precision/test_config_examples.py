"""Files and documentation a user copies from: each of them must work."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from primus_turbo_plugin.precision.config import TurboConfig
from primus_turbo_plugin.precision.presets import ALIASES, PRESETS

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "examples" / "recipes").glob("*.yaml"))
PAGES = ("README.md", "docs/configuration.md", "docs/recipes.md")


def yaml_blocks(page: str) -> list[str]:
    return re.findall(r"```yaml\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_example_recipe_is_valid_starts_with_what_it_is_and_round_trips(path: Path) -> None:
    assert path.read_text().startswith("# ")
    config = TurboConfig.from_yaml(path)
    assert TurboConfig.from_yaml_text(config.to_yaml()) == config
    config.plan("decoder.layers.12.mlp.linear_fc1", 12, 32)


def test_examples_cover_the_families_of_presets() -> None:
    used = {TurboConfig.from_yaml(path).precision.base for path in FILES}
    assert {"bf16", "mxfp4", "mxfp4_all", "mxfp8", "fp8_block128"} <= used


@pytest.mark.parametrize("page", PAGES)
def test_every_yaml_block_of_the_documentation_is_a_valid_configuration(page: str) -> None:
    blocks = yaml_blocks(page)
    assert blocks
    for block in blocks:
        TurboConfig.from_yaml_text(block, where=f"{page}: {block!r}")


def test_recipes_page_lists_exactly_the_presets_that_exist() -> None:
    section = (ROOT / "docs" / "recipes.md").read_text().split("## Presets", 1)[1].split("\nScale rules", 1)[0]
    rows = re.findall(r"^\| (`[^|]+) \|", section, flags=re.MULTILINE)
    names = {name for row in rows for name in re.findall(r"`([a-z0-9_]+)`", row)}
    assert names == {*PRESETS, *ALIASES}
