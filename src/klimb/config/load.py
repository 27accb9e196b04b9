"""YAML and `a.b=c` overrides to a RunConfig, with the file's line in every message.

PyYAML reads by YAML 1.1, where `1e-6` is text and `no` is false; the reader here keeps to 1.2's core for
numbers and booleans, refuses a key given twice, and remembers the line of each key.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from klimb.config.posture import resolve
from klimb.config.schema import RunConfig, VaryConfig
from klimb.errors import ConfigError

Path_ = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """config; origins: dotted key -> `file:line` or `override` for every key the user set."""

    config: RunConfig
    origins: dict[str, str]


class _Loader(yaml.SafeLoader):
    """SafeLoader without YAML 1.1's surprises."""


_KEEP = {
    first: [(tag, regexp) for tag, regexp in resolvers if not tag.endswith((":bool", ":float", ":int", ":timestamp"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.yaml_implicit_resolvers = _KEEP
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?\d+$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:(?:\.\d+|\d+(?:\.\d*)?)(?:[eE][-+]?\d+)?|\.inf|\.nan)$", re.IGNORECASE),
    list("-+0123456789."),
)
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(str(node.value)))
_Loader.add_constructor(
    "tag:yaml.org,2002:float",
    lambda loader, node: float(str(node.value).lower().replace(".inf", "inf").replace(".nan", "nan")),
)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes a text which the loader here, or one of YAML 1.1, would take for something else."""


_Dumper.yaml_implicit_resolvers = {
    first: [*_Loader.yaml_implicit_resolvers.get(first, []), *yaml.SafeDumper.yaml_implicit_resolvers.get(first, [])]
    for first in {*_Loader.yaml_implicit_resolvers, *yaml.SafeDumper.yaml_implicit_resolvers}
}


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Loaded:
    """The file with the overrides applied and checked. Raises ConfigError; nothing heavy is imported."""
    path = Path(path)
    tree, lines = _read(path)
    origins = {".".join(key): f"{path}:{line}" for key, line in lines.items()}
    for text in overrides:
        key, value = put_override(tree, text)
        _forget(origins, key)
        origins.update({".".join(k): f"override {text}" for k in _paths(value, key)})
        for n in range(1, len(key)):  # sections that only the override brought in
            origins.setdefault(".".join(key[:n]), f"override {text}")
    where = {tuple(key.split(".")): origin for key, origin in origins.items()}
    _refuse_unknown(tree, RunConfig, (), where)
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(error, where, str(path))) from None
    try:
        resolve(config)
    except ConfigError as error:
        raise ConfigError(f"{_at_mentioned(str(error), where, str(path))}: {error}") from None
    return Loaded(config=config, origins=origins)


def with_overrides(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """A config that is loaded already with `a.b=c` applied. Raises ConfigError."""
    tree = config.model_dump(mode="json")
    for text in overrides:
        put_override(tree, text)
    _refuse_unknown(tree, RunConfig, (), {})
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(error, {}, "overrides")) from None


def known_keys(model: type[BaseModel] = RunConfig, prefix: Path_ = ()) -> Iterator[tuple[str, FieldInfo]]:
    """Every dotted key of the tree with its field, sections before their keys."""
    for name, info in model.model_fields.items():
        yield ".".join((*prefix, name)), info
        section = _section(info)
        if section is not None:
            yield from known_keys(section, (*prefix, name))


def known_sections() -> set[str]:
    """Dotted names that hold keys rather than a value."""
    return {key.rpartition(".")[0] for key, _ in known_keys()} - {""}


def dump_config(tree: Mapping[str, Any]) -> str:
    """YAML that `load_config` reads back to the same values."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _read(path: Path) -> tuple[dict[str, Any], dict[Path_, int]]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(_missing_file(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    value, lines = _parse(text, str(path))
    if value is None and not lines:
        raise ConfigError(f"{path}:1: the file is empty; it needs at least actor_rollout_ref.model_path")
    if not isinstance(value, dict):
        raise ConfigError(f"{path}:1: the file must be a mapping of sections, such as 'training:'")
    return value, lines


def _parse(text: str, place: str, prefix: Path_ = ()) -> tuple[Any, dict[Path_, int]]:
    """The value of a YAML text and the line of every key in it. place: what messages call the text."""
    lines: dict[Path_, int] = {}
    try:
        loader = _Loader(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{place}: not valid YAML: {str(error).splitlines()[0]}") from None
    try:
        node = loader.get_single_node()
        if node is None:
            return None, lines
        _note_lines(node, prefix, lines, place)
        return loader.construct_document(node), lines
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        problem = f"{error.problem}; {error.context or ''}".rstrip("; ")
        raise ConfigError(f"{place}:{line}: not valid YAML: {problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{place}: not valid YAML: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise ConfigError(f"{place}: nested too deeply, or an alias that holds itself; write it out flat") from None
    except ValueError as error:  # an integer of more digits than Python converts
        raise ConfigError(f"{place}: a value cannot be read: {error}") from None
    finally:
        loader.dispose()


def _missing_file(path: Path) -> str:
    folder = path.parent
    found = sorted(p.name for p in folder.glob("*.y*ml")) if folder.is_dir() else []
    near = difflib.get_close_matches(path.name, found, 1)
    hint = f"; did you mean {folder / near[0]}?" if near else f"; {folder} holds: {', '.join(found) or 'no YAML file'}"
    return f"{path}: no such config file{hint}"


def _note_lines(node: yaml.Node, prefix: Path_, lines: dict[Path_, int], path: str) -> None:
    """Note the line of each key, list entries by their number. Raises ConfigError for a key given twice."""
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            if isinstance(item, yaml.MappingNode | yaml.SequenceNode):
                lines[(*prefix, str(index))] = item.start_mark.line + 1
                _note_lines(item, (*prefix, str(index)), lines, path)
    if not isinstance(node, yaml.MappingNode):
        return
    for key_node, value_node in node.value:
        key = (*prefix, str(key_node.value))
        line = key_node.start_mark.line + 1
        if key in lines:
            raise ConfigError(f"{path}:{line}: {'.'.join(key)} is given twice (first in line {lines[key]}); keep one")
        lines[key] = line
        _note_lines(value_node, key, lines, path)


def parse_vary(text: str) -> VaryConfig:
    """`KEY=a,b[,c]`. Raises ConfigError."""
    key, equals, values = text.partition("=")
    if not equals or not re.fullmatch(r"\w+(\.\w+)*", key):
        raise ConfigError(f"--vary {text}: needed: KEY=a,b, for example --vary algorithm.use_pf_ppo=true,false")
    parsed = _parse(f"[{values}]", f"--vary {text}")[0]
    if len(parsed) < 2:
        raise ConfigError(f"--vary {text}: one value makes no comparison; give two or more, as in {key}=a,b")
    return VaryConfig(key=key, values=tuple(parsed))


def put_override(tree: dict[str, Any], text: str) -> tuple[Path_, Any]:
    """Apply `a.b=c` to a tree of keys as it is read from YAML. The key and the value. Raises ConfigError."""
    key, value = _parse_override(text)
    _put(tree, key, value, text)
    return key, value


def _parse_override(text: str) -> tuple[Path_, Any]:
    key, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"\w+(\.\w+)*", key):
        raise ConfigError(f"'{text}': an override has the form section.key=value, for example training.lr=5e-7")
    path = tuple(key.split("."))
    return path, _parse(value, f"override {text}", path)[0]


def _put(tree: dict[str, Any], key: Path_, value: Any, text: str) -> None:
    node = tree
    for i, part in enumerate(key[:-1]):
        child = node.setdefault(part, {})
        if child is None:
            child = node[part] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"'{text}': {'.'.join(key[: i + 1])} is {child!r}, not a section; give all of it at once")
        node = child
    node[key[-1]] = value


def _paths(value: Any, prefix: Path_) -> Iterator[Path_]:
    yield prefix
    if isinstance(value, dict):
        for name, child in value.items():
            yield from _paths(child, (*prefix, str(name)))


def _forget(origins: dict[str, str], key: Path_) -> None:
    dotted = ".".join(key)
    for name in [n for n in origins if n == dotted or n.startswith(dotted + ".")]:
        del origins[name]


def _section(info: FieldInfo) -> type[BaseModel] | None:
    return info.annotation if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel) else None


