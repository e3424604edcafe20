"""YAML and JSON in which every key stands once: of two equal keys the libraries silently keep the last."""

import json
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key.value!r} is given twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return node


def parse_yaml(text: str) -> Any:
    """Returns the value of a YAML text; raises :class:`yaml.YAMLError`, also where a key is given twice."""
    return yaml.load(text, _Loader)


def parse_json(text: str) -> Any:
    """Returns the value of a JSON text; raises :class:`ValueError`, also where a key is given twice."""
    return json.loads(text, object_pairs_hook=_once)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(name for name in names if names.count(name) > 1)!r} is given twice")
    return values
