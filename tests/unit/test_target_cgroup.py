# SPDX-License-Identifier: Apache-2.0
"""Case C54: unit, container and pod from ``/proc/PID/cgroup``, in the forms that runtimes write.

Paths are those of the runtimes' own documentation and of running systems, with other numbers.
"""

from __future__ import annotations

import pytest

from profinferd.agent.target.cgroup import Membership, parse

ID = "4f2c1d0e9b8a7f6e5d4c3b2a19081726354453627180a9b8c7d6e5f40312f1e0"
OUTER = "00ff" * 16
POD = "3f1c9a52-7d1e-4b8e-9a40-6f2d8c1b7e05"
SLICED = POD.replace("-", "_")
STATIC = "8d1f1b4e4d9d0b3fb0b0b5e0ee2b0dd1"
"""A pod that the kubelet reads from a file: its UID is a hash, without dashes."""
KUBE = "/kubepods.slice/kubepods-burstable.slice"

CONTAINERS = {
    # docker
    f"0::/system.slice/docker-{ID}.scope": None,
    f"0::/docker/{ID}": None,
    f"0::/llm.slice/docker-{ID}.scope": None,
    f"0::/user.slice/user-1000.slice/user@1000.service/user.slice/docker-{ID}.scope": None,
    # podman: root's, a user's, in a pod of its own, with a systemd inside
    f"0::/machine.slice/libpod-{ID}.scope/container": None,
    f"0::/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope/container": None,
    f"0::/machine.slice/machine-libpod_pod_{OUTER}.slice/libpod-{ID}.scope": None,
    f"0::/machine.slice/libpod-{ID}.scope/container/system.slice/ollama.service": None,
    # a container inside a container
    f"0::/docker/{OUTER}/docker/{ID}": None,
    f"0::/system.slice/docker-{OUTER}.scope{KUBE}/kubepods-burstable-pod{SLICED}.slice/"
    f"cri-containerd-{ID}.scope": POD,
    # Kubernetes with the systemd driver: containerd, cri-o, docker; each class of service
    f"0::{KUBE}/kubepods-burstable-pod{SLICED}.slice/cri-containerd-{ID}.scope": POD,
    f"0::{KUBE}/kubepods-burstable-pod{SLICED}.slice/crio-{ID}.scope": POD,
    f"0::{KUBE}/kubepods-burstable-pod{SLICED}.slice/crio-{ID}.scope/container": POD,
    f"0::{KUBE}/kubepods-burstable-pod{SLICED}.slice/docker-{ID}.scope": POD,
    f"0::/kubepods.slice/kubepods-pod{SLICED}.slice/cri-containerd-{ID}.scope": POD,
    f"0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{SLICED}.slice/"
    f"crio-{ID}.scope": POD,
    f"0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{SLICED}.slice/"
    f"cri-containerd-{ID}.scope": POD,
    # containerd, told of the one driver while the kubelet uses the other
    f"0::/system.slice/containerd.service/kubepods-burstable-pod{SLICED}.slice:cri-containerd:{ID}": POD,
    # Kubernetes with the cgroupfs driver
    f"0::/kubepods/burstable/pod{POD}/{ID}": POD,
    f"0::/kubepods/besteffort/pod{POD}/{ID}": POD,
    f"0::/kubepods/pod{POD}/{ID}": POD,
    f"0::/kubepods/burstable/pod{POD}/crio-{ID}": POD,
    f"0::/k8s.io/kubepods/pod{POD}/{ID}": POD,
    # pods from files
    f"0::{KUBE}/kubepods-burstable-pod{STATIC}.slice/cri-containerd-{ID}.scope": STATIC,
    f"0::/kubepods/burstable/pod{STATIC}/{ID}": STATIC,
    # seen from a container with a cgroup namespace of its own
    f"0::/../cri-containerd-{ID}.scope": None,
    f"0::/../../kubepods-burstable-pod{SLICED}.slice/cri-containerd-{ID}.scope": POD,
    f"0::/../../pod{POD}/{ID}": POD,
}  # fmt: skip


@pytest.mark.parametrize("text", CONTAINERS)
def test_containers_on_version_2(text: str) -> None:
    """The container's own id, and the pod's UID where the path has one; never the runtime's unit."""
    assert parse(text + "\n") == Membership(None, ID, CONTAINERS[text])


@pytest.mark.parametrize("text", CONTAINERS)
def test_containers_on_version_1(text: str) -> None:
    """One line for each hierarchy; on mixed systems the unified one may say less."""
    path = text.removeprefix("0::")
    lines = [f"12:cpuset:{path}", f"11:memory:{path}", f"4:cpu,cpuacct:{path}", f"1:name=systemd:{path}"]
    for unified in ("0::/", f"0::{path}", "0::/system.slice/containerd.service"):
        assert parse("\n".join([*lines, unified]) + "\n") == Membership(None, ID, CONTAINERS[text])


@pytest.mark.parametrize(
    ("path", "unit"),
    [
        ("/system.slice/ollama.service", "ollama.service"),
        ("/system.slice/system-llama.slice/llama@gemma.service", "llama@gemma.service"),
        ("/system.slice/llama.service/workers", "llama.service"),
        ("/user.slice/user-1000.slice/user@1000.service/app.slice/llama.service", "llama.service"),
        ("/user.slice/user-1000.slice/user@1000.service/app.slice/app-gnome-term-7.scope", None),
        ("/user.slice/user-1000.slice/session-3.scope", None),
        ("/user.slice/user-1000.slice/user@1000.service/init.scope", None),
        ("/machine.slice/systemd-nspawn@box.service/payload/system.slice/llama.service", "llama.service"),
        ("/lxc.payload.box/system.slice/llama.service", "llama.service"),
        (r"/system.slice/run-r12.service", "run-r12.service"),
        (r"/system.slice/my\x2dllm.service", r"my\x2dllm.service"),
        ("/", None),
        ("/init.scope", None),
    ],
)
def test_services(path: str, unit: str | None) -> None:
    """The innermost unit that runs something, not the manager of a user's."""
    assert parse(f"0::{path}\n").unit == unit
    assert parse(f"12:pids:{path}\n1:name=systemd:{path}\n0::/\n") == Membership(unit)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        "0::/",
        "0::/pods/podcast-3f1c9a52/x",  # not a UUID
        f"0::/docker/{ID[:-1]}",  # too short
        f"0::/docker/{ID}0",  # too long
        f"0::/docker/{ID.upper()}",  # written in no runtime
        f"0::/builds/pod{STATIC}0/x",
        "0::/a" + "/b" * 30_000,
    ],
)
def test_what_is_not_recognised_is_left_empty(text: str) -> None:
    assert parse(text) == Membership()


def test_labels() -> None:
    """A unit's name stays over restarts; of a container the short id, as runtimes print it."""
    assert parse("0::/system.slice/ollama.service").label == "ollama.service"
    assert parse(f"0::/docker/{ID}").label == ID[:12]
    assert parse("0::/").label is None
