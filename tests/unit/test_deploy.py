# SPDX-License-Identifier: Apache-2.0
"""What is shipped beside the code agrees with the code: pinned files, manual, completion, unit."""

from __future__ import annotations

import gzip
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
import yaml
from packaging.requirements import Requirement

from profinferd.agent.cli import cli
from profinferd.agent.errors import ExitCode
from profinferd.agent.kernel.reasons import CAPABILITIES

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem + "_of_deploy", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def commands() -> dict[str, click.Command]:
    context = click.Context(cli, info_name="profinferd")
    found = {name: cli.get_command(context, name) for name in cli.list_commands(context)}
    return {name: command for name, command in found.items() if command is not None and not command.hidden}


# ---- the Debian package ---------------------------------------------------------------


def test_the_pinned_files_satisfy_the_dependencies() -> None:
    """Whoever changes a dependency in pyproject.toml has to choose the files again."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lock = load(DEPLOY / "deb/lock.py")
    pinned = dict(re.findall(r"(?m)^([a-z0-9.-]+)==(\S+)", lock.LOCK.read_text()))
    wanted = [*project["dependencies"], *(r for extra in lock.EXTRAS for r in extras[extra])]
    for requirement in map(Requirement, wanted):
        name = re.sub(r"[-_.]+", "-", requirement.name.lower())
        assert name in pinned, f"{name} is not in deploy/deb/requirements.lock: run make lock"
        assert requirement.specifier.contains(pinned[name]), f"{name}=={pinned[name]}: run make lock"


def test_every_pinned_file_has_hashes() -> None:
    text = (DEPLOY / "deb/requirements.lock").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert len(lines) > 5
    for line in lines:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", line), line


@pytest.mark.parametrize("script", ["postinst", "prerm", "postrm"])
def test_maintainer_scripts_are_sh(script: str) -> None:
    done = subprocess.run(["sh", "-n", str(DEPLOY / "deb" / script)], capture_output=True, text=True)
    assert done.stderr == ""


def test_the_control_file_has_one_name_for_what_python_is_needed() -> None:
    lock = load(DEPLOY / "deb/lock.py")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lowest = Requirement(f"python{project['requires-python']}").specifier
    assert all(lowest.contains(version) for version in lock.PYTHONS.values())


def test_every_licence_of_the_package_is_written_out() -> None:
    """Each paragraph on files names its holder and year, and licences that have a paragraph of their own."""
    text = load(DEPLOY / "deb/build.py").licences()
    paragraphs = [p for p in re.split(r"\n\n+", text) if p.startswith(("Files:", "License:"))]
    used = set()
    for one in paragraphs:
        name = re.search(r"(?m)^License: (.*)$", one)
        assert name is not None
        if one.startswith("Files:"):
            assert re.search(r"(?m)^Copyright: \d{4} \w", one)
            used |= set(name[1].split(" or "))
        else:
            assert len(one.splitlines()) > 2
            used.remove(name[1])
    assert not used
    assert "THIS SOFTWARE IS PROVIDED" in text and "\n\n\n" not in text


# ---- the service ----------------------------------------------------------------------


def service() -> dict[str, str]:
    """The section Service; a key that comes more than once has its values joined by blanks."""
    found: dict[str, str] = {}
    section = (
        (DEPLOY / "systemd/profinferd.service").read_text().partition("[Service]")[2].partition("\n[")[0]
    )
    for line in section.splitlines():
        if line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found[key] = f"{found[key]} {value}" if key in found else value
    return found


def test_the_unit_holds_the_capabilities_that_we_name() -> None:
    unit = service()
    held = unit["AmbientCapabilities"].split()
    assert set(held) == set(unit["CapabilityBoundingSet"].split())
    assert set(held) <= set(CAPABILITIES)
    assert {"CAP_BPF", "CAP_PERFMON", "CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH"} <= set(held)


def test_the_unit_does_not_try_again_where_that_cannot_help() -> None:
    """C33: a machine that cannot, and a wrong configuration, are no crash loop."""
    codes = {int(code) for code in service()["RestartPreventExitStatus"].split()}
    assert codes == {ExitCode.USAGE, ExitCode.MACHINE}


def test_a_restart_does_not_take_long() -> None:
    """systemd never forgets a failure while the service runs: the fifth one in a year waits as long as the
    fifth in a minute, so the longest wait is what any of them may cost."""
    unit = service()
    assert unit["RestartSec"] == "10s" and unit["RestartMaxDelaySec"] == "1min"


def test_the_unit_does_not_hide_what_is_looked_at() -> None:
    unit = service()
    for key in ("PrivateUsers", "DynamicUser", "ProtectProc", "ProcSubset", "PrivateNetwork"):
        assert key not in unit, key
    calls = unit["SystemCallFilter"].split()
    assert {"bpf", "perf_event_open"} <= set(calls)


# ---- containers -----------------------------------------------------------------------


def container() -> dict[str, Any]:
    """Of the daemon set."""
    documents = yaml.safe_load_all((DEPLOY / "kubernetes/profinferd.yaml").read_text())
    (daemons,) = (one for one in documents if one["kind"] == "DaemonSet")
    (found,) = daemons["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def test_a_pod_holds_what_the_unit_and_the_container_hold() -> None:
    """tests/vm attaches with the privileges of each."""
    context = container()["securityContext"]
    named = {f"CAP_{name}" for name in context["capabilities"]["add"]}
    assert named == set(service()["AmbientCapabilities"].split())
    command = (DEPLOY / "container/Containerfile").read_text()
    assert {f"CAP_{name}" for name in re.findall(r"--cap-add=(\w+)", command)} == named
    assert context["capabilities"]["drop"] == ["ALL"] and "--cap-drop=ALL" in command
    for key, name in (("seccompProfile", "seccomp"), ("appArmorProfile", "apparmor")):
        assert context[key] == {"type": "Unconfined"} and f"--security-opt={name}=unconfined" in command


def test_what_the_api_server_refuses_beyond_the_schema() -> None:
    """It knows capabilities by names without CAP_, and takes SYS_ADMIN without privilege escalation so."""
    found = container()
    assert not [n for n in found["securityContext"]["capabilities"]["add"] if n.startswith("CAP_")]
    assert all(port["hostPort"] == port["containerPort"] for port in found["ports"])
    assert all(len(port["name"]) <= 15 for port in found["ports"])
    limits, requests = found["resources"]["limits"], found["resources"]["requests"]
    assert int(requests["memory"].removesuffix("Mi")) <= int(limits["memory"].removesuffix("Mi"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert found["image"] == f"profinferd:{project['version']}"


# ---- manual and completion ------------------------------------------------------------


@pytest.fixture(scope="module")
def placed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("manual")
    subprocess.run([sys.executable, str(DEPLOY / "manual.py"), "--root", str(root)], check=True,
                   stdout=subprocess.DEVNULL)  # fmt: skip
    return root


def page(placed: Path, name: str) -> str:
    path = placed / "usr/share/man/man1" / f"{name}.1.gz"
    return gzip.decompress(path.read_bytes()).decode()


def test_every_command_has_a_page_with_all_its_options(placed: Path) -> None:
    main = page(placed, "profinferd")
    for name, command in commands().items():
        text = page(placed, f"profinferd-{name}").replace(r"\-", "-")
        assert f"profinferd-{name}" in main.replace(r"\-", "-")
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.hidden:
                assert all(word in text for word in parameter.opts), (name, parameter.opts)
                assert parameter.help, f"{name} {parameter.opts} has no help"


def test_every_exit_code_is_in_the_manual(placed: Path) -> None:
    text = page(placed, "profinferd")
    section = text[text.index(".SH EXIT STATUS") : text.index(".SH FILES")]
    assert [int(code) for code in re.findall(r"\\fB(\d+)\\fR", section)] == [int(code) for code in ExitCode]


def test_pages_are_good_roff(placed: Path) -> None:
    """Nothing begins a line with a dot that is not one of the few requests we use."""
    known = {".TH", ".SH", ".TP", ".PP", ".B"}
    for name in ("profinferd", *(f"profinferd-{name}" for name in commands())):
        for line in page(placed, name).splitlines():
            assert not line.startswith("'")
            if line.startswith("."):
                assert line.split()[0] in known, (name, line)


@pytest.mark.parametrize(
    ("words", "offered"),
    [("profinferd ch", "check"), ("profinferd attach --budg", "--budget"),
     ("profinferd check --format j", "json")],
)  # fmt: skip
def test_bash_completes_commands_options_and_choices(placed: Path, words: str, offered: str) -> None:
    """With the script that is shipped, in bash itself."""
    script = (
        f"source {placed}/usr/share/bash-completion/completions/profinferd 2>/dev/null; "
        f"COMP_WORDS=({words}); COMP_CWORD={len(words.split()) - 1}; "
        "_profinferd_completion profinferd; printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    folder = placed / "bin"
    folder.mkdir(exist_ok=True)
    program = folder / "profinferd"
    program.write_text(
        f"#!{sys.executable}\nimport sys\nfrom profinferd.agent.cli import main\nsys.exit(main())\n"
    )
    program.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True,
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert offered in done.stdout.split(), done


@pytest.mark.parametrize("place", ["usr/share/zsh/vendor-completions/_profinferd",
                                   "usr/share/fish/vendor_completions.d/profinferd.fish"])  # fmt: skip
def test_other_shells_have_a_script(placed: Path, place: str) -> None:
    assert "_PROFINFERD_COMPLETE" in (placed / place).read_text()
