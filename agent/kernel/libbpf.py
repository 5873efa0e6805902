# SPDX-License-Identifier: Apache-2.0
"""BPF objects, loaded with the system's libbpf (1.0 and later) through ctypes.

Options are set as read-only data before loading. What differs between kernels is which
programs and objects are loaded, and how their programs are typed: a uprobe program has no
type of its own in libbpf 1.1 (section ``uprobe.multi`` is unknown there), so callers say it
with :meth:`Program.as_uprobe`.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import mmap
import os
import re
from collections.abc import Callable, Collection
from types import TracebackType

from ..errors import MachineError
from . import bpfsys, reasons
from .btf import Types
from .maps import Map

_LOG_BYTES = 4 << 20  # untouched pages cost nothing: the kernel writes here only when a load fails
_PRINT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


class _OpenOptions(ctypes.Structure):
    """struct bpf_object_open_opts of libbpf 1.0 and later (grows at its end)."""

    _fields_ = [
        ("sz", ctypes.c_size_t),
        ("object_name", ctypes.c_char_p),
        ("relaxed_maps", ctypes.c_bool),
        ("pin_root_path", ctypes.c_char_p),
        ("unused", ctypes.c_uint32),
        ("kconfig", ctypes.c_char_p),
        ("btf_custom_path", ctypes.c_char_p),
        ("kernel_log_buf", ctypes.c_void_p),
        ("kernel_log_size", ctypes.c_size_t),
        ("kernel_log_level", ctypes.c_uint32),
    ]


class LoadError(MachineError):
    """An object that the kernel refused.

    ``program`` is the program it stopped at (None: a map, BTF, or the object itself),
    ``log`` what the verifier or libbpf said, in full.
    """

    def __init__(self, what: str, remedy: str, program: str | None, log: str) -> None:
        super().__init__(what, remedy)
        self.program = program
        self.log = log


# libbpf's print hook is one per process and has no user data.
_said: collections.deque[str] = collections.deque(maxlen=100)
_kept: list[object] = []


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        lib = ctypes.CDLL("libbpf.so.1", use_errno=True)
    except OSError as error:
        raise MachineError(f"libbpf.so.1 cannot be opened ({error})", "apt install libbpf1") from error
    pointer, text, number = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int
    size = ctypes.c_size_t
    for name, result, *arguments in (
        ("bpf_object__open_file", pointer, text, ctypes.POINTER(_OpenOptions)),
        ("bpf_object__load", number, pointer),
        ("bpf_object__close", None, pointer),
        ("bpf_object__btf", pointer, pointer),
        ("btf__raw_data", pointer, pointer, ctypes.POINTER(ctypes.c_uint32)),
        ("bpf_object__next_program", pointer, pointer, pointer),
        ("bpf_object__find_map_by_name", pointer, pointer, text),
        ("bpf_program__name", text, pointer),
        ("bpf_program__section_name", text, pointer),
        ("bpf_program__fd", number, pointer),
        ("bpf_program__set_autoload", number, pointer, ctypes.c_bool),
        ("bpf_program__set_type", number, pointer, number),
        ("bpf_program__set_expected_attach_type", number, pointer, number),
        ("bpf_program__flags", ctypes.c_uint32, pointer),
        ("bpf_program__set_flags", number, pointer, ctypes.c_uint32),
        ("bpf_map__fd", number, pointer),
        ("bpf_map__type", number, pointer),
        ("bpf_map__key_size", ctypes.c_uint32, pointer),
        ("bpf_map__value_size", ctypes.c_uint32, pointer),
        ("bpf_map__max_entries", ctypes.c_uint32, pointer),
        ("bpf_map__set_max_entries", number, pointer, ctypes.c_uint32),
        ("bpf_map__map_flags", ctypes.c_uint32, pointer),
        ("bpf_map__initial_value", pointer, pointer, ctypes.POINTER(size)),
        ("bpf_map__reuse_fd", number, pointer, number),
        ("libbpf_set_print", pointer, _PRINT),
    ):  # fmt: skip
        try:
            function = getattr(lib, name)
        except AttributeError as error:
            raise MachineError(f"libbpf.so.1 has no {name}", "install libbpf 1.0 or later") from error
        function.restype, function.argtypes = result, arguments
    libc = ctypes.CDLL(None)
    libc.vsnprintf.argtypes = [pointer, size, text, pointer]

    def hear(level: int, form: bytes, arguments: int) -> int:
        # The va_list is passed by reference on both architectures, so it can be handed on.
        if level < 2:  # not debug
            line = ctypes.create_string_buffer(1024)
            libc.vsnprintf(line, len(line), form, arguments)
            _said.append(line.value.decode(errors="replace"))
        return 0

    # libbpf keeps the pointer, so the closure must live as long as the library.
    _kept.append(_PRINT(hear))
    lib.libbpf_set_print(_kept[0])
    return lib


def require() -> None:
    """Raise MachineError when the system has no usable libbpf."""
    _library()


class Program:
    """One program of an object; to be configured before the object is loaded."""

    def __init__(self, lib: ctypes.CDLL, handle: int) -> None:
        self._lib, self._handle = lib, handle
        self.name: str = lib.bpf_program__name(handle).decode()
        self.section: str = lib.bpf_program__section_name(handle).decode()

    def set_autoload(self, wanted: bool) -> None:
        """Whether loading the object loads this program."""
        self._set("autoload", self._lib.bpf_program__set_autoload(self._handle, wanted))

    def as_uprobe(self, method: str, *, sleepable: bool | None = None) -> None:
        """Make this a uprobe program for ``multi``, ``session`` or ``perf`` links.

        ``sleepable`` None keeps what the section says (``uprobe.s``).
        """
        attach_type = {
            "perf": 0,
            "multi": bpfsys.ATTACH_UPROBE_MULTI,
            "session": bpfsys.ATTACH_UPROBE_SESSION,
        }[method]
        self._set("type", self._lib.bpf_program__set_type(self._handle, bpfsys.PROG_KPROBE))
        self._set("attach type", self._lib.bpf_program__set_expected_attach_type(self._handle, attach_type))
        if sleepable is not None:
            flags = self._lib.bpf_program__flags(self._handle) & ~bpfsys.PROG_SLEEPABLE
            flags |= bpfsys.PROG_SLEEPABLE if sleepable else 0
            self._set("flags", self._lib.bpf_program__set_flags(self._handle, flags))

    @property
    def fd(self) -> int:
        """The loaded program's descriptor; it belongs to the object."""
        fd = int(self._lib.bpf_program__fd(self._handle))
        if fd < 0:
            raise LookupError(f"program {self.name} is not loaded")
        return fd

    def info(self) -> bpfsys.ProgramInfo:
        """The kernel's counters of this program."""
        return bpfsys.program_info(self.fd)

    def _set(self, what: str, result: int) -> None:
        if result:
            raise MachineError(f"libbpf cannot set the {what} of {self.name}: {bpfsys.strerror(-result)}")


