"""YAML as this package reads it: the safe subset, and a key written twice is an error instead of the last one winning."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from primus_turbo_plugin.errors import ConfigError


class _UniqueKeyLoader(yaml.SafeLoader):
    """A SafeLoader that refuses duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode):
                if key_node.value in seen:
                    line = key_node.start_mark.line + 1
                    raise ConfigError(f"line {line}: key {key_node.value!r} is written twice; keep one of them")
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str, where: str) -> Any:
    """The content of a YAML document; `{}` for an empty one.

    Raises:
        ConfigError: Not valid YAML, or a duplicate key; names `where` and the line.
    """
    try:
        content = yaml.load(text, Loader=_UniqueKeyLoader)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from error
    return {} if content is None else content


def read_yaml(path: str | Path) -> Any:
    """The content of a YAML file.

    Raises:
        ConfigError: The file cannot be read or is not valid YAML.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"configuration file {str(path)!r}: {reason}; give the path of a readable YAML file"
        ) from error
    return parse_yaml(text, str(path))
