"""What Transformer Engine's kernels need at run time, checked before they are called: they answer with an abort or a trap.

Reads versions of the libraries that are really loaded, not of installed packages. Imports neither jax nor Transformer Engine at import.
"""

import ctypes
import functools
import importlib.util
import os
import re
import shutil
from collections.abc import MutableMapping
from pathlib import Path

from maxtext_moe_te.errors import RefusedError, VersionError
from maxtext_moe_te.moe import te_api

CUBLAS_FLOOR = {9: 130400, 10: 130300}  # by major compute capability: the first cuBLAS with a graph-safe grouped GEMM there
CUBLAS_BAD = range(130700, 130801)  # Transformer Engine 2.20.2 warns of data corruption in 13.7.0 to 13.8.0
NCCL_FLOOR = 23203  # what the NCCL EP beside Transformer Engine 2.20.2 was built with; it refuses any older one


@functools.cache
def cublaslt_version() -> int:
  """Version of the cuBLASLt this process uses, as cublasLtGetVersion gives it (13.10.0 is 131000).

  Raises:
    VersionError: there is none.
  """
  library = _load("libcublasLt.so.13", "cuBLAS 13", "pip install 'nvidia-cublas>=13.4,!=13.7.*,!=13.8.0.*'")
  library.cublasLtGetVersion.restype = ctypes.c_size_t
  return int(library.cublasLtGetVersion())


@functools.cache
def nccl_version() -> int:
  """Version of the NCCL this process uses, as ncclGetVersion gives it (2.32.3 is 23203).

  Raises:
    VersionError: there is none.
  """
  library = _load("libnccl.so.2", "NCCL 2", "pip install 'nvidia-nccl-cu13>=2.32.3'")
  version = ctypes.c_int()
  library.ncclGetVersion(ctypes.byref(version))
  return version.value


def _load(name, what, install):
  try:
    return ctypes.CDLL(name)
  except OSError as error:
    raise VersionError(found=f"{name} cannot be loaded ({error})", needed=f"{what} on the loader's path", fix=install) from error


def dotted(version: int) -> str:
  """131000 -> 13.10.0; 23203 -> 2.32.3."""
  major, rest = divmod(version, 10000)
  return f"{major}.{rest // 100}.{rest % 100}"


def check_grouped_gemm(compute_capability: str, cublas: int | None = None) -> None:
  """Whether the graph-safe bfloat16 grouped GEMM runs on this GPU with this process's cuBLAS.

  Args:
    compute_capability: as jax gives it, "9.0".
    cublas: the version; None for that of this process.

  Raises:
    RefusedError: the GPU is too old or of a kind the kernel does not serve.
    VersionError: cuBLAS is too old, or one known to compute wrong results.
  """
  major = int(compute_capability.split(".")[0])
  if major not in (9, 10, 11):
    raise RefusedError(
      found=f"a GPU of compute capability {compute_capability}",
      needed="Hopper (9.0) or data-centre Blackwell (10.x, 11.x) for Transformer Engine's grouped GEMM",
      fix="set moe_te.experts=ragged_dot",
    )
  found, floor = cublas or cublaslt_version(), CUBLAS_FLOOR.get(major, CUBLAS_FLOOR[10])
  if found < floor or found in CUBLAS_BAD:
    raise VersionError(
      found=f"cuBLAS {dotted(found)} at run time",
      needed=f"{dotted(floor)} or newer for this GPU, but not 13.7.0 to 13.8.0",
      fix="put a newer libcublasLt.so.13 first in LD_LIBRARY_PATH (pip install 'nvidia-cublas>=13.8.1')",
    )


def check_mxfp8(compute_capability: str) -> None:
  """Whether MXFP8 runs on this GPU.

  Raises:
    RefusedError: it does not.
  """
  if int(compute_capability.split(".")[0]) < 10:
    raise RefusedError(
      found=f"moe_te.recipe=mxfp8 on a GPU of compute capability {compute_capability}",
      needed="Blackwell (10.0) or newer",
      fix="set moe_te.recipe=bf16",
    )


def makes_empty_constants() -> bool:
  """Whether `grouped_dense` of the installed Transformer Engine makes zero-element constants: it does, unless patched (patches/)."""
  found = importlib.util.find_spec("transformer_engine")
  gemm = Path(next(iter(found.submodule_search_locations)), "jax/cpp_extensions/gemm.py") if found else None
  return gemm is None or not gemm.is_file() or "def _no_elements(" not in gemm.read_text(encoding="utf-8")


