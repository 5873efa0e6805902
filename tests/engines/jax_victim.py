# SPDX-License-Identifier: Apache-2.0
"""jax, computing as it is told: with a plugin whose path is given, else on its own CPU backend.

Commands: ``compile``; ``serve N``: N times a long program and then eight short ones, each waited
for; ``spread``: an array from one device to another, and its bytes. Answers with a JSON object:
its clock, and how often it ran what.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

STEPS = 8


def main(site: str, plugin: str | None = None) -> None:
    """Answers line by line."""
    sys.path.insert(0, site)
    if plugin:
        os.environ["PJRT_NAMES_AND_LIBRARY_PATHS"] = f"mine:{plugin}"
    os.environ["JAX_PLATFORMS"] = "mine" if plugin else "cpu"
    import jax
    import jax.numpy as jnp

    # Together the short runs take a third of the time: neither of the two is hardly seen beside the other.
    def slow(x: Any, w: Any) -> Any:
        for _ in range(3):
            x = jnp.tanh(x @ w)
        return x

    def quick(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w)

    device, other = jax.devices()[0], jax.devices()[-1]
    w = jax.device_put(jnp.full((512, 512), 0.01, jnp.float32), device)
    prompt, token = jax.device_put(w[:256], device), jax.device_put(w[:32], device)
    programs = {"slow": jax.jit(slow), "quick": jax.jit(quick)}
    print("ready", flush=True)
    for line in sys.stdin:
        words = line.split()
        taken = {"slow": 0.0, "quick": 0.0, "bytes": 0.0, "devices": len(jax.devices())}
        if words[0] == "compile":
            for name, x in (("slow", prompt), ("quick", token)):
                programs[name](x, w).block_until_ready()
        elif words[0] == "serve":
            for _ in range(int(words[1])):
                for name, x, count in (("slow", prompt, 1), ("quick", token, STEPS)):
                    for _ in range(count):
                        begun = time.perf_counter()
                        programs[name](x, w).block_until_ready()
                        taken[name] += time.perf_counter() - begun
        elif words[0] == "spread":
            taken["bytes"] = float(jax.device_put(prompt, other).block_until_ready().nbytes)
        print(json.dumps(taken), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
