# SPDX-License-Identifier: Apache-2.0
"""deploy/kubernetes as options of podman: the same privileges, mounts and limits as in a pod.

Every key of the pod is either translated or named here as one that means nothing outside of a cluster;
an unknown one is an error, so that nothing of the manifest is passed over in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

MANIFEST = Path(__file__).resolve().parents[2] / "deploy/kubernetes/profinferd.yaml"
OF_CLUSTERS = (
    "serviceAccountName",
    "automountServiceAccountToken",
    "dnsPolicy",
    "tolerations",
    "terminationGracePeriodSeconds",
)
"""Of the pod: scheduling, names, and the API, which it does not use."""


@dataclass(frozen=True, slots=True)
class Pod:
    """``options`` for ``podman run``, ``arguments`` for the image's entry point; ``probes`` are paths."""

    options: tuple[str, ...]
    arguments: tuple[str, ...]
    image: str
    port: int
    probes: tuple[str, ...]


def objects() -> dict[str, dict[str, Any]]:
    """The manifest's objects by kind."""
    found = list(yaml.safe_load_all(MANIFEST.read_text()))
    assert len({one["kind"] for one in found}) == len(found)
    return {one["kind"]: one for one in found}


def configuration() -> str:
    """What the ConfigMap holds."""
    (text,) = objects()["ConfigMap"]["data"].values()
    assert isinstance(text, str)
    return text


def pod(folder: Path, config: str) -> Pod:
    """The daemon set's pod, with volumes below ``folder`` and this configuration."""
    spec = dict(objects()["DaemonSet"]["spec"]["template"]["spec"])
    for key in OF_CLUSTERS:
        spec.pop(key)
    options = []
    if spec.pop("hostPID"):
        options.append("--pid=host")
    if spec.pop("hostNetwork"):
        options.append("--network=host")
    volumes = {one["name"]: one for one in spec.pop("volumes")}
    (container,) = ({**one} for one in spec.pop("containers"))
    _nothing_else("pod", spec)
    for mount in container.pop("volumeMounts"):
        options += _volume(folder, volumes.pop(mount["name"]), mount, config)
    _nothing_else("volumes", volumes)
    options += _privileges(container.pop("securityContext"))
    resources = container.pop("resources")
    resources.pop("requests")
    limits = resources.pop("limits")
    options.append(f"--memory={_bytes(limits.pop('memory'))}")
    _nothing_else("limits", limits)
    _nothing_else("resources", resources)
    (port,) = container.pop("ports")
    assert port["hostPort"] == port["containerPort"], "as the node's network asks"
    probes = [container.pop(name)["httpGet"] for name in ("readinessProbe", "livenessProbe")]
    assert all(one["port"] == port["name"] for one in probes)
    found = Pod(
        tuple(options),
        tuple(container.pop("args")),
        container.pop("image"),
        port["containerPort"],
        tuple(one["path"] for one in probes),
    )
    container.pop("name")
    _nothing_else("container", container)
    return found


def _privileges(context: Mapping[str, Any]) -> list[str]:
    left = dict(context)
    assert left.pop("privileged") is False and left.pop("readOnlyRootFilesystem") is True
    # podman would lay writable folders over some places; a pod has none.
    options = ["--read-only", "--read-only-tmpfs=false", f"--user={left.pop('runAsUser')}"]
    if not left.pop("allowPrivilegeEscalation"):
        options.append("--security-opt=no-new-privileges")
    for key, name in (("seccompProfile", "seccomp"), ("appArmorProfile", "apparmor")):
        assert left.pop(key) == {"type": "Unconfined"}
        options.append(f"--security-opt={name}=unconfined")
    capabilities = dict(left.pop("capabilities"))
    options += [f"--cap-drop={name}" for name in capabilities.pop("drop")]
    options += [f"--cap-add={name}" for name in capabilities.pop("add")]
    _nothing_else("capabilities", capabilities)
    _nothing_else("securityContext", left)
    return options


def _volume(folder: Path, volume: Mapping[str, Any], mount: Mapping[str, Any], config: str) -> list[str]:
    place, kind = mount["mountPath"], next(key for key in volume if key != "name")
    how = ":ro" if mount.get("readOnly") else ""
    if kind == "configMap":
        return ["--volume", f"{_config_map(folder / 'config', config)}:{place}{how}"]
    if kind == "emptyDir":
        assert volume[kind]["medium"] == "Memory" and not how
        return ["--tmpfs", f"{place}:rw,mode=0777,size={_bytes(volume[kind]['sizeLimit'])}"]
    assert kind == "hostPath" and volume[kind]["type"] == "DirectoryOrCreate"
    state = folder / "state"
    state.mkdir(mode=0o755)
    return ["--volume", f"{state}:{place}{how}"]


def _config_map(folder: Path, config: str) -> Path:
    """As a kubelet writes it: files are links through a folder that is exchanged as a whole."""
    (name,) = objects()["ConfigMap"]["data"]
    (folder / "..1").mkdir(parents=True)
    (folder / "..1" / name).write_text(config)
    (folder / "..data").symlink_to("..1")
    (folder / name).symlink_to(f"..data/{name}")
    return folder


def _bytes(quantity: str) -> int:
    assert quantity.endswith("Mi")
    return int(quantity.removesuffix("Mi")) << 20


def _nothing_else(what: str, left: Mapping[str, Any]) -> None:
    assert not left, f"{what}: {sorted(left)} is not tested"
