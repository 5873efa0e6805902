# SPDX-License-Identifier: Apache-2.0
"""The helper that turns addresses of a process into names, with BCC's ``SymbolCache``.

Run with Debian's Python as a script, nothing imported from the project:
``python3 -I -S symbol_child.py BCC_FOLDER PID``, with addresses as one JSON list on standard
input; it prints one JSON list of [name or null, file name or null]. BCC knows containers,
debug links and perf maps, and demangles.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import signal
import sys

SECONDS = 60
MEMORY = 4 << 30


def main(folder: str, pid: int) -> int:
    """Answer one request; returns the exit status."""
    signal.alarm(SECONDS)
    for what, limit in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CPU, SECONDS),
        (resource.RLIMIT_AS, MEMORY),
    ):
        _, hard = resource.getrlimit(what)
        new = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(what, (new, new))
    spec = importlib.util.spec_from_file_location(
        "bcc", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    if spec is None or spec.loader is None:
        return 3
    module = importlib.util.module_from_spec(spec)
    sys.modules["bcc"] = module
    spec.loader.exec_module(module)
    cache = module.SymbolCache(pid)
    names = []
    for address in json.load(sys.stdin):
        name, _, path = cache.resolve(address, True)
        names.append(
            [
                name.decode("utf-8", "replace") if name else None,
                os.path.basename(path.decode("utf-8", "replace")) if path else None,
            ]
        )
    json.dump(names, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
