# SPDX-License-Identifier: Apache-2.0
"""Sending the figures to an OpenTelemetry collector, beside serving them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ..errors import UsageError
from ..version import version
from .config import Otlp

if TYPE_CHECKING:
    from .serving import Serving

MAX_HEADERS = 1 << 14
"""Bytes of the file with headers."""


class Sending:
    """A server that also sends: implements :class:`.daemon.Serves`. Raises UsageError like that one."""

    def __init__(self, serving: Serving, otlp: Otlp, say: Callable[[str], None]) -> None:
        self._serving = serving
        self.url = serving.url
        try:
            from ...exporters.otlp import OtlpExporter
        except ImportError as error:
            serving.close()
            raise UsageError(
                f"otlp.endpoint needs the Python package {error.name}", "install profinferd[otlp]"
            ) from error
        try:
            headers = _headers(otlp.headers_file)
        except UsageError:
            serving.close()
            raise
        self._exporter = OtlpExporter(
            otlp.endpoint or "",
            serving.families,
            version(),
            every=otlp.every_seconds,
            headers=headers,
            say=say,
        )

    def start(self) -> None:
        """Begin to answer and to send."""
        self._serving.start()
        self._exporter.start()

    def close(self) -> None:
        """May be called twice."""
        self._exporter.close()
        self._serving.close()


def _headers(path: str | None) -> Mapping[str, str]:
    """Lines ``Name: value`` of a file, which may hold secrets: they are in no message of ours."""
    if path is None:
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_HEADERS + 1)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"otlp.headers_file {path} cannot be read ({why})", "look at its mode") from error
    if len(text) > MAX_HEADERS:
        raise UsageError(f"otlp.headers_file {path} is too long", f"at most {MAX_HEADERS} characters")
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        name, colon, value = line.partition(":")
        if not line.strip() or line.startswith("#"):
            continue
        if not (colon and name.isascii() and name.replace("-", "").replace("_", "").isalnum()):
            raise UsageError(
                f"{path}:{number} is not a header", "write lines such as Authorization: Bearer …"
            )
        found[name] = value.strip()
    return found
