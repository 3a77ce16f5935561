"""Writes the tables of docs/megatron-settings.md: `python -m tests.specs.settings_document`; a test compares."""

from __future__ import annotations

import textwrap
from pathlib import Path

import primus_turbo_plugin
from primus_turbo_plugin.specs.settings_table import CONDITIONAL, HONOURED, REFUSED, Refusal
from primus_turbo_plugin.specs.untouched_fields import UNTOUCHED

DOCUMENT = Path(primus_turbo_plugin.__file__).parents[1] / "docs" / "megatron-settings.md"
MARK = "<!-- Below: written by `python -m tests.specs.settings_document` from the tables in `primus_turbo_plugin/specs`. -->"


def tables() -> str:
    """The generated part."""
    lines = [
        MARK,
        "",
        "## Translated, or decided by more than one field",
        "",
        "| field | what becomes of it |",
        "|---|---|",
    ]
    lines += [f"| `{name}` | {_cell(text)} |" for name, text in CONDITIONAL.items()]
    lines += ["", "## Refused", "", "| field | refused with | why | what to do |", "|---|---|---|---|"]
    lines += [
        f"| `{name}` | {_where(rule)} | {_cell(rule.why)} | {_cell(rule.remedy)} |" for name, rule in REFUSED.items()
    ]
    lines += ["", "## Honoured", "", "| field | how |", "|---|---|"]
    lines += [f"| `{name}` | {_cell(text) or 'as Megatron means it'} |" for name, text in HONOURED.items()]
    lines += ["", "## Untouched", "", "Nothing this package replaces reads these: Megatron treats them as always.", ""]
    for why, names in UNTOUCHED.items():
        listed = textwrap.wrap(", ".join(f"`{name}`" for name in names), 118)
        lines += [f"- **{why}.**", *(f"  {line}" for line in listed)]
    return "\n".join(lines) + "\n"


def _where(rule: Refusal) -> str:
    if not rule.component:
        return "any provider"
    refusing = [p for p in ("turbo", "megatron", "transformer_engine") if p not in rule.unless]
    return f"`{rule.component}: {'` or `'.join(refusing)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def rewritten() -> str:
    """The document with its generated part made anew."""
    return DOCUMENT.read_text().partition(MARK)[0] + tables()


if __name__ == "__main__":
    DOCUMENT.write_text(rewritten())
