"""Make the kernel that Kedge ships: `python -m tests.native.kernel` writes src/kedge/native/statistics.ptx.

NVRTC compiles it from c/statistics.cu and c/work.h, without headers of CUDA's and without a card. It is a
wheel of the extra `test`, as is the assembler that tests try the result with. For HIP the source is shipped, which
tests compile with clang and with hiprtc where these are installed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from kedge import native
from kedge.native import hip

SHIPPED = Path(native.__file__).with_name("statistics.ptx")
SOURCE = SHIPPED.parent / "c"
OPTIONS = [b"--gpu-architecture=compute_70", b"--std=c++17"]
"""Cards from Volta on run it, with drivers from CUDA 12 on, which is the release that compiles it."""

_NVRTC = "nvidia-cuda-nvrtc-cu12"
_NVCC = "nvidia-cuda-nvcc-cu12"


def missing() -> str | None:
    """Return why the kernel cannot be made here; None if it can."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return "the kernel is made on Linux x86-64"
    for package in (_NVRTC, _NVCC):
        try:
            metadata.distribution(package)
        except metadata.PackageNotFoundError:
            return f"{package} is not installed"
    return None


def made() -> bytes:
    """Return the kernel as NVRTC makes it, in a process of its own: NVRTC leaves it with another locale.

    Raises:
        RuntimeError: It does not compile.
    """
    with tempfile.TemporaryDirectory() as folder:
        kernel = Path(folder, "statistics.ptx")
        command = [sys.executable, "-m", "tests.native.kernel", kernel]
        root = Path(__file__).parents[2]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
        if done.returncode:
            raise RuntimeError(done.stderr)
        return kernel.read_bytes()


def _compiled() -> bytes:
    """Return the kernel as NVRTC makes it in this process."""
    # NVRTC looks for this one by name alone, where the loader does.
    ctypes.CDLL(str(_file(_NVRTC, "libnvrtc-builtins.so")), mode=ctypes.RTLD_GLOBAL)
    nvrtc = ctypes.CDLL(str(_file(_NVRTC, "libnvrtc.so")))
    program = ctypes.c_void_p()
    headers = (ctypes.c_char_p * 1)((SOURCE / "work.h").read_bytes())
    names = (ctypes.c_char_p * 1)(b"work.h")
    text = (SOURCE / "statistics.cu").read_bytes()
    options = (ctypes.c_char_p * len(OPTIONS))(*OPTIONS)
    if nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), text, b"statistics.cu", 1, headers, names
    ) or nvrtc.nvrtcCompileProgram(program, len(options), options):
        raise RuntimeError(_text(nvrtc, program, "ProgramLog").decode())
    return _text(nvrtc, program, "PTX")


def assembled(architecture: str) -> str:
    """Return what the assembler reports of the shipped kernel for a card.

    Raises:
        RuntimeError: It does not assemble it.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [_file(_NVCC, "ptxas"), "-v", f"-arch={architecture}", SHIPPED]
        done = subprocess.run(
            [*command, "-o", Path(folder, "kernel")], capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout + done.stderr


def _file(package: str, begins: str) -> Path:
    """Return a package's file whose name begins so."""
    for file in metadata.files(package) or ():
        if file.name.startswith(begins):
            return Path(str(file.locate()))
    raise FileNotFoundError(f"{package} has no {begins}")


def _text(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, name: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{name}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{name}")(program, text)
    return text.value


# -- for HIP ------------------------------------------------------------------------------------

_CLANGS = ("clang", *(f"clang-{release}" for release in range(30, 18, -1)))
_HIPRTC = ("libhiprtc.so", "libhiprtc.so.7", "libhiprtc.so.6", "libamdhip64.so.5")
_FOR_HIP = ("-x", "hip", "--cuda-device-only", "-nogpulib", "-nogpuinc", "-std=c++17", "-O3")


@functools.cache
def clang() -> str | None:
    """Return a clang that compiles for all cards: of release 19 or newer, with AMD's among its targets."""
    for found in filter(None, map(shutil.which, _CLANGS)):
        version = _output(found, "--version")
        release = re.search(r"clang version (\d+)", version)
        if release and int(release[1]) >= 19 and "amdgcn" in _output(found, "--print-targets"):
            return found
    return None


def assembly(architecture: str) -> str:
    """Return what clang makes of the source for a card, once it has been assembled.

    Raises:
        RuntimeError: It does not compile, or with a warning.
    """
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "kernel.s")
        for_card = [*_FOR_HIP, f"--offload-arch={architecture}", "-Wall", "-Werror", "-S"]
        machine = ["-target", "amdgcn-amd-amdhsa", f"-mcpu={architecture}", "-c"]
        for command in (
            [*for_card, SOURCE / "statistics.cu", "-o", made],
            [*machine, made, "-o", Path(folder, "kernel.o")],
        ):
            done = subprocess.run(
                [str(clang()), *command], capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise RuntimeError(done.stderr)
        return made.read_text()


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


@functools.cache
def hiprtc() -> str | None:
    """Return the name of a library with hiprtc that the loader finds."""
    for name in _HIPRTC:
        with contextlib.suppress(OSError):
            if hasattr(ctypes.CDLL(name), "hiprtcCreateProgram"):
                return name
    return None


def code_of_hiprtc(architecture: str) -> bytes:
    """Return the code object that hiprtc makes for a card, as it does for a program.

    Raises:
        DriverFailed: It does not compile.
    """
    return hip.Compiler(ctypes.CDLL(hiprtc())).compiled(architecture)


if __name__ == "__main__":
    reason = missing()
    if reason is not None:
        sys.exit(f"{reason}; pip install -c constraints.txt -e '.[test]'")
    target = Path(*sys.argv[1:2] or [SHIPPED])
    target.write_bytes(_compiled())
    print(f"{target}: {target.stat().st_size:,} bytes")  # noqa: T201
