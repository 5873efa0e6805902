# SPDX-License-Identifier: Apache-2.0
"""The other half of ``published.c``: run as a file by the system's Python, which BCC belongs to.

``published.py PID LIBRARY=FUNCTION...``: attaches, says "ready", and at SIGINT one line of JSON:
hits, records lost, how often each other function was entered, and seconds by operator function (its
name without the common prefix) on the threads that called graphs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

BCC = "/usr/lib/python3/dist-packages/bcc"
PREFIX = "ggml_compute_forward_"


def load_bcc() -> Any:
    spec = importlib.util.spec_from_file_location(
        "bcc", f"{BCC}/__init__.py", submodule_search_locations=[BCC]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bcc"] = module
    spec.loader.exec_module(module)
    return module


def main() -> int:
    pid, functions = int(sys.argv[1]), [word.rpartition("=")[::2] for word in sys.argv[2:]]
    bcc = load_bcc()
    text = Path(__file__).with_name("published.c").read_text()
    program = bcc.BPF(text=text, cflags=[f"-DTARGET={pid}"])
    for library, function in functions:
        entry = "op_entry" if function.startswith(PREFIX) else "function_entry"
        program.attach_uprobe(name=library, sym=function, fn_name=entry)
        program.attach_uretprobe(name=library, sym=function, fn_name="any_return")
    hits = 0
    open_on: dict[int, list[tuple[int, int]]] = {}  # by thread: (address, ns)
    entered: dict[int, int] = {}
    spent: dict[int, int] = {}
    callers: set[int] = set()

    def handle(context: Any, data: Any, size: int) -> None:
        nonlocal hits
        hits += 1
        record = program["records"].event(data)
        stack = open_on.setdefault(record.tid, [])
        if record.address:
            stack.append((record.address, record.ts))
            if not record.tensor:
                callers.add(record.tid)
                entered[record.address] = entered.get(record.address, 0) + 1
        elif stack:
            address, begun = stack.pop()
            if record.tid in callers and address not in entered:
                spent[address] = spent.get(address, 0) + record.ts - begun

    program["records"].open_ring_buffer(handle)
    asked: list[int] = []
    signal.signal(signal.SIGINT, lambda *_: asked.append(1))
    print("ready", flush=True)
    while not asked:
        program.ring_buffer_poll(100)
    program.ring_buffer_consume()
    names = {address: program.sym(address, pid).decode() for address in {*entered, *spent}}
    answer = {
        "hits": hits,
        "lost": program["lost"][0].value,
        "entered": {names[address]: count for address, count in entered.items()},
        "by_op": {names[address].removeprefix(PREFIX): ns / 1e9 for address, ns in spent.items()},
    }
    print(json.dumps(answer), flush=True)
    os._exit(0)  # the kernel takes the probes away; BCC would do so one by one


if __name__ == "__main__":
    sys.exit(main())
