# SPDX-License-Identifier: Apache-2.0
"""A client of a PJRT plugin that does as it is told, a JSON object of its own figures per line.

Its clock is read right around the plugin's functions, so its times can be compared with what
was seen from outside. Commands: ``load``, ``compile NAME SIZE``, ``block NAME`` (a two-layer
transformer block), ``bad`` (does not compile), ``run NAME TIMES``, ``threads NAME TIMES``, ``echo TIMES``
(a host buffer to the device and back).
"""

from __future__ import annotations

import array
import json
import sys
import threading
import time
from typing import Any

site, plugin_path = sys.argv[1:3]
sys.path.insert(0, site)


def chain(name: str, size: int) -> str:
    """Eight multiplications of square matrices, one after the other."""
    kind = f"tensor<{size}x{size}xf32>"
    lines = [f"module @{name} {{", f"func.func public @main(%a: {kind}, %b: {kind}) -> {kind} {{"]
    last = "%a"
    for i in range(8):
        dot = f"stablehlo.dot_general {last}, %b, contracting_dims = [1] x [0]"
        lines.append(f"%{i} = {dot} : ({kind}, {kind}) -> {kind}")
        last = f"%{i}"
    return "\n".join([*lines, f"return {last} : {kind}", "}", "}"])


def block(name: str, tokens: int = 32, width: int = 64) -> str:
    """Two layers of attention and a feed-forward part, without biases, as StableHLO."""
    x, w, s = (
        f"tensor<{tokens}x{width}xf32>",
        f"tensor<{width}x{width}xf32>",
        f"tensor<{tokens}x{tokens}xf32>",
    )
    row = f"tensor<{tokens}xf32>"
    lines = [f"module @{name} {{", f"func.func public @main(%x: {x}, %w: {w}) -> {x} {{",
             "%zero = stablehlo.constant dense<0.0> : tensor<f32>"]  # fmt: skip
    last = "%x"
    for n in ("p", "q"):
        dot = "stablehlo.dot_general"
        lines += [
            f"%{n}k = {dot} {last}, %w, contracting_dims = [1] x [0] : ({x}, {w}) -> {x}",
            f"%{n}v = {dot} {last}, %w, contracting_dims = [1] x [0] : ({x}, {w}) -> {x}",
            f"%{n}s = {dot} {last}, %{n}k, contracting_dims = [1] x [1] : ({x}, {x}) -> {s}",
            f"%{n}e = stablehlo.exponential %{n}s : {s}",
            f"%{n}t = stablehlo.reduce(%{n}e init: %zero) applies stablehlo.add across dimensions = [1] "
            f": ({s}, tensor<f32>) -> {row}",
            f"%{n}b = stablehlo.broadcast_in_dim %{n}t, dims = [0] : ({row}) -> {s}",
            f"%{n}a = stablehlo.divide %{n}e, %{n}b : {s}",
            f"%{n}o = {dot} %{n}a, %{n}v, contracting_dims = [1] x [0] : ({s}, {x}) -> {x}",
            f"%{n}r = stablehlo.add %{n}o, {last} : {x}",
            f"%{n}h = {dot} %{n}r, %w, contracting_dims = [1] x [0] : ({x}, {w}) -> {x}",
            f"%{n}g = stablehlo.tanh %{n}h : {x}",
            f"%{n}y = stablehlo.add %{n}g, %{n}r : {x}",
        ]
        last = f"%{n}y"
    return "\n".join([*lines, f"return {last} : {x}", "}", "}"])


class Client:
    """The plugin's client, and the times of what it calls."""

    def __init__(self) -> None:
        from pypjrt._loader import Plugin
        from pypjrt.client import Client as Pjrt

        self.plugin = Plugin(plugin_path)
        self.kind = self.plugin.abi.PJRT_Buffer_Type_F32
        self.times: dict[str, float] = {}
        self._lock, self._local = threading.Lock(), threading.local()
        self._call = self.plugin.call
        self.plugin.call = self.timed
        self.client = Pjrt.create(self.plugin)
        self.programs: dict[str, tuple[Any, int, int]] = {}

    def timed(self, name: str, *arguments: Any, **options: Any) -> None:
        """As the client's own, with its clock around it; a run lasts until its first wait is over."""
        begun = time.perf_counter()
        try:
            self._call(name, *arguments, **options)
        finally:
            now = time.perf_counter()
            with self._lock:
                self.times[name] = self.times.get(name, 0.0) + now - begun
                if name == "PJRT_LoadedExecutable_Execute":
                    self._local.begun = begun
                elif name == "PJRT_Event_Await" and getattr(self._local, "begun", None):
                    self.times["done"] = self.times.get("done", 0.0) + now - self._local.begun
                    self._local.begun = None

    def run(self, name: str, times: int) -> None:
        """Fresh inputs, so many runs, the result of the last one to the host."""
        program, rows, columns = self.programs[name]
        with self.client.device() as device:
            inputs = [
                self.client.buffer_from_host(
                    array.array("f", [0.01] * n * columns), self.kind, [n, columns], device
                )
                for n in (rows, columns)
            ]
            for _ in range(times):
                results = program(*inputs)
            results[0].to_host()

    def tell(self, words: list[str]) -> dict[str, Any]:
        """Does it; answers with the clock's figures of this command alone."""
        self.times = {}
        match words:
            case ["compile", name, size]:
                self.programs[name] = (self.client.compile(chain(name, int(size))), int(size), int(size))
            case ["block", name]:
                self.programs[name] = (self.client.compile(block(name)), 32, 64)
            case ["bad"]:
                from pypjrt.errors import PjrtError

                try:
                    self.client.compile("module @bad { func.func @main() -> tensor<4xf32> { return } }")
                except PjrtError as error:
                    return {"code": int(error.code)}
            case ["run", name, count]:
                self.run(name, int(count))
            case ["echo", count]:
                with self.client.device() as device:
                    for _ in range(int(count)):
                        values = array.array("f", [0.5] * 64)
                        self.client.buffer_from_host(values, self.kind, [8, 8], device).to_host()
            case ["threads", name, count]:
                threads = [threading.Thread(target=self.run, args=(name, int(count))) for _ in range(3)]
                for one in threads:
                    one.start()
                for one in threads:
                    one.join()
        return dict(self.times)


def main() -> None:
    """Answers line by line."""
    client: Client | None = None
    print("ready", flush=True)
    for line in sys.stdin:
        words = line.split()
        if words == ["load"]:
            client = Client()
            print(
                json.dumps({"version": client.plugin.api_version, "slots": client.plugin.n_slots}), flush=True
            )
        else:
            assert client is not None
            print(json.dumps(client.tell(words)), flush=True)


if __name__ == "__main__":
    main()
