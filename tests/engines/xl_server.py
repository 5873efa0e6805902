# SPDX-License-Identifier: Apache-2.0
"""A llama-server inside a Python process: xllamacpp, one static extension module.

Run by :mod:`tests.engines.servers` with the engines' own interpreter and one JSON argument.
Serves until its standard input ends, so that it cannot outlive the test that started it.
"""

import json
import sys

import xllamacpp as xl  # type: ignore[import-not-found,import-untyped,unused-ignore]


def main() -> None:
    options = json.loads(sys.argv[1])
    params = xl.CommonParams()
    params.model.path = options["model"]
    params.hostnames = ["127.0.0.1"]
    params.port = options["port"]
    params.n_ctx = options["context"]
    params.n_parallel = options["slots"]
    params.n_ubatch = options["ubatch"]
    params.kv_unified = options["unified"]
    params.cpuparams.n_threads = options["threads"]
    params.cpuparams_batch.n_threads = options["threads"]
    params.n_gpu_layers = 0
    params.endpoint_metrics = True
    params.no_extra_bufts = not options["repack"]
    params.warmup = options["warmup"]
    params.cache_ram_mib = 0
    if options["embedding"]:
        params.embedding = True
        params.n_batch = params.n_ubatch
    if options["draft"]:
        params.speculative.types = [xl.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        draft = params.speculative.draft
        draft.mparams.path = options["draft"]
        draft.n_max = options["draft_max"]
        draft.n_gpu_layers = 0
        draft.cpuparams.n_threads = options["threads"]
        draft.cpuparams_batch.n_threads = options["threads"]
    server = xl.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()
    del server


if __name__ == "__main__":
    main()
