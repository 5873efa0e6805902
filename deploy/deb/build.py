# SPDX-License-Identifier: Apache-2.0
"""Builds the Debian package: ``python deploy/deb/build.py --suite bookworm --arch amd64``.

Our wheel and the wheels of ``requirements.lock`` are unpacked into /usr/lib/profinferd, for the
Python of that Debian release; the eBPF objects in them are compiled. So any machine builds the
package for any other, and nothing is fetched when it is installed. The same commit gives the same
package, byte for byte: file times are the commit's.
"""

from __future__ import annotations

import argparse
import gzip
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

import lock  # noqa: E402

RELEASES = {"bookworm": "12", "trixie": "13"}
UNUSED = (
    "numpy/f2py",
    "numpy/distutils",
    "numpy/_core/include",
    "numpy/_core/lib",
    "numpy/typing/tests",
    "bin",
    "include",
)
"""Parts of other projects that nothing of ours runs."""
UNUSED_SUFFIXES = (".pyi", ".pyx", ".pxd", ".c", ".h", ".a", ".lib", ".f90")
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
METADATA = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json")
"""What pip notes for itself; it holds paths of this machine."""


def main() -> int:
    options = argparse.ArgumentParser(description="Build the Debian package.")
    options.add_argument("--suite", choices=sorted(RELEASES), default="bookworm")
    options.add_argument("--arch", choices=sorted(lock.PLATFORMS), default=None)
    options.add_argument("--set-version", metavar="V", help="pretend to be this version (to test upgrades)")
    options.add_argument("--wheel", type=Path, metavar="FILE", help="our wheel, where it was built before")
    options.add_argument("--fast", action="store_true", help="compress little, for tests")
    options.add_argument("-o", "--output", type=Path, default=ROOT / "dist")
    given = options.parse_args()
    architecture = given.arch or output("dpkg", "--print-architecture")
    with tempfile.TemporaryDirectory() as scratch:
        wheel = given.wheel or own_wheel(Path(scratch))
        print(
            build(
                given.suite, architecture, given.output, Path(scratch), wheel, given.set_version, given.fast
            )
        )
    return 0


def build(
    suite: str,
    architecture: str,
    out: Path,
    scratch: Path,
    wheel: Path,
    pretend: str | None = None,
    fast: bool = False,
) -> Path:
    """The package's path."""
    tree = scratch / "tree"
    site = tree / "usr/lib/profinferd"
    install(wheel, site, suite, architecture)
    version = wheel.name.split("-")[1]
    if pretend is not None:
        rename(site, version, pretend)
        version = pretend
    place_files(tree, site)
    debian = f"{version}-1+deb{RELEASES[suite]}u1"
    changelog(tree, debian)
    control(tree, debian, architecture, suite)
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH") or commit_time())
    normalise(tree, epoch)
    out.mkdir(parents=True, exist_ok=True)
    target = out / f"profinferd_{debian}_{architecture}.deb"
    subprocess.run(
        ["dpkg-deb", "--root-owner-group", *(("-Zgzip", "-z1") if fast else ("-Zxz",)), "--build", str(tree),
         str(target)],
        check=True, stdout=subprocess.DEVNULL, env={**os.environ, "SOURCE_DATE_EPOCH": str(epoch)},
    )  # fmt: skip
    return target


def output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout.strip()


def commit_time() -> str:
    """Seconds; of the commit, or of pyproject.toml in a source distribution."""
    try:
        return output("git", "log", "-1", "--format=%ct")
    except (subprocess.CalledProcessError, FileNotFoundError):
        return str(int((ROOT / "pyproject.toml").stat().st_mtime))


def own_wheel(scratch: Path) -> Path:
    """Our wheel, with the objects of both architectures."""
    # Through a copy: setuptools leaves its own files beside the sources.
    copy = scratch / "source"
    ignore = shutil.ignore_patterns(
        ".git", ".venv", ".cache", "build", "dist", "tests", "__pycache__", "*.egg-info", ".*_cache"
    )
    shutil.copytree(ROOT, copy, ignore=ignore, symlinks=True)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(scratch), str(copy)],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    (wheel,) = scratch.glob("profinferd-*.whl")
    return wheel


def install(wheel: Path, site: Path, suite: str, architecture: str) -> None:
    """Unpack the wheels; hashes of other projects' files must be those of the lock."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile",
           "--no-deps", "--target", str(site), *lock.target_options(suite, architecture)]  # fmt: skip
    subprocess.run([*pip, "--require-hashes", "-r", str(lock.LOCK)], check=True)
    subprocess.run([*pip, "--upgrade", str(wheel)], check=True)
    for name in UNUSED:
        shutil.rmtree(site / name, ignore_errors=True)
    for folder in [p for p in site.rglob("tests") if p.is_dir()]:
        shutil.rmtree(folder)
    ours = site / "profinferd"
    for file in site.rglob("*"):
        if file.is_file() and file.suffix in UNUSED_SUFFIXES and ours not in file.parents:
            file.unlink()
    for file in (ours / "probes").glob("*.bpf.o"):
        if not file.name.endswith(f".{MACHINES[architecture]}.bpf.o"):
            file.unlink()  # the wheel has those of every machine
    for info in site.glob("*.dist-info"):
        for name in METADATA:
            (info / name).unlink(missing_ok=True)
    for folder in sorted((p for p in site.rglob("*") if p.is_dir()), reverse=True):
        if not any(folder.iterdir()):
            folder.rmdir()


def rename(site: Path, version: str, pretend: str) -> None:
    """Another version number, in the package's metadata and nowhere else."""
    info = site / f"profinferd-{version}.dist-info"
    metadata = info / "METADATA"
    metadata.write_text(re.sub(r"(?m)^Version: .*$", f"Version: {pretend}", metadata.read_text(), count=1))
    info.rename(site / f"profinferd-{pretend}.dist-info")


