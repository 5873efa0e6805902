# SPDX-License-Identifier: Apache-2.0
"""The daemon's configuration: what there is to set, and errors that say where.

``deploy/profinferd.yaml`` documents every key with its default. A key that is not known is
an error: a misspelt limit must not be a limit that is not there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from operator import attrgetter
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import yaml

from ...exporters.text import clean
from ..errors import UsageError
from .protocol import SOCKET

PATH = "/etc/profinferd/profinferd.yaml"
"""Read when no file is named, if it exists."""
MAX_BYTES = 1 << 20
STATE = "/var/lib/profinferd"

Pattern = Annotated[str, msgspec.Meta(min_length=1, max_length=500)]
Path = Annotated[str, msgspec.Meta(pattern=r"^/[^\x00]{0,4000}$")]


class Http(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``listen`` None: no HTTP at all. ``web_config``: a file in the form of Prometheus's."""

    listen: str | None = "127.0.0.1:9847"
    web_config: Path | None = None

    def __post_init__(self) -> None:
        if self.listen is not None:
            _check("listen", address, self.listen)


class Control(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The control socket; members of ``group`` may read, only root may reload."""

    socket: Path = SOCKET
    group: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_-]{0,31}$")] | None = None


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is looked at, and what it may cost every target and the machine."""

    ops: Literal["sampled", "off"] = "sampled"
    budget: str | float = "1%"
    qos_min_tokens_per_second: Annotated[float, msgspec.Meta(gt=0)] | None = None
    sched: bool = True
    faults: bool = True
    attach_method: Literal["auto", "session", "multi", "perf"] = "auto"
    btf_path: Path | None = None

    @property
    def budget_ratio(self) -> float:
        """The budget as a ratio: 0.01 is 1 %."""
        return _ratio(self.budget)

    def __post_init__(self) -> None:
        _check("budget", _ratio, self.budget)


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Shell patterns; a process meets the rule when it meets all that are given."""

    program: Pattern | None = None
    unit: Pattern | None = None
    container: Pattern | None = None
    model: Pattern | None = None
    user: Pattern | None = None

    def __post_init__(self) -> None:
        if not any((self.program, self.unit, self.container, self.model, self.user)):
            raise ValueError("a rule needs at least one of program, unit, container, model, user")


Rules = Annotated[list[Rule], msgspec.Meta(max_length=256)]


class Targets(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which processes: those that meet an ``include`` rule (none given: all) and no ``exclude``."""

    include: Rules = []
    exclude: Rules = []
    max: Annotated[int, msgspec.Meta(ge=1, le=256)] = 64
    expire_after: str = "15m"

    @property
    def expire_seconds(self) -> float:
        """After so long without a process, a target's series go."""
        return seconds(self.expire_after)

    def __post_init__(self) -> None:
        if not 1 <= _check("expire_after", seconds, self.expire_after) <= 86400 * 30:
            raise ValueError("expire_after: it is between 1s and 30d")


class Discovery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``scan_every``: how often every process is looked at, in case an event was missed."""

    scan_every: str = "5m"

    @property
    def scan_seconds(self) -> float:
        """The same in seconds."""
        return seconds(self.scan_every)

    def __post_init__(self) -> None:
        if not 1 <= _check("scan_every", seconds, self.scan_every) <= 86400:
            raise ValueError("scan_every: it is between 1s and 1d")


class Otlp(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``endpoint`` None: nothing is sent. ``headers_file``: lines ``Name: value`` for each request."""

    endpoint: Annotated[str, msgspec.Meta(pattern=r"^https?://[^\s]{1,1000}$")] | None = None
    every: str = "15s"
    headers_file: Path | None = None

    @property
    def every_seconds(self) -> float:
        """The same in seconds."""
        return seconds(self.every)

    def __post_init__(self) -> None:
        if not 1 <= _check("every", seconds, self.every) <= 86400:
            raise ValueError("every: it is between 1s and 1d")


class Logging(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is logged, and how."""

    level: Literal["error", "warning", "info", "debug"] = "info"
    format: Literal["auto", "text", "json"] = "auto"


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything; the default of every field is what the daemon does without a file."""

    http: Http = msgspec.field(default_factory=Http)
    control: Control = msgspec.field(default_factory=Control)
    profile: Profile = msgspec.field(default_factory=Profile)
    targets: Targets = msgspec.field(default_factory=Targets)
    discovery: Discovery = msgspec.field(default_factory=Discovery)
    otlp: Otlp = msgspec.field(default_factory=Otlp)
    log: Logging = msgspec.field(default_factory=Logging)
    state: Path = STATE

    def __post_init__(self) -> None:
        if self.otlp.endpoint is not None and self.http.listen is None:
            raise ValueError("otlp.endpoint: it needs http.listen, both send what the same exporter makes")


WORDS = re.compile(r"\$\.(profile\.ops|targets\.(in|ex)clude\[\d+\]\.\w+)")
"""Places where ``off`` and ``1000`` are words; elsewhere YAML takes them for false and a number."""
_NULL = "tag:yaml.org,2002:null"
SECTIONS = ("http", "control", "profile", "targets", "discovery", "otlp", "log")
_T = TypeVar("_T")
_V = TypeVar("_V")


def _check(key: str, read: Callable[[_T], _V], value: _T) -> _V:
    """``read(value)``; the ValueError of a wrong one begins with the key, for :func:`parse` to find it."""
    try:
        return read(value)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


def address(text: str) -> tuple[str, int]:
    """(host, port) as ``--listen`` has it; ValueError when it is none."""
    from ..cli.listen import parse_address

    try:
        return parse_address(text)
    except UsageError as error:
        raise ValueError(f"{clean(text)!r} is not HOST:PORT, such as 127.0.0.1:9847") from error


def seconds(text: str) -> float:
    """``15m``, ``30s``, ``1h``, ``2d`` in seconds; ValueError otherwise."""
    found = re.fullmatch(r"([0-9]{1,6})(s|m|h|d)", text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a duration such as 30s, 15m or 1h")
    return float(int(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]])


def _ratio(value: str | float) -> float:
    text = str(value).strip()
    try:
        ratio = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        ratio = -1.0
    if ratio == 1 and not text.endswith("%"):
        raise ValueError(f"{text!r} may be 1 % or all of the time: write 1% or 100%")
    if not 0 < ratio <= 1:
        raise ValueError(f"{text!r} is not a share between 0 and 100 %, such as 1%")
    return ratio


RESTART = (
    "http.listen", "http.web_config", "control.socket", "control.group", "profile.sched", "profile.faults",
    "profile.attach_method", "profile.btf_path", "otlp.endpoint", "otlp.every", "otlp.headers_file", "state",
)  # fmt: skip
"""Keys that are read when the daemon starts, and not again."""


def needs_restart(running: Config, new: Config) -> list[str]:
    """Keys whose new value holds after a restart only. ``running``: what the daemon was started with."""
    return [key for key in RESTART if attrgetter(key)(running) != attrgetter(key)(new)]


def load(path: str | None) -> Config:
    """The configuration in ``path``; None: the default file if there is one, else all defaults.

    Raises UsageError naming file, line and key.
    """
    if path is None:
        if not os.path.exists(PATH):
            return Config()
        path = PATH
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read {path} ({error.strerror})", "give another file with -c") from error
    if len(data) > MAX_BYTES:
        raise UsageError(f"{path} is larger than {MAX_BYTES >> 20} MiB", "give another file with -c")
    return parse(data, path)


def parse(data: bytes, name: str) -> Config:
    """The configuration in ``data``; ``name`` is for errors. Raises UsageError."""
    try:
        node = _compose(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise _wrong(name, line, "", "it is not UTF-8") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise _wrong(name, mark.line + 1 if mark else 1, "", str(error.problem or error.context)) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise _wrong(name, 1, "", str(error)) from error
    if node is None:
        return Config()
    lines: dict[str, int] = {}
    try:
        value = _value(node, "$", lines, name)
        if isinstance(value, dict):
            # A section all of whose keys were commented out.
            value = {key: one for key, one in value.items() if one is not None or key not in SECTIONS}
        return msgspec.convert(value, Config)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at ")
        place = place.strip("`") or "$"
        unknown = re.search(r"unknown field `(.*?)`", message)
        if unknown is not None:
            place = f"{place}.{unknown[1]}"
            message = "there is no such key"
        key, colon, why = message.partition(": ")
        if colon and f"{place}.{key}" in lines:
            place, message = f"{place}.{key}", why
        raise _wrong(name, lines.get(place, 1), place.removeprefix("$").lstrip("."), message) from error


def _compose(text: str) -> yaml.Node | None:
    for token in yaml.scan(text, Loader=yaml.SafeLoader):
        if isinstance(token, (yaml.AliasToken, yaml.AnchorToken)):
            mark = token.start_mark
            raise yaml.MarkedYAMLError(problem="anchors and aliases are not used here", problem_mark=mark)
    return yaml.compose(text, Loader=yaml.SafeLoader)


def _value(node: yaml.Node, place: str, lines: dict[str, int], name: str) -> Any:
    """Plain data of a node; ``lines`` learns the line of every place. A key that comes twice is an error."""
    lines.setdefault(place, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        found: dict[str, Any] = {}
        for key, item in node.value:
            text = key.value if isinstance(key, yaml.ScalarNode) else "?"
            line = key.start_mark.line + 1
            inner = f"{place}.{text}"
            if text in found:
                raise _wrong(name, line, inner.removeprefix("$."), "this key comes twice")
            lines[inner] = line
            found[text] = _value(item, inner, lines, name)
        return found
    if isinstance(node, yaml.SequenceNode):
        items = []
        for i, item in enumerate(node.value):
            lines.setdefault(f"{place}[{i}]", item.start_mark.line + 1)
            lines.setdefault(f"{place}[...]", item.start_mark.line + 1)
            items.append(_value(item, f"{place}[{i}]", lines, name))
        return items
    if WORDS.fullmatch(place) and isinstance(node, yaml.ScalarNode) and node.tag != _NULL:
        return node.value
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_object(node, deep=True)
    except (yaml.YAMLError, ValueError) as error:
        raise _wrong(name, node.start_mark.line + 1, place.removeprefix("$."), "not understood") from error


def _wrong(name: str, line: int, key: str, why: str) -> UsageError:
    where = f"{name}, line {line}" + (f", {key}" if key else "")
    return UsageError(f"{where}: {' '.join(why.split())[:300]}", "see deploy/profinferd.yaml for every key")
