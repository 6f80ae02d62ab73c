"""Transformer Engine on a machine without a GPU: a stub driver, the pip-installed CUDA libraries, and GPUs that are only described.

The descriptions are XLA's own target configurations, which the CUDA plugin carries for its tests.
"""

import importlib.util
import mmap
import os
import pathlib
import re
import subprocess

STUB = r"""
#include <stddef.h>
typedef int CUresult;
#define NO_DEVICE 100
#define S(n) CUresult n(void) { return NO_DEVICE; }
S(cuInit) S(cuCtxGetCurrent) S(cuFuncSetAttribute) S(cuLaunchKernel) S(cuLaunchKernelEx) S(cuModuleGetFunction)
S(cuModuleLoadData) S(cuModuleLoadDataEx) S(cuModuleUnload) S(cuTensorMapEncodeIm2col) S(cuTensorMapEncodeTiled)
CUresult cuGetErrorString(CUresult e, const char **s) { if (s) *s = "no CUDA-capable device (stub)"; return 0; }
CUresult cuGetErrorName(CUresult e, const char **s) { if (s) *s = "CUDA_ERROR_NO_DEVICE"; return 0; }
CUresult cuDriverGetVersion(int *v) { if (v) *v = 13050; return 0; }
CUresult cuDeviceGetCount(int *n) { if (n) *n = 0; return NO_DEVICE; }
"""


def environment(folder: pathlib.Path) -> dict[str, str]:
  """The environment for a process that imports Transformer Engine here; builds the stub driver in `folder`.

  Args:
    folder: for the stub.
  """
  source = folder / "stub.c"
  source.write_text(STUB)
  library = folder / "libcuda.so.1"
  subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, source], check=True)
  roots = [pathlib.Path(p) for p in importlib.util.find_spec("nvidia").submodule_search_locations]
  libraries = [str(folder), *(str(root / part / "lib") for root in roots for part in ("cu13", "cudnn", "nccl"))]
  return {
      **os.environ,
      "LD_LIBRARY_PATH": ":".join(libraries),
      "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
      "JAX_PLATFORMS": "",
      "XLA_FLAGS": "",
      "DECOUPLE_GCLOUD": "TRUE",
  }


def target(name: str) -> str:
  """XLA's target configuration of the GPU whose description contains `name`, as text."""
  plugin = pathlib.Path(next(iter(importlib.util.find_spec("jax_plugins.xla_cuda13").submodule_search_locations)))
  with open(plugin / "xla_cuda_plugin.so", "rb") as file:
    binary = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    known = set()
    for match in re.finditer(rb'device_description_str: "([^"]+)"', binary):
      start, end = binary.rfind(b"\0", 0, match.start()) + 1, binary.find(b"\0", match.start())
      text = binary[start:end].decode("latin1")
      if text.lstrip().startswith(("#", "gpu_device_info")) and len(text) < 20000:
        known.add(match.group(1).decode())
        if name in match.group(1).decode():
          return text
  raise LookupError(f"no GPU called {name}, only {sorted(known)}")


def devices(name: str, count: int):
  """`count` described GPUs, one per process; Transformer Engine is told their compute capability.

  Returns:
    (devices, compute capability as an int, 90 or 100)
  """
  import sys

  import transformer_engine.jax  # noqa: F401
  import transformer_engine_jax
  from jax.experimental import topologies

  text = target(name)
  found = re.search(r"compute_capability \{\s*major: (\d+)(?:\s*minor: (\d+))?", text)
  capability = int(found[1]) * 10 + int(found[2] or 0)
  pretend = lambda device=0: capability
  transformer_engine_jax.get_device_compute_capability = pretend
  sys.modules["transformer_engine.jax.cpp_extensions.gemm"].get_device_compute_capability = pretend
  topology = topologies.get_topology_desc(
      topology_name="described", platform="cuda", target_config=text, topology=f"1x{count}x1"
  )
  return topology.devices, capability