class BpfObject:
    """A BPF object file: open, configure, load, and close (which unloads everything).

    Links keep their programs and maps alive in the kernel by themselves; close them first.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, btf_path: str | os.PathLike[str] | None = None
    ) -> None:
        """Open ``path``; ``btf_path`` names a file with the kernel's BTF when it has none itself."""
        self._lib = _library()
        self.path = os.fspath(path)
        self._handle: int | None = None
        # Fresh pages: a buffer of ctypes would be filled with zeros, and so be in our memory.
        self._log = (ctypes.c_char * _LOG_BYTES).from_buffer(mmap.mmap(-1, _LOG_BYTES))
        if btf_path is not None and not os.access(btf_path, os.R_OK):
            raise MachineError(f"{os.fspath(btf_path)} cannot be read", "give a BTF file with --btf-path")
        options = _OpenOptions(
            sz=ctypes.sizeof(_OpenOptions),
            btf_custom_path=os.fsencode(btf_path) if btf_path is not None else None,
            kernel_log_buf=ctypes.addressof(self._log),
            kernel_log_size=_LOG_BYTES,
        )
        _said.clear()
        self._handle = self._lib.bpf_object__open_file(os.fsencode(self.path), ctypes.byref(options))
        if not self._handle:
            number = ctypes.get_errno()
            said = " ".join(_said)
            raise LoadError(
                f"{self.path} cannot be opened as a BPF object: {said or bpfsys.strerror(number)}",
                "build it with `make setup`, or reinstall profinferd", None, said,
            )  # fmt: skip
        self._programs = {p.name: p for p in map(self._program, self._walk("bpf_object__next_program"))}

    def _program(self, handle: int) -> Program:
        return Program(self._lib, handle)

    def _walk(self, function: str) -> list[int]:
        found: list[int] = []
        handle = getattr(self._lib, function)(self._handle, None)
        while handle:
            found.append(handle)
            handle = getattr(self._lib, function)(self._handle, handle)
        return found

    # ---- before loading -----------------------------------------------------------------

    @property
    def programs(self) -> dict[str, Program]:
        """The programs by name."""
        return self._programs

    def load_only(self, names: Collection[str]) -> None:
        """Load exactly the programs ``names``."""
        if unknown := set(names) - set(self._programs):
            raise LookupError(f"no program {', '.join(sorted(unknown))} in {self.path}")
        for program in self._programs.values():
            program.set_autoload(program.name in names)

    def types(self) -> Types:
        """The object's BTF (offsets of variables are right in this one)."""
        size = ctypes.c_uint32()
        btf = self._lib.bpf_object__btf(self._handle)
        if not btf:
            raise MachineError(f"{self.path} holds no BTF", "build it with `make setup`")
        return Types(ctypes.string_at(self._lib.btf__raw_data(btf, ctypes.byref(size)), size.value))

    def set_rodata(self, name: str, value: int | bytes) -> None:
        """Set the ``const volatile`` variable ``name``; bytes must have its very size."""
        variable = self.types().variables().get(name)
        if variable is None or not variable.section.startswith(".rodata"):
            raise LookupError(f"no read-only variable {name} in {self.path}")
        raw = value
        if isinstance(raw, int):
            raw = raw.to_bytes(variable.size, "little", signed=raw < 0)
        if len(raw) != variable.size:
            raise ValueError(f"{name} has {variable.size} bytes, not {len(raw)}")
        size = ctypes.c_size_t()
        base = self._lib.bpf_map__initial_value(self._map(variable.section), ctypes.byref(size))
        if not base or variable.offset + variable.size > size.value:
            raise LookupError(f"{variable.section} of {self.path} has no value to set")
        ctypes.memmove(base + variable.offset, raw, len(raw))

    def set_max_entries(self, name: str, entries: int) -> None:
        """Set a map's size before loading (a ring's in bytes: a power of two, whole pages)."""
        result = self._lib.bpf_map__set_max_entries(self._map(name), entries)
        if result:
            raise ValueError(f"map {name} cannot have {entries} entries: {bpfsys.strerror(-result)}")

    def share_map(self, name: str, fd: int) -> None:
        """Before loading: let map ``name`` be the loaded one ``fd``, of another object."""
        result = self._lib.bpf_map__reuse_fd(self._map(name), fd)
        if result:
            raise MachineError(f"map {name} cannot be shared: {bpfsys.strerror(-result)}")

    # ---- loading and after --------------------------------------------------------------

    def load(self) -> None:
        """Load maps and programs into the kernel; raises :class:`LoadError`."""
        _said.clear()
        result = self._lib.bpf_object__load(self._handle)
        if not result:
            return
        said = "".join(_said)
        log = self._log.value.decode(errors="replace")
        stopped = re.search(r"prog '([^']*)': (?:BPF program load failed|failed to)", said)
        program = stopped[1] if stopped else None
        what = (
            f"program {program} of {os.path.basename(self.path)}" if program else os.path.basename(self.path)
        )
        if "valid kernel BTF" in said or "vmlinux BTF" in said:
            raise LoadError(
                f"cannot load {what}: this kernel has no BTF (CONFIG_DEBUG_INFO_BTF)",
                "give a BTF file made for this kernel with --btf-path", program, said,
            )  # fmt: skip
        error = reasons.loading(-result, what, log or said)
        raise LoadError(error.what, error.remedy, program, log or said)

    def program_fd(self, name: str) -> int:
        """The descriptor of a loaded program."""
        return self._programs[name].fd

    def map(self, name: str) -> Map:
        """A loaded map."""
        handle, lib = self._map(name), self._lib
        return Map(
            name,
            int(lib.bpf_map__fd(handle)),
            int(lib.bpf_map__type(handle)),
            int(lib.bpf_map__key_size(handle)),
            int(lib.bpf_map__value_size(handle)),
            int(lib.bpf_map__max_entries(handle)),
            int(lib.bpf_map__map_flags(handle)),
        )

    def _map(self, name: str) -> int:
        handle = self._lib.bpf_object__find_map_by_name(self._handle, name.encode())
        if not handle:
            raise LookupError(f"no map {name} in {self.path}")
        return int(handle)

    def close(self) -> None:
        """Unload; programs live on while links hold them. May be called twice."""
        if self._handle:
            self._lib.bpf_object__close(self._handle)
            self._handle = None
            self._programs = {}

    def __enter__(self) -> BpfObject:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def load_degrading(
    path: str | os.PathLike[str],
    configure: Callable[[BpfObject], Collection[str]],
    optional: Collection[str],
    *,
    btf_path: str | os.PathLike[str] | None = None,
) -> tuple[BpfObject, dict[str, LoadError]]:
    """Load an object although the kernel may refuse some of its ``optional`` programs.

    ``configure`` sets options on the freshly opened object and returns the names of the
    programs to load. Returns the loaded object and the error of each program left out.
    An object fails as a whole in libbpf, so it is opened anew after each refusal.
    """
    left_out: dict[str, LoadError] = {}
    while True:
        loaded = BpfObject(path, btf_path=btf_path)
        try:
            loaded.load_only([name for name in configure(loaded) if name not in left_out])
            loaded.load()
            return loaded, left_out
        except LoadError as error:
            loaded.close()
            if error.program is None or error.program not in optional or error.program in left_out:
                raise
            left_out[error.program] = error
        except BaseException:
            loaded.close()
            raise


__all__ = ["BpfObject", "LoadError", "Map", "Program", "load_degrading", "require"]
