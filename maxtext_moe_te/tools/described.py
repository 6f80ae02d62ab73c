"""GPUs that are only described: what compiling for them takes on a machine without one, with or without Transformer Engine.

The descriptions are XLA's own target configurations, which the CUDA plugin carries for its tests. Imports neither jax nor
Transformer Engine until `devices` is called, in a process that was started with `environment`.
"""

import importlib.util
import mmap
import os
import pathlib
import re
import shutil
import subprocess
import sys

from maxtext_moe_te.errors import OptionError, RefusedError, nearest
from maxtext_moe_te.moe import te_api
from maxtext_moe_te.settings.variable import VARIABLE

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

# What asks a GPU while XLA compiles: choosing kernels by time, and CUB's scratch space for each shape that XLA's table does not have.
COMPILER_OPTIONS = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_cub_radix_sort": False}


def environment(folder: pathlib.Path) -> dict[str, str]:
  """The environment for a process that compiles for described GPUs.

  Args:
    folder: for a stub of the CUDA driver, built only where there is none.

  Raises:
    RefusedError: Transformer Engine is installed, and there is neither a driver nor a compiler for the stub.
  """
  found = importlib.util.find_spec("nvidia")
  roots = [pathlib.Path(path) for path in (found.submodule_search_locations if found else ())]
  libraries = [str(root / part / "lib") for root in roots for part in ("cu13", "cudnn", "nccl") if (root / part / "lib").is_dir()]
  if te_api.find() and not has_driver():
    libraries.insert(0, str(_stub(folder)))
  return {
    **os.environ,
    "LD_LIBRARY_PATH": ":".join([*libraries, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]),
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "",
    "DECOUPLE_GCLOUD": "TRUE",
    VARIABLE: "",  # who asks names the overlay
  }


def engine() -> te_api.Api | None:
  """Transformer Engine, if there is one that can be told that there are GPUs."""
  found = te_api.find()
  return found if found and not found.problem("described") else None


def has_driver() -> bool:
  """Whether the loader finds the CUDA driver's library."""
  command = [sys.executable, "-c", "import ctypes; ctypes.CDLL('libcuda.so.1')"]
  return subprocess.run(command, capture_output=True).returncode == 0


def _stub(folder):
  """Builds libcuda.so.1 in `folder`: Transformer Engine's library is linked against it and only asks it for devices."""
  compiler = shutil.which("gcc") or shutil.which("cc")
  if compiler is None:
    raise RefusedError(
      found="no CUDA driver, and no C compiler for a stand-in",
      needed="one of them: Transformer Engine's library is linked against libcuda.so.1",
      fix="install gcc",
    )
  source = folder / "stub.c"
  source.write_text(STUB)
  command = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", folder / "libcuda.so.1", source]
  subprocess.run(command, check=True, capture_output=True)
  return folder


def targets() -> dict[str, str]:
  """XLA's target configurations as texts, by the device's description, such as "NVIDIA H200".

  Raises:
    RefusedError: there is no CUDA plugin, or one without them.
  """
  found = None
  if importlib.util.find_spec("jax_plugins"):
    found = importlib.util.find_spec("jax_plugins.xla_cuda13")
  if found is None:
    raise RefusedError(
      found="no CUDA 13 plugin of JAX is installed",
      needed="its compiler and its descriptions of GPUs; no GPU is needed",
      fix="pip install 'jax[cuda13]'",
    )
  plugin = pathlib.Path(next(iter(found.submodule_search_locations))) / "xla_cuda_plugin.so"
  if not plugin.exists():
    raise RefusedError(found=f"no {plugin}", needed="the CUDA plugin whole", fix="pip install --force-reinstall 'jax[cuda13]'")
  known = {}
  with open(plugin, "rb") as file:
    binary = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    for match in re.finditer(rb'device_description_str: "([^"]+)"', binary):
      start, end = binary.rfind(b"\0", 0, match.start()) + 1, binary.find(b"\0", match.start())
      text = binary[start:end].decode("latin1")
      if text.lstrip().startswith(("#", "gpu_device_info")) and len(text) < 20000 and "MIG" not in match.group(1).decode():
        known.setdefault(match.group(1).decode(), text)
  if not known:
    raise RefusedError(
      found=f"no descriptions of GPUs in {plugin}",
      needed="those that JAX's CUDA plugin carries from 0.12 on",
      fix="pip install 'jax[cuda13]>=0.12', in an environment of its own if the job must keep this one",
    )
  return known


def target(name: str) -> str:
  """The target configuration of the GPU whose description contains `name`, such as H200 or GB200.

  Raises:
    OptionError: there is none.
  """
  known = targets()
  # "B200" is part of "NVIDIA GB200": a whole word first.
  for contains in (lambda text: name.lower() in text.lower().split(), lambda text: name.lower() in text.lower()):
    for description, text in known.items():
      if contains(description):
        return text
  words = sorted({word for text in known for word in text.split()})
  raise OptionError(
    found=f"no GPU called {name}",
    needed=f"a part of one of: {', '.join(sorted(known))}",
    fix=f"write {nearest(name, words) or 'H200'}",
  )


