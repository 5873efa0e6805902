# SPDX-License-Identifier: Apache-2.0
"""A trace of a living process, made in memory: the real probes and everything behind them, no file."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from profinferd.agent.attach import Attachment
from profinferd.agent.model.collect import Collector, trace_of
from profinferd.agent.model.plancache import Tables
from profinferd.agent.model.session import Session
from profinferd.agent.model.trace import Trace, TraceFacts


class Tracing:
    """``with Tracing(pid) as tracing: tracing.during(work); trace = tracing.trace()``."""

    def __init__(self, pid: int, **options: Any) -> None:
        self.begin_ns = time.monotonic_ns()
        self.attachment = Attachment.open(pid, ops="all", **options)
        self._sessions: list[tuple[Session, Collector]] = []
        self.attachment.session_opened.append(self._opened)

    def _opened(self, session: Session) -> None:
        self._sessions.append((session, Collector(session)))

    def drain(self) -> None:
        """Looks at what has come."""
        self.attachment.poll(0.005)

    def during(self, work: Callable[[], object]) -> None:
        """Does ``work`` on a thread of its own and drains until it is done."""
        failed: list[BaseException] = []

        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - raised again on the caller's thread
                failed.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        while thread.is_alive():
            self.drain()
        thread.join()
        self.drain()
        if failed:
            raise failed[0]

    def trace(self) -> Trace:
        """Everything up to now; nothing is attached afterwards."""
        self.drain()
        ((session, collector),) = self._sessions
        now = time.monotonic_ns()
        session.finish(now)
        tables = self.attachment.info.tables
        names = Tables(tables.ops, tables.types, tables.unary, tables.glu) if tables else Tables((), None)
        facts = TraceFacts(
            self.attachment.snapshot().target, self.begin_ns, now, tables=names, created=time.time()
        )
        found = trace_of(collector, facts, session, now)
        self.attachment.close()
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.attachment.close()
