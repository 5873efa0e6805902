# SPDX-License-Identifier: Apache-2.0
"""A program that decodes with llama-cpp-py-sync and does exactly what it is told.

Run by :mod:`tests.engines.pysync` with the engines' own interpreter. The first argument is
JSON (see ``Options`` in :mod:`tests.engines.pysync`); after that each line of standard input is
one JSON command and each answer one JSON line. It ends with its input.

Decoding is greedy, so the token ids depend on nothing but the model and the prompt: a target
that profiling has touched answers with other ids, or not at all. With ``api`` "process" the
newer llama_process and its opaque batch are called instead of llama_decode.
"""

import ctypes
import json
import os
import sys
import threading
import time
from typing import Any

import numpy as np
from llama_cpp_py_sync import _cffi_bindings as bindings  # type: ignore[import-not-found,import-untyped,unused-ignore]

ffi = bindings.ffi


class Context:
    """One llama_context with its own sequence state."""

    def __init__(self, owner: "Engine", options: dict[str, Any]) -> None:
        self.lib, self.n_vocab, self.api = owner.lib, owner.n_vocab, options["api"]
        self.calls: list[dict[str, int]] = []
        params = self.lib.llama_context_default_params()
        params.n_ctx = options["context"]
        params.n_batch = options["batch"]
        params.n_ubatch = min(512, options["batch"])
        params.n_seq_max = options["sequences"]
        params.kv_unified = True
        params.n_threads = params.n_threads_batch = options["threads"]
        params.embeddings = options["embedding"]
        self.pointer = self.lib.llama_init_from_model(owner.model, params)
        if not self.pointer:
            raise SystemExit("no context")

    def call(self, name: str, tokens: list[int], pos: list[int], seq: list[int], out: list[int]) -> int:
        """One engine call; its status and its times (CLOCK_MONOTONIC, ns) are noted."""
        run = self._process if self.api == "process" else self._decode
        status, begin, end = run(name, tokens, pos, seq, out)
        note = {"status": status, "begin": begin, "end": end, "tokens": len(tokens), "rows": sum(out)}
        self.calls.append(note)
        return status

    def _decode(
        self, name: str, tokens: list[int], pos: list[int], seq: list[int], out: list[int]
    ) -> tuple[int, int, int]:
        batch = self.lib.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i] = token
            batch.pos[i] = pos[i]
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = seq[i]
            batch.logits[i] = out[i]
        function = self.lib.llama_encode if name == "encode" else self.lib.llama_decode
        begin = time.monotonic_ns()
        status = function(self.pointer, batch)
        end = time.monotonic_ns()
        self.lib.llama_batch_free(batch)
        return status, begin, end

    def _process(
        self, name: str, tokens: list[int], pos: list[int], seq: list[int], out: list[int]
    ) -> tuple[int, int, int]:
        batch = self.lib.llama_batch_ext_init(self.pointer)
        for i, token in enumerate(tokens):
            at = self.lib.llama_batch_ext_add_token(batch, seq[i], token)
            self.lib.llama_batch_ext_set_pos(batch, at, ffi.new("llama_pos *", pos[i]))
            if out[i]:
                self.lib.llama_batch_ext_set_output_logits(batch, at, True)
        kind = self.lib.LLAMA_PROCESS_TYPE_ENCODE if name == "encode" else self.lib.LLAMA_PROCESS_TYPE_DECODE
        begin = time.monotonic_ns()
        status = self.lib.llama_process(self.pointer, kind, batch)
        end = time.monotonic_ns()
        self.lib.llama_batch_ext_free(batch)
        return status, begin, end

    def best(self, row: int) -> int:
        logits = ffi.buffer(self.lib.llama_get_logits_ith(self.pointer, row), 4 * self.n_vocab)
        return int(np.frombuffer(logits, np.float32).argmax())

    def generate(self, prompt: list[int], n: int) -> list[int]:
        """``n`` greedy tokens after ``prompt``, from an empty cache; the last is never decoded."""
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.pointer), True)
        out = [0] * (len(prompt) - 1) + [1]
        status = self.call("decode", prompt, list(range(len(prompt))), [0] * len(prompt), out)
        tokens: list[int] = []
        while status == 0 and len(tokens) < n:
            tokens.append(self.best(-1))
            if len(tokens) < n:
                status = self.call("decode", tokens[-1:], [len(prompt) + len(tokens) - 1], [0], [1])
        return tokens