def place_files(tree: Path, site: Path) -> None:
    """Everything beside the Python packages."""
    deploy = ROOT / "deploy"
    copies = {
        deploy / "deb/launcher": "usr/bin/profinferd",
        deploy / "profinferd.yaml": "etc/profinferd/profinferd.yaml",
        deploy / "systemd/profinferd.service": "usr/lib/systemd/system/profinferd.service",
        deploy / "systemd/profinferd.sysusers": "usr/lib/sysusers.d/profinferd.conf",
        deploy / "systemd/profinferd.tmpfiles": "usr/lib/tmpfiles.d/profinferd.conf",
        deploy / "deb/lintian-overrides": "usr/share/lintian/overrides/profinferd",
        ROOT / "README.md": "usr/share/doc/profinferd/README.md",
    }
    for folder in ("grafana", "prometheus"):
        for file in sorted((deploy / folder).glob("*")):
            copies[file] = f"usr/share/profinferd/{folder}/{file.name}"
    for source, target in copies.items():
        place = tree / target
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, place)
    (tree / "usr/bin/profinferd").chmod(0o755)
    (tree / "usr/share/doc/profinferd/copyright").write_text(licences())
    if (deploy / "manual.py").exists():
        subprocess.run(
            [sys.executable, str(deploy / "manual.py"), "--root", str(tree)],
            check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip


def licences() -> str:
    """The file copyright; it ends with the text of the one licence that Debian has no copy of."""
    lines = (ROOT / "LICENSES/BSD-3-Clause.txt").read_text().splitlines()
    return (HERE / "copyright").read_text() + "".join(f" {line.strip() or '.'}\n" for line in lines)


def changelog(tree: Path, debian: str) -> None:
    when = subprocess.run(
        ["date", "-u", "-R", "-d", f"@{commit_time()}"], check=True, capture_output=True, text=True
    ).stdout.strip()
    maintainer = re.search(r"(?m)^Maintainer: (.*)$", (HERE / "control.in").read_text())
    text = (
        f"profinferd ({debian}) unstable; urgency=medium\n\n  * Built from its source; CHANGELOG.md says "
        f"what changed.\n\n -- {maintainer[1] if maintainer else ''}  {when}\n"
    )
    folder = tree / "usr/share/doc/profinferd"
    (folder / "changelog.Debian.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    changes = (ROOT / "CHANGELOG.md").read_bytes()
    (folder / "changelog.gz").write_bytes(gzip.compress(changes, 9, mtime=0))


def control(tree: Path, debian: str, architecture: str, suite: str) -> None:
    folder = tree / "DEBIAN"
    folder.mkdir()
    python = lock.PYTHONS[suite]
    major, minor = python.split(".")
    size = sum((f.stat().st_size + 1023) // 1024 for f in tree.rglob("*") if f.is_file())
    text = (HERE / "control.in").read_text().format(
        version=debian, architecture=architecture, size=size, python=python,
        next_python=f"{major}.{int(minor) + 1}", homepage="https://github.com/profinferd/profinferd",
    )  # fmt: skip
    (folder / "control").write_text(text)
    for script in ("postinst", "prerm", "postrm"):
        shutil.copyfile(HERE / script, folder / script)
        (folder / script).chmod(0o755)
    (folder / "conffiles").write_text("/etc/profinferd/profinferd.yaml\n")
    sums = []
    for file in sorted(p for p in tree.rglob("*") if p.is_file() and folder not in p.parents):
        name = str(file.relative_to(tree))
        if not name.startswith("etc/"):
            digest = output("md5sum", str(file)).split()[0]
            sums.append(f"{digest}  {name}")
    (folder / "md5sums").write_text("\n".join(sums) + "\n")


def normalise(tree: Path, epoch: int) -> None:
    """One owner, plain modes, one time: what the package holds does not depend on who built it."""
    for path in [tree, *tree.rglob("*")]:
        if path.is_symlink():
            continue
        executable = path.is_dir() or (path.stat().st_mode & 0o111 and _runs(path, tree))
        path.chmod(0o755 if executable else 0o644)
        os.utime(path, (epoch, epoch))


def _runs(path: Path, tree: Path) -> bool:
    name = str(path.relative_to(tree))
    return name.startswith(("usr/bin/", "DEBIAN/"))


if __name__ == "__main__":
    sys.exit(main())
