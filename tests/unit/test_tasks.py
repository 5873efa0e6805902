# SPDX-License-Identifier: Apache-2.0
"""Who is in a process's list of threads is there; who is not may be there all the same."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

from profinferd.agent.tasks import gone, threads_of


def test_a_thread_that_a_short_list_leaves_out_has_not_ended() -> None:
    stop, told = threading.Event(), threading.Event()
    tids: list[int] = []

    def work() -> None:
        tids.append(threading.get_native_id())
        told.set()
        stop.wait()

    worker = threading.Thread(target=work)
    worker.start()
    told.wait()
    pid = os.getpid()
    assert {pid, *tids} <= threads_of(pid)
    assert gone(pid, [pid, *tids], []) == []
    stop.set()
    worker.join()
    while os.path.exists(f"/proc/{pid}/task/{tids[0]}"):
        pass
    assert gone(pid, [pid, *tids], [pid]) == tids
    assert gone(pid, tids, tids) == []


def test_of_a_process_that_has_ended_all_threads_have() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    assert threads_of(child.pid) == set()
    assert gone(child.pid, [child.pid], ()) == [child.pid]