class Engine:
    """Model and contexts, and one method per command."""

    def __init__(self, options: dict[str, Any]) -> None:
        if options["first"]:
            ctypes.CDLL(options["first"], ctypes.RTLD_GLOBAL)
        self.lib = ffi.dlopen(options["library"])
        self.lib.llama_backend_init()
        params = self.lib.llama_model_default_params()
        params.n_gpu_layers = 0
        params.use_extra_bufts = options["repack"]
        modes = {"read": self.lib.LLAMA_LOAD_MODE_NONE, "mlock": self.lib.LLAMA_LOAD_MODE_MMAP_MLOCK}
        params.load_mode = modes.get(options["loading"], params.load_mode)
        self.model = self.lib.llama_model_load_from_file(options["model"].encode(), params)
        if not self.model:
            raise SystemExit("no model")
        self.n_vocab = self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(self.model))
        self.contexts = [Context(self, options) for _ in range(options["contexts"])]

    def generate(self, context: int, prompt: list[int], n: int, times: int = 1) -> dict[str, Any]:
        one = self.contexts[context]
        one.calls.clear()
        tokens = [one.generate(prompt, n) for _ in range(times)]
        return {"tokens": tokens[0], "same": all(t == tokens[0] for t in tokens), "calls": list(one.calls)}

    def together(self, jobs: list[dict[str, Any]]) -> dict[str, Any]:
        """One generation per job at the same time, a thread each (cffi lets go of the GIL)."""
        answers: list[Any] = [None] * len(jobs)

        def work(i: int) -> None:
            answers[i] = self.generate(**jobs[i])

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(jobs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {"answers": answers}

    def call(
        self, context: int, tokens: list[int], pos: list[int], seq: list[int], out: list[int]
    ) -> dict[str, Any]:
        """One decode exactly as given: failed calls, mixed batches."""
        one = self.contexts[context]
        one.calls.clear()
        one.call("decode", tokens, pos, seq, out)
        return {"calls": list(one.calls)}

    def set_threads(self, context: int, threads: int) -> dict[str, Any]:
        """So many from the next call on: the engine rebuilds its pool."""
        self.lib.llama_set_n_threads(self.contexts[context].pointer, threads, threads)
        return {}

    def clear(self, context: int) -> dict[str, Any]:
        one = self.contexts[context]
        memory = self.lib.llama_get_memory(one.pointer)
        if memory:  # encoders have none
            self.lib.llama_memory_clear(memory, True)
        return {}

    def translate(self, context: int, source: list[int], n: int) -> dict[str, Any]:
        """Encoder-decoder: one encode, then greedy decoding from the start token."""
        self.clear(context)
        one = self.contexts[context]
        one.calls.clear()
        size = len(source)
        if one.call("encode", source, list(range(size)), [0] * size, [1] * size) != 0:
            return {"tokens": [], "calls": list(one.calls)}
        start = self.lib.llama_model_decoder_start_token(self.model)
        return {"tokens": one.generate([max(start, 0)], n), "calls": list(one.calls)}

    def embed(self, context: int, tokens: list[int]) -> dict[str, Any]:
        self.clear(context)
        one = self.contexts[context]
        one.calls.clear()
        size = len(tokens)
        one.call("decode", tokens, list(range(size)), [0] * size, [1] * size)
        width = self.lib.llama_model_n_embd(self.model)
        found = ffi.buffer(self.lib.llama_get_embeddings_seq(one.pointer, 0), 4 * width)
        return {"embedding": np.frombuffer(found, np.float32).tolist()[:4], "calls": list(one.calls)}


def main() -> None:
    # The engine prints diagnostics of failed calls to descriptor 1: they go to the log.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine = Engine(json.loads(sys.argv[1]))
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        command = json.loads(line)
        action = command.pop("do")
        if action == "quit":
            break
        print(json.dumps(getattr(engine, action)(**command)), file=answers)


if __name__ == "__main__":
    main()
