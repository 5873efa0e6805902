# SPDX-License-Identifier: Apache-2.0
"""A process that attaches to a file, says which links it holds, and waits to be killed.

``python -m tests.runtime.owner METHOD FILE OFFSET``
"""

from __future__ import annotations

import sys

from profinferd.agent.kernel.libbpf import BpfObject
from profinferd.agent.kernel.links import attach_multi, attach_perf

from .support import bpf_object


def main(method: str, path: str, offset: int) -> None:
    with BpfObject(bpf_object("count")) as obj:
        obj.load_only(["on_entry", "on_return"])
        for program in obj.programs.values():
            program.as_uprobe(method)
        obj.load()
        entry, back = obj.program_fd("on_entry"), obj.program_fd("on_return")
        if method == "perf":
            links = [attach_perf(entry, path, offset, 0), attach_perf(back, path, offset, 1, ret=True)]
        else:
            links = [
                attach_multi(entry, path, [offset], [0]),
                attach_multi(back, path, [offset], [1], ret=True),
            ]
        print(*(link.id for link in links), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