def memory_bytes(text: str) -> int:
  """Device memory in a target configuration."""
  return int(re.search(r"device_memory_size: (\d+)", text)[1])


def capability(text: str) -> int:
  """Compute capability in a target configuration, 90 for 9.0."""
  found = re.search(r"compute_capability \{\s*major: (\d+)(?:\s*minor: (\d+))?", text)
  return int(found[1]) * 10 + int(found[2] or 0)


def devices(name: str, topology: str):
  """Described GPUs; Transformer Engine, where installed, is told their compute capability.

  Args:
    name: see `target`.
    topology: NVLink domains x processes per domain x GPUs per process, such as "2x4x1".

  Returns:
    (devices, compute capability as an int, 90 or 100)
  """
  from jax._src.pallas.triton import gpu_info
  from jax.experimental import topologies

  text = target(name)
  # Where it looks up which GPU to write a kernel for, the process's own device, a CPU, answers.
  gpu_info.registry["cpu"] = lambda: gpu_info.GpuInfo(gpu_version=None, arch_name="described", compute_capability=capability(text))
  if engine():
    import transformer_engine.jax  # noqa: F401
    import transformer_engine_jax

    pretend = lambda device=0: capability(text)
    transformer_engine_jax.get_device_compute_capability = pretend
    sys.modules["transformer_engine.jax.cpp_extensions.gemm"].get_device_compute_capability = pretend
  described = topologies.get_topology_desc(topology_name="described", platform="cuda", target_config=text, topology=topology)
  return described.devices, capability(text)


def pretend_group(group, outer: int) -> None:
  """What `nccl_ep.bootstrap` tells Transformer Engine, without a communicator.

  Args:
    group: a `moe.transport.nccl_ep.Bootstrap`.
    outer: number of such groups.
  """
  import jax.numpy as jnp
  import transformer_engine.jax.cpp_extensions as tex
  import transformer_engine_jax
  from transformer_engine.jax.cpp_extensions.misc import jax_dtype_to_te_dtype

  rows, tokens, local = group.capacity, group.max_tokens_per_rank, group.num_experts // group.ranks
  # Any plausible size will do: the buffer is only allocated. The communicator must be one that is borrowed later: others are made at once.
  transformer_engine_jax.ep_handle_mem_size = lambda k, alignment: rows * local + 8 * rows * k + 4 * tokens * group.num_experts
  transformer_engine_jax.set_ep_bootstrap_params(
    bytes(128), group.ranks, 0, group.num_experts, tokens, rows, group.width, max_num_sms=0,
    max_token_dtype=int(jax_dtype_to_te_dtype(jnp.dtype(jnp.bfloat16))), drop_on_overflow=False, borrowed_comm=True,
  )  # fmt: skip
  tex.ep.set_ep_config(
    tex.ep.EpConfig(
      world_size=group.ranks * outer, rank=0, ep_size=group.ranks, num_ep_groups=outer, num_experts=group.num_experts,
      num_local_experts=local, max_tokens_per_rank=tokens, recv_capacity_per_rank=rows, hidden_dim=group.width,
    )
  )  # fmt: skip


def pretend_expert_parallel() -> None:
  """NCCL EP groups without ranks: from here on a bootstrap only records what it is for."""
  from maxtext_moe_te.moe import te_runtime
  from maxtext_moe_te.moe.transport import nccl_ep

  def bootstrap(group, mesh, expert_axis):
    group.check()
    pretend_group(group, mesh.devices.size // mesh.shape[expert_axis])
    nccl_ep._bootstrapped = group

  nccl_ep.bootstrap = bootstrap
  nccl_ep.check_local_devices = lambda: None
  te_runtime.prepare_nccl_ep = lambda: None


ATTENTION_WORKSPACE_BYTES = 64 * 2**20  # invented: only a GPU can say what cuDNN wants


def pretend_fused_attention() -> None:
  """Transformer Engine's fused attention without a GPU to ask; its workspace is `ATTENTION_WORKSPACE_BYTES`."""
  import transformer_engine_jax

  backends, dtypes = transformer_engine_jax.NVTE_Fused_Attn_Backend, transformer_engine_jax.DType
  transformer_engine_jax.get_fused_attn_backend = lambda *args: (backends.NVTE_F16_arbitrary_seqlen, "")
  workspace = lambda *args: ((ATTENTION_WORKSPACE_BYTES,), dtypes.kByte)
  transformer_engine_jax.get_fused_attn_fwd_workspace_sizes = workspace
  transformer_engine_jax.get_fused_attn_bwd_workspace_sizes = workspace
