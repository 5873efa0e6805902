# SPDX-License-Identifier: Apache-2.0
"""Which unit, container and pod a process belongs to, from ``/proc/PID/cgroup`` (case C54).

The kernel's own cgroup number means something on version 2 alone, so the paths are read, on
every version and all lines: 64 hexadecimal digits are a container's id wherever they stand
(docker, containerd, cri-o, podman); what is not recognised is left empty rather than guessed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_BYTES = 1 << 16
_CONTAINER = re.compile(r"(?<![0-9a-f])([0-9a-f]{64})(?![0-9a-f])")
# A UUID, with underscores where the path is systemd's; the kubelet's pods from files have a hash.
_POD = re.compile(
    r"pod([0-9a-f]{8}([-_])[0-9a-f]{4}\2[0-9a-f]{4}\2[0-9a-f]{4}\2[0-9a-f]{12}|[0-9a-f]{32})(?![0-9a-f])"
)
_UNIT = re.compile(r"^[A-Za-z0-9:_.\\@-]{1,200}\.service$")
_MANAGERS = re.compile(r"^user@\d+\.service$")


@dataclass(frozen=True, slots=True)
class Membership:
    """``container``: the full id; ``pod``: its UID, with dashes where it has any; ``unit``: a
    systemd service."""

    unit: str | None = None
    container: str | None = None
    pod: str | None = None

    @property
    def label(self) -> str | None:
        """What names a target: its unit, else the short id of its container."""
        return self.unit or (self.container[:12] if self.container else None)


def parse(text: str) -> Membership:
    """Of the text of ``/proc/PID/cgroup``; lines are ``number:controllers:path``."""
    unit = container = pod = None
    for line in text.splitlines()[:64]:
        path = line.split(":", 2)[-1]
        ids = _CONTAINER.findall(path)
        if ids:
            container = container or ids[-1]  # a container inside a container is the inner one
        if found := _POD.search(path):
            pod = pod or found[1].replace("_", "-")
        for part in reversed(path.split("/")):
            if _UNIT.match(part) and not _MANAGERS.match(part):
                unit = unit or part
                break
    if container is not None:
        # The unit is the container runtime's, not what runs in it.
        unit = None
    return Membership(unit, container, pod)


def membership(pid: int) -> Membership:
    """Of a process; empty when it cannot be read (any more)."""
    try:
        with open(f"/proc/{pid}/cgroup", "rb") as file:
            return parse(file.read(MAX_BYTES).decode("utf-8", "replace"))
    except OSError:
        return Membership()
