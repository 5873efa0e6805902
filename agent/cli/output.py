# SPDX-License-Identifier: Apache-2.0
"""Where output goes: streams that cannot raise a traceback, and private files."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import sys
from pathlib import Path

from ...exporters.text import clean
from ..errors import MachineError, UsageError


def prepare_streams() -> None:
    """Makes the three standard streams safe to use, whatever we were started with.

    A closed descriptor 0-2 would be given to the next file or BPF object opened, and
    output of any library would go there. A name that the terminal's encoding lacks is
    escaped instead of raised.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def say(text: str) -> None:
    """One line on stderr; a stderr that is gone is no reason to fail."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(clean(text, 2000) + "\n")
        sys.stderr.flush()


def write_data(text: str) -> None:
    """Data on stdout. A reader that has gone had enough: that ends the output, quietly.

    Raises MachineError where it cannot be written for another reason (disk full).
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        _silence_stdout()
    except OSError as error:
        _silence_stdout()
        raise MachineError(f"cannot write to standard output ({error.strerror})", "use -o FILE") from error


def _silence_stdout() -> None:
    # The interpreter flushes stdout once more at exit, and would complain there.
    null = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError, ValueError):
        os.dup2(null, sys.stdout.fileno())
    os.close(null)


def invoking_user() -> tuple[int, int] | None:
    """(uid, gid) of the user who called sudo; None when we are not root through sudo."""
    uid, gid = os.environ.get("SUDO_UID", ""), os.environ.get("SUDO_GID", "")
    if os.geteuid() != 0 or not (uid.isascii() and uid.isdigit() and gid.isascii() and gid.isdigit()):
        return None
    if int(uid) >= 2**32 - 1 or int(gid) >= 2**32 - 1:  # -1 means "leave as it is" to chown
        return None
    return int(uid), int(gid)


class PrivateFile:
    """A file to be written once, at the end: mode 0600, owned by the invoking user.

    Checked when made, so that a mistake shows before an hour of watching: UsageError when
    the path is a link, a folder or a device, or its folder is missing or not writable. The
    folder is held open, so that what was checked is what is written into.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        parent, self._name = os.path.split(path)
        if self._name in ("", ".", ".."):
            raise UsageError(f"-o {clean(path)!r} does not name a file", "give a file name")
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        try:
            self._folder = os.open(parent or ".", flags)
        except OSError as error:
            raise UsageError(
                f"cannot use the folder of -o {clean(path)!r} ({error.strerror})", "choose an existing folder"
            ) from error
        try:
            self._check()
        except UsageError:
            os.close(self._folder)
            raise

    def _check(self) -> None:
        if not os.access(".", os.W_OK | os.X_OK, dir_fd=self._folder):
            raise UsageError(
                f"the folder of -o {clean(self.path)!r} is not writable", "choose another folder"
            )
        try:
            found = os.stat(self._name, dir_fd=self._folder, follow_symlinks=False)
        except FileNotFoundError:
            return
        except OSError as error:
            raise UsageError(
                f"cannot use -o {clean(self.path)!r} ({error.strerror})", "choose another name"
            ) from error
        if not stat.S_ISREG(found.st_mode):
            kind = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "not a regular file"
            raise UsageError(f"-o {clean(self.path)!r} is {kind}", "give the name of a new or regular file")

    def write(self, text: str) -> None:
        """Writes all of ``text``, or leaves what was there. Raises MachineError."""
        temporary = f".{self._name[:200]}.{secrets.token_hex(6)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._check()  # it may have become a link meanwhile; rename would replace it
            fd = os.open(temporary, flags, 0o600, dir_fd=self._folder)
            try:
                self._fill(fd, text)
                os.rename(temporary, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
            except OSError:
                os.unlink(temporary, dir_fd=self._folder)
                raise
        except OSError as error:
            raise MachineError(
                f"cannot write {clean(self.path)!r} ({error.strerror})", "choose another file with -o"
            ) from error

    def _fill(self, fd: int, text: str) -> None:
        with open(fd, "w", encoding="utf-8") as file:
            os.fchmod(fd, 0o600)  # the umask may have taken even the owner's bits
            if (user := invoking_user()) is not None:
                os.fchown(fd, *user)
            file.write(text)
            file.flush()
            os.fsync(fd)

    def close(self) -> None:
        """Lets go of the folder."""
        os.close(self._folder)


def btf_file(path: str) -> str:
    """``path``, when it is a readable file of kernel type information (BTF, or an ELF file that may
    hold it); UsageError otherwise. libbpf would go on without, and what needs BTF would be missing.
    """
    head = b""
    with contextlib.suppress(OSError):
        if Path(path).is_file():
            with open(path, "rb") as file:
                head = file.read(4)
    if not head:
        raise UsageError(f"--btf-path {clean(path)!r} is not a readable file", "give the path of a file")
    if head[:2] not in (b"\x9f\xeb", b"\xeb\x9f") and head != b"\x7fELF":
        raise UsageError(f"--btf-path {clean(path)!r} is not a BTF file", "give one made for this kernel")
    return path
