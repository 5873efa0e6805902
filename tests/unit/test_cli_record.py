# SPDX-License-Identifier: Apache-2.0
"""``profinferd record``: what it says without a process to attach to."""

from __future__ import annotations

import os
import re
from pathlib import Path

from profinferd.agent.cli.record import _name


def test_a_file_is_named_after_the_program() -> None:
    when = r"-\d{8}-\d{6}\.pfi"
    comm = Path("/proc/self/comm").read_text().strip()
    mine = re.sub(r"[^\w.-]", "_", comm)
    assert re.fullmatch(re.escape(f"{mine}-{os.getpid()}") + when, _name(os.getpid(), ()))
    assert re.fullmatch("llama-server" + when, _name(None, ("/opt/bin/llama-server", "-m", "x")))
    assert re.fullmatch("a_b" + when, _name(None, ("./a b",)))
    assert re.fullmatch("4194305" + when, _name(4194305, ()))  # no such process can be