def prepare_nccl_ep() -> None:
  """Finds what NCCL EP needs to compile its kernels at run time, and tells it through its own environment variables.

  Raises:
    VersionError: NCCL is too old, or its headers are of another version.
    RefusedError: there is no CUDA compiler or no host compiler.
  """
  found = nccl_version()
  engine = te_api.find()
  check_nccl(found, engine and engine.nccl_floor)
  nvcc = _nvcc()
  if nvcc is None:
    raise RefusedError(
      found="no nvcc",
      needed="a CUDA compiler: NCCL EP compiles its kernels at the first start",
      fix="pip install nvidia-cuda-nvcc, or set CUDA_HOME, or set moe_te.transport=xla",
    )
  os.environ.setdefault("NCCL_EP_JIT_NVCC", str(nvcc))
  if shutil.which("g++") is None:
    raise RefusedError(
      found="no g++",
      needed="a host compiler: NCCL EP compiles its kernels at the first start",
      fix="install g++, or set moe_te.transport=xla",
    )
  headers = _nccl_headers(found)
  if headers is None:
    raise VersionError(
      found=f"no NCCL headers of version {dotted(found)}",
      needed="the headers of the NCCL that is loaded",
      fix=f"set NCCL_HOME to a folder with include/nccl.h of {dotted(found)}, or set moe_te.transport=xla",
    )
  os.environ.setdefault("NCCL_EP_JIT_BUILD_INCLUDE_DIR", str(headers))


def prefer_pip_cudnn(environment: MutableMapping[str, str]) -> Path | None:
  """Points Transformer Engine at the cuDNN that pip installed beside JAX, where there is one; returns its folder if it did.

  JAX loads that one. Transformer Engine looks for a `libcudnn.so` of the system first, and two versions in one process fail on each
  other's sub-libraries (CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED), after which its attention runs unfused and says nothing.
  """
  folder = next((root / "cudnn" for root in _pip_roots() if (root / "cudnn/lib/libcudnn.so.9").exists()), None)
  if folder is None or "CUDNN_HOME" in environment or "CUDNN_PATH" in environment:
    return None
  environment["CUDNN_HOME"] = str(folder)
  return folder


def check_nccl(found: int, floor: int | None = None) -> None:
  """Whether NCCL EP takes this NCCL.

  Args:
    found: its version.
    floor: the oldest that it takes, where Transformer Engine says so; None for that of the NCCL EP in 2.20.2's wheels.

  Raises:
    VersionError: it does not.
  """
  floor = floor or NCCL_FLOOR
  if found < floor:
    raise VersionError(
      found=f"NCCL {dotted(found)} at run time",
      needed=f"{dotted(floor)} or newer for NCCL EP",
      fix=f"pip install 'nvidia-nccl-cu13>={dotted(floor)}' and put it first in LD_LIBRARY_PATH, or set moe_te.transport=xla",
    )


def _nvcc() -> Path | None:
  """In the order NCCL EP looks itself, then where pip puts it."""
  candidates = [os.environ.get(name) for name in ("NCCL_EP_JIT_NVCC", "NVCC")]
  candidates += [f"{os.environ[name]}/bin/nvcc" for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
  candidates += [shutil.which("nvcc"), *(root / "cu13/bin/nvcc" for root in _pip_roots())]
  return next((Path(path) for path in candidates if path and os.access(path, os.X_OK)), None)


def _nccl_headers(version: int) -> Path | None:
  """A folder whose nccl.h is of this version."""
  candidates = [os.environ.get("NCCL_EP_JIT_BUILD_INCLUDE_DIR")]
  candidates += [f"{os.environ[name]}/include" for name in ("NCCL_HOME",) if name in os.environ]
  candidates += [*(root / "nccl/include" for root in _pip_roots()), "/usr/include", "/usr/local/include"]
  return next((Path(path) for path in candidates if path and header_version(Path(path)) == version), None)


def header_version(folder: Path) -> int | None:
  """NCCL_VERSION_CODE of folder/nccl.h, or None."""
  header = folder / "nccl.h"
  if not header.is_file():
    return None
  numbers = {
    name: int(value) for name, value in re.findall(r"#define\s+NCCL_(MAJOR|MINOR|PATCH)\s+(\d+)", header.read_text(errors="replace"))
  }
  if len(numbers) < 3:
    return None
  return numbers["MAJOR"] * 10000 + numbers["MINOR"] * 100 + numbers["PATCH"]


def _pip_roots() -> list[Path]:
  """Folders where pip puts NVIDIA's libraries."""
  import importlib.util

  spec = importlib.util.find_spec("nvidia")
  return [Path(path) for path in (spec.submodule_search_locations or ())] if spec else []
