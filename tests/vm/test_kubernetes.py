# SPDX-License-Identifier: Apache-2.0
"""The manifest against Kubernetes's own schemas, strictly: an unknown key is an error."""

from __future__ import annotations

import copy

import pytest

from .kubernetes import objects

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="make vm installs it")
OLDEST = "1.30"
"""The first one with appArmorProfile, as the manifest says."""


@pytest.mark.parametrize("release", [OLDEST, "newest"])
def test_every_object_is_what_the_schema_says(release: str) -> None:
    if release == "newest":
        release = kubernetes_validate.latest_version()
    assert {"Namespace", "ConfigMap", "ServiceAccount", "DaemonSet"} == objects().keys()
    for one in objects().values():
        kubernetes_validate.validate(one, release, strict=True)


def test_a_wrong_key_is_found() -> None:
    """So that the test above can fail."""
    wrong = copy.deepcopy(objects()["DaemonSet"])
    context = wrong["spec"]["template"]["spec"]["containers"][0]["securityContext"]
    context["readOnlyRootFileSystem"] = context.pop("readOnlyRootFilesystem")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, OLDEST, strict=True)