def _item(info: FieldInfo) -> type[BaseModel] | None:
    """The section that each entry of a list is, or that may stand in place of a word; or None."""
    return next((c for c in get_args(info.annotation) if isinstance(c, type) and issubclass(c, BaseModel)), None)


def _refuse_unknown(tree: Any, model: type[BaseModel], prefix: Path_, where: dict[Path_, str]) -> None:
    if not isinstance(tree, dict):
        return
    for name, value in tree.items():
        key = (*prefix, str(name))
        if name not in model.model_fields:
            raise ConfigError(f"{_at(key, where)}: unknown key '{'.'.join(key)}'{_nearest(str(name), prefix, model)}")
        section, item = _section(model.model_fields[name]), _item(model.model_fields[name])
        if section is not None:
            _refuse_unknown(value, section, key, where)
        if item is not None and isinstance(value, dict):
            _refuse_unknown(value, item, key, where)
        if item is not None and isinstance(value, list):
            for index, entry in enumerate(value):
                _refuse_unknown(entry, item, (*key, str(index)), where)


def _nearest(name: str, prefix: Path_, model: type[BaseModel]) -> str:
    aliases = {
        "learning_rate": "training.lr",
        "batch_size": "training.micro_batch_size",
        "max_steps": "training.total_episodes",
    }
    if name in ("dropout", "lora_dropout"):
        return "; klimb has no dropout, for with it the first minibatch's ratio would not be 1; leave the key out"
    here = ".".join(prefix) or "the top level"
    siblings = list(model.model_fields)
    if near := difflib.get_close_matches(name, siblings, 1, 0.5):
        return f"; did you mean '{'.'.join((*prefix, near[0]))}'?"
    everywhere = [key for key, _ in known_keys()]
    elsewhere = [key for key in everywhere if key.rsplit(".", 1)[-1] == name] or [
        key for key in everywhere if difflib.SequenceMatcher(None, key.rsplit(".", 1)[-1], name).ratio() > 0.75
    ]
    target = aliases.get(name) or (elsewhere[0] if elsewhere else None)
    if target:
        return f"; it belongs to '{target}'"
    return f"; allowed in {here}: {', '.join(siblings)}"


