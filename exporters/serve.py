# SPDX-License-Identifier: Apache-2.0
"""``/metrics`` alone, for a profiler that watches one process."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus

from .httpd import HttpServer, Request, Response, get_only

Render = Callable[[str], tuple[str, bytes]]
"""Accept header -> (content type, body)."""


class MetricsServer(HttpServer):
    """Serves ``render`` at ``/metrics``; see :class:`.httpd.HttpServer`."""

    def __init__(self, host: str, port: int, render: Render, on_error: Callable[[str], None]) -> None:
        self._render = render
        super().__init__(host, port, self._metrics, on_error)

    @property
    def url(self) -> str:
        """Where the metrics are."""
        return f"{super().url}/metrics"

    def _metrics(self, request: Request) -> Response:
        if (refusal := get_only(request)) is not None:
            return refusal
        if request.path == "/metrics":
            content_type, body = self._render(request.headers.get("accept", ""))
            return Response(HTTPStatus.OK, content_type, body)
        if request.path == "/":
            return Response(HTTPStatus.OK, body=b"profinferd: see /metrics\n")
        return Response(HTTPStatus.NOT_FOUND, body=b"Only /metrics is here.\n")
