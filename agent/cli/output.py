# SPDX-License-Identifier: Apache-2.0
"""Where output goes: streams that cannot raise a traceback, and private files."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Callable, Iterable
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


def write_data(text: str | bytes) -> None:
    """Data on stdout. A reader that has gone had enough: that ends the output, quietly.

    Raises MachineError where it cannot be written for another reason (disk full).
    """
    try:
        if isinstance(text, bytes):
            sys.stdout.buffer.write(text)
        else:
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


def _no_file(path: str) -> Callable[[bytes], None] | None:
    """What to do with data for a path that stands for no file; None for any other."""
    if path == "/dev/stdout":
        return write_data
    try:
        found = os.lstat(path)
    except (OSError, ValueError):
        return None
    is_null = stat.S_ISCHR(found.st_mode) and found.st_rdev == os.makedev(1, 3)
    return (lambda data: None) if is_null else None


def refuse_input(path: str, inputs: Iterable[str], option: str = "-o") -> None:
    """UsageError where writing ``path`` would replace one of ``inputs``, by whatever name."""
    for one in inputs:
        with contextlib.suppress(OSError, ValueError):
            if os.path.samefile(path, one):
                raise UsageError(
                    f"{option} {clean(path)!r} is the recording that is to be read", "choose another name"
                )


class PrivateFile:
    """A file to be written once, at the end: mode 0600, owned by the invoking user.

    ``option``: the one that named it, for messages.

    Checked when made, so that a mistake shows before an hour of watching: UsageError when
    the path is a link, a folder or a device, or its folder is missing or not writable. The
    folder is held open, so that what was checked is what is written into.

    Two names are no files and are taken for what people mean by them: /dev/null, and /dev/stdout.
    Other devices and pipes are refused: root could overwrite a disk, or tell a stranger.
    """

    def __init__(self, path: str, option: str = "-o") -> None:
        self.path = path
        self._option = option
        self._folder: int | None = None
        self._staged: str | None = None
        self._instead = _no_file(path)
        if self._instead is not None:
            return
        parent, self._name = os.path.split(path)
        if self._name in ("", ".", ".."):
            raise UsageError(f"{option} {clean(path)!r} does not name a file", "give a file name")
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        try:
            self._folder = os.open(parent or ".", flags)
        except OSError as error:
            raise UsageError(
                f"cannot use the folder of {option} {clean(path)!r} ({error.strerror})",
                "choose an existing folder",
            ) from error
        try:
            self._check()
        except UsageError:
            os.close(self._folder)
            raise

    def _check(self) -> None:
        if not os.access(".", os.W_OK | os.X_OK, dir_fd=self._folder):
            raise UsageError(
                f"the folder of {self._option} {clean(self.path)!r} is not writable", "choose another folder"
            )
        try:
            found = os.stat(self._name, dir_fd=self._folder, follow_symlinks=False)
        except FileNotFoundError:
            return
        except OSError as error:
            raise UsageError(
                f"cannot use {self._option} {clean(self.path)!r} ({error.strerror})", "choose another name"
            ) from error
        if not stat.S_ISREG(found.st_mode):
            kind = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "not a regular file"
            raise UsageError(
                f"{self._option} {clean(self.path)!r} is {kind}", "give the name of a new or regular file"
            )

    def write(self, text: str) -> None:
        """Writes all of ``text``, or leaves what was there. Raises MachineError."""
        self.write_pieces([text.encode()])

    def write_pieces(self, pieces: Iterable[bytes]) -> int:
        """Writes all of ``pieces`` and returns how many bytes, or leaves what was there. Raises
        MachineError, and whatever making the pieces raises."""
        size = self.stage(pieces)
        self.commit()
        return size

    def stage(self, pieces: Iterable[bytes]) -> int:
        """Like write_pieces, but beside the file until :meth:`commit`."""
        if self._instead is not None:
            size = 0
            for piece in pieces:
                size += len(piece)
                self._instead(piece)
            return size
        temporary = f".{self._name[:200]}.{os.urandom(6).hex()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(temporary, flags, 0o600, dir_fd=self._folder)
            self._staged = temporary
            return self._fill(fd, pieces)
        except OSError as error:
            self._discard()
            raise self._unwritten(error) from error
        except BaseException:
            self._discard()
            raise

    def commit(self) -> None:
        """Puts what was staged in its place. Raises MachineError."""
        if self._staged is None:
            return
        try:
            self._check()  # it may have become a link meanwhile; rename would replace it
            os.rename(self._staged, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
            self._staged = None
        except OSError as error:
            raise self._unwritten(error) from error

    def _discard(self) -> None:
        if self._staged is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._staged, dir_fd=self._folder)
            self._staged = None

    def _unwritten(self, error: OSError) -> MachineError:
        return MachineError(
            f"cannot write {clean(self.path)!r} ({error.strerror})",
            f"choose another place with {self._option}",
        )

    def _fill(self, fd: int, pieces: Iterable[bytes]) -> int:
        size = 0
        with open(fd, "wb") as file:
            os.fchmod(fd, 0o600)  # the umask may have taken even the owner's bits
            if (user := invoking_user()) is not None:
                os.fchown(fd, *user)
            for piece in pieces:
                size += file.write(piece)
            file.flush()
            os.fsync(fd)
        return size

    def close(self) -> None:
        """Lets go of the folder, and of what was staged and is not in its place."""
        self._discard()
        if self._folder is not None:
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