def _at(key: Path_, where: dict[Path_, str], fallback: str = "config") -> str:
    """The origin of the key, or of the nearest parent that was written down."""
    for n in range(len(key), 0, -1):
        if key[:n] in where:
            return where[key[:n]]
    return fallback


def _at_mentioned(text: str, where: dict[Path_, str], fallback: str) -> str:
    """The origin of the first key a message names that the user set, or of its section."""
    keys = [tuple(word.split(".")) for word in re.findall(r"\w+(?:\.\w+)+", text)]
    keys += [(*keys[0][:-1], word) for word in re.findall(r"\w+", text)] if keys else []
    for key in [*keys, *(key[:1] for key in keys)]:
        if key in where:
            return where[key]
    return fallback


def _explain(error: ValidationError, where: dict[Path_, str], path: str) -> str:
    """One line per key: origin, key, what was found, what is allowed."""
    by_key: dict[Path_, list[ErrorDetails]] = {}
    names = {tuple(key.split(".")): _item(info) for key, info in known_keys()}
    for detail in error.errors(include_url=False):
        loc = tuple(str(part) for part in detail["loc"])
        key = next((loc[:n] for n in range(len(loc), 0, -1) if loc[:n] in names), ())
        entry = loc[len(key) :]
        if entry and entry[0].isdigit():
            of_section = key == ("reward_model", "functions")
            key = (*key, entry[0], *(entry[1:2] if of_section else ()))
        inner = names.get(key)
        name = next((part for part in reversed(entry) if inner is not None and part in inner.model_fields), None)
        if name is not None:  # what follows it is pydantic's name for one of several types
            key = (*key, name)
            detail["type"] = "key_missing" if detail["type"] == "missing" else detail["type"]
        if detail["type"] == "missing" and loc[: len(key)] == loc and loc not in where:
            detail["type"] = "key_missing"
        by_key.setdefault(key, []).append(detail)
    # What is wrong inside a section says more than that the section is none of the words allowed in its place.
    whole = {key[:-1] for key in by_key if names.get(key[:-1]) is not None}
    return "\n".join(_one(key, details, where, path) for key, details in by_key.items() if key not in whole)


def _keys_of(key: Path_) -> str:
    """The keys of the section that may stand at `key`, for people."""
    info = dict(known_keys()).get(".".join(key))
    section = None if info is None else _section(info) or _item(info)
    return "" if section is None else f" ({', '.join(section.model_fields)})"


def _one(key: Path_, details: list[ErrorDetails], where: dict[Path_, str], path: str) -> str:
    first, dotted = details[0], ".".join(key)
    if first["type"] == "value_error":
        text = first["msg"].removeprefix("Value error, ")
        return f"{_at_mentioned(text, where, path)}: {text}"
    if first["type"] == "key_missing":
        return f"{_at(key, where, f'{path}:1')}: {dotted} is missing; it has no default"
    found = first["input"]
    if found is None:
        return (
            f"{_at(key, where)}: {dotted} is null (empty), and null means off, which {dotted} cannot be; "
            f"give a value or leave the line out. {_allowed(details)}"
        )
    near = _near_choice(found, details)
    allowed = _allowed(details).replace(WORDS["model_type"], WORDS["model_type"] + _keys_of(key))
    return f"{_at(key, where)}: {dotted} is {found!r}; {allowed}{near}"


WORDS = {
    "tuple_type": "a list",
    "missing": "a list of two numbers",
    "too_long": "a list of two numbers",
    "too_short": "a longer list",
    "model_type": "a section of keys",
    "dict_type": "a mapping of names to values",
    "int_type": "a whole number without a point, such as 1000",
}
"""What pydantic's error types mean to a person who writes YAML; the others read well as they are."""


def _allowed(details: list[ErrorDetails]) -> str:
    parts = dict.fromkeys(
        WORDS.get(detail["type"], detail["msg"].replace("Input should be", "").strip()) for detail in details
    )
    return f"allowed: {' or '.join(parts)}"


def _near_choice(found: Any, details: list[ErrorDetails]) -> str:
    choices = [c for d in details if d["type"] == "literal_error" for c in re.findall(r"'([^']+)'", d["msg"])]
    near = difflib.get_close_matches(str(found), choices, 1) if isinstance(found, str) else []
    return f"; did you mean '{near[0]}'?" if near else ""
