"""Compile the simulated device, once for each PyTorch, Python and state of its source."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import torch

NAME = "kedge_sim"
SOURCE = Path(__file__).parent / "cpp"
KERNEL = Path(__file__).parents[2] / "src" / "kedge" / "native" / "c"
BUILD = Path(__file__).parents[2] / "build" / "sim"
OPTIONS = [
    "-std=c++20",
    "-O1",
    "-w",
    "-fPIC",
    "-fvisibility=hidden",
    "-pthread",
    f"-DTORCH_EXTENSION_NAME={NAME}",
]


def compiler() -> str | None:
    """Return the compiler of this machine, if it has one, and headers of Python."""
    found = shutil.which(os.environ.get("CXX", "c++"))
    return found if found and Path(sysconfig.get_path("include"), "Python.h").is_file() else None


def extension() -> ModuleType:
    """Import the device's extension, compiled before if nobody has yet: PyTorch has the device from here on."""
    spec = importlib.util.spec_from_file_location(NAME, library())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def library() -> Path:
    """Return the extension's file; processes that need it at the same time compile it once."""
    files = [*SOURCE.iterdir(), KERNEL / "work.h", KERNEL / "statistics.cu", Path(__file__)]
    content = b"".join(file.read_bytes() for file in sorted(files))
    digest = hashlib.blake2b(content, digest_size=6).hexdigest()
    folder = BUILD / f"torch-{torch.__version__}-{sys.implementation.cache_tag}-{digest}"
    made = folder / f"{NAME}{sysconfig.get_config_var('EXT_SUFFIX')}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            compile_into(folder, made)
    return made


def compile_into(folder: Path, made: Path) -> None:
    """Compile all sources as one, since most of the time is taken by PyTorch's headers, and link them."""
    from torch.utils import cpp_extension  # slow to import, and of no use to other tests

    found = compiler()
    assert found is not None, "there is no C++ compiler"
    paths = [str(KERNEL), *cpp_extension.include_paths(), sysconfig.get_path("include")]
    sources = "".join(f'#include "{source}"\n' for source in sorted(SOURCE.glob("*.cpp")))
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    libraries += [f"-Wl,-rpath,{path}" for path in cpp_extension.library_paths()]
    part = made.with_suffix(f".{os.getpid()}")
    names = ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    done = subprocess.run(
        [
            found,
            *OPTIONS,
            *(f"-I{path}" for path in paths),
            "-shared",
            *("-x", "c++", "-"),
            *libraries,
            *names,
            "-o",
            str(part),
        ],
        input=sources,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the simulated device does not compile:\n{done.stderr}")
    part.replace(made)
