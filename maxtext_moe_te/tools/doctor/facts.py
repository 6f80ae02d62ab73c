"""What the doctor knows: of the machine and of the job, as plain data that can be saved, posted and made up.

Owns gathering. What follows from the facts is decided in `checks`. Imports nothing heavy; what must be loaded to be asked is loaded in
processes that end.
"""

import dataclasses
import functools
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from maxtext_moe_te import versions
from maxtext_moe_te.errors import VersionError
from maxtext_moe_te.host import known, source
from maxtext_moe_te.moe import te_api, te_runtime

PACKAGES = (
  "maxtext-moe-te", "maxtext", "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-cuda12-plugin", "jax-cuda12-pjrt", "flax",
  "transformer-engine", "transformer-engine-jax", "transformer-engine-cu13", "transformer-engine-cu12", "nvidia-cublas",
  "nvidia-cublas-cu12", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-cuda-nvcc", "tokamax",
)  # fmt: skip
# Variables that decide something; no others, for a report may be posted.
VARIABLES = ("XLA_", "NCCL_", "NVTE_", "JAX_", "CUDA_", "LD_LIBRARY_PATH", "LD_PRELOAD", "NNODES", "NODE_RANK", "SLURM_NNODES")
LIBRARIES = ("libcuda.so.1", "libcublasLt.so.13", "libcublasLt.so.12", "libnccl.so.2", "libcudnn.so.9", "libcurand.so.10")
CUDNN_PARTS = ("graph", "ops", "cnn", "adv", "engines_precompiled", "engines_runtime_compiled", "heuristic")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
  """One GPU: compute capability as "9.0", memory in bytes."""

  name: str
  capability: str
  memory_bytes: int
  used_bytes: int = 0
  mig: bool = False
  uuid: str = ""
  index: int = 0  # among all of the machine; set by `seen`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Library:
  """One shared library as the loader finds it: its file and its version as it says itself, 131000 for cuBLAS 13.10.0."""

  path: str
  version: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
  """One machine.

  Args:
    python: version.
    packages: installed versions; of maxtext what its source says.
    maxtext: of the MaxText that `import` would take: version, metadata (None without), standing (a line), known, and a digest of the
      places the plugin relies on; empty without one.
    variables: of the environment.
    gpus: as nvidia-smi lists them, whatever CUDA_VISIBLE_DEVICES says; after `seen`, those it shows.
    hidden: after `seen`, how many it hides.
    driver: version of the NVIDIA driver, or None.
    no_peer_access: pairs of GPUs that cannot read each other's memory.
    libraries: soname to what the loader finds; a library that is not there is missing here.
    nccl_files: every libnccl.so.2 in LD_LIBRARY_PATH and among pip's, with versions.
    cudnn_parts: cuDNN's sub-libraries by name, to the file the loader finds.
    nccl_headers: version of the NCCL headers found for the NCCL that is loaded, or None.
    nvcc, gxx: paths of the compilers, or None.
    jit_cache: whether NCCL_EP_JIT_CACHE_DIR, or without it the home folder, can be written to.
    jax_refused: found, needed and fix, where JAX has not what the plugin calls, or a compiler that is wrong.
    te: `te_api.Api.facts` of Transformer Engine; empty without one.
    te_extension_error: what the loader says of Transformer Engine's JAX extension, or None.
    imported_at_start: of jax and transformer_engine, what a fresh interpreter imports by itself, in order.
    host_memory_bytes: available.
    shared_memory_bytes: size of /dev/shm.
  """

  python: str
  packages: dict[str, str] = dataclasses.field(default_factory=dict)
  maxtext: dict[str, Any] = dataclasses.field(default_factory=dict)
  variables: dict[str, str] = dataclasses.field(default_factory=dict)
  gpus: tuple[Gpu, ...] = ()
  hidden: int = 0
  driver: str | None = None
  no_peer_access: tuple[tuple[int, int], ...] = ()
  libraries: dict[str, Library] = dataclasses.field(default_factory=dict)
  nccl_files: dict[str, int | None] = dataclasses.field(default_factory=dict)
  cudnn_parts: dict[str, str] = dataclasses.field(default_factory=dict)
  nccl_headers: int | None = None
  nvcc: str | None = None
  gxx: str | None = None
  jit_cache: bool = True
  jax_refused: dict[str, str] | None = None
  te: dict[str, Any] = dataclasses.field(default_factory=dict)
  te_extension_error: str | None = None
  imported_at_start: tuple[str, ...] = ()
  host_memory_bytes: int = 0
  shared_memory_bytes: int = 0

  @property
  def capability(self) -> str | None:
    """Of the first GPU."""
    return self.gpus[0].capability if self.gpus else None

  def fingerprint(self) -> dict[str, str]:
    """What must be the same on every machine of a job: name to value."""
    told = {f"package {name}": version for name, version in self.packages.items()}
    told |= {"MaxText's source": self.maxtext["digest"]} if self.maxtext else {}
    told |= {f"library {name}": str(library.version) for name, library in self.libraries.items() if library.version}
    told |= {"python": self.python, "driver": str(self.driver), "XLA_FLAGS": self.variables.get("XLA_FLAGS", "")}
    told |= {name: value for name, value in self.variables.items() if name.startswith(("NCCL_", "NVTE_", "XLA_")) and name != "XLA_FLAGS"}
    told["gpus"] = ", ".join(f"{gpu.name} ({gpu.capability})" for gpu in self.gpus)
    return told


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
  """What is to run.

  Args:
    nodes, gpus_per_node, nvlink_domain: GPUs of one NVLink domain: those of a node, or of a rack (72 in an NVL72).
    processes_per_node: as many as GPUs, or fewer.
    config: keys of MaxText's resolved configuration that checks ask for; empty if it was not or could not be resolved.
    options: the plugin's.
    xla_flags: the text the run would start with.
    variables: the environment it would start with.
    refused: found, needed and fix, where the configuration was refused.
    selfcheck: what the run makes of a MaxText that is not known to the plugin, as `refused` has it if that is why; empty where it is known.
    offloaded_bytes: bytes of host memory per GPU, where tensors are offloaded and their size is known.
  """

  nodes: int = 1
  gpus_per_node: int = 1
  nvlink_domain: int = 0
  processes_per_node: int = 0
  config: dict[str, Any] = dataclasses.field(default_factory=dict)
  options: dict[str, Any] = dataclasses.field(default_factory=dict)
  xla_flags: str = ""
  variables: dict[str, str] = dataclasses.field(default_factory=dict)
  refused: dict[str, str] | None = None
  selfcheck: str = ""
  offloaded_bytes: int = 0

  @property
  def gpus(self) -> int:
    return self.nodes * self.gpus_per_node

  @property
  def domain(self) -> int:
    return self.nvlink_domain or self.gpus_per_node

  def axis(self, name: str) -> int:
    """Size of a mesh axis, 1 if unknown."""
    return self.config.get("axis_sizes", {}).get(name, 1)

  @property
  def wants_expert_parallel(self) -> bool:
    """Whether the run would try to make an NCCL EP group."""
    ours = self.options.get("enabled", True) and self.options.get("transport", "auto") in ("auto", "nccl_ep")
    return ours and self.axis("expert") > 1 and self.config.get("num_experts", 1) > 1

  @property
  def expert_parallel(self) -> bool:
    """Whether it would make one, given a machine that can."""
    return self.wants_expert_parallel and not self.config.get("nccl_ep_refused")


def seen(machine: Machine, variables: dict[str, str]) -> Machine:
  """The machine as a process with these variables sees it: the GPUs that CUDA_VISIBLE_DEVICES shows, and what concerns them.

  As CUDA reads it: numbers or the beginnings of UUIDs; what follows one that is wrong is hidden, and a repetition hides all.
  """
  asked, count = variables.get("CUDA_VISIBLE_DEVICES"), len(machine.gpus)
  shown = list(range(count)) if asked is None else []
  for word in map(str.strip, (asked or "").split(",")):
    if word.startswith("MIG-"):  # a process sees one slice
      found = [index for index, gpu in enumerate(machine.gpus) if gpu.mig and not shown][:1]
    elif word.isdecimal():
      found = [int(word)] if int(word) < count else []
    else:
      found = [index for index, gpu in enumerate(machine.gpus) if word and gpu.uuid.startswith(word)]
    if len(found) != 1:
      break
    if found[0] in shown:
      shown = []
      break
    shown += found
  return dataclasses.replace(
    machine,
    gpus=tuple(dataclasses.replace(machine.gpus[index], index=index) for index in shown),
    hidden=count - len(shown),
    no_peer_access=tuple(pair for pair in machine.no_peer_access if set(pair) <= set(shown)),
  )


def machine_from(data: dict) -> Machine:
  """A machine from its JSON."""
  data = dict(data)
  data["gpus"] = tuple(Gpu(**gpu) for gpu in data.get("gpus", ()))
  data["libraries"] = {name: Library(**library) for name, library in data.get("libraries", {}).items()}
  data["no_peer_access"] = tuple(tuple(pair) for pair in data.get("no_peer_access", ()))
  data["imported_at_start"] = tuple(data.get("imported_at_start", ()))
  return Machine(**data)


def gather() -> Machine:
  """The facts of this machine. Takes a second or two."""
  libraries, cudnn_parts, extension_error, nccl_files = _loaded()
  nccl = libraries.get("libnccl.so.2")
  headers = te_runtime._nccl_headers(nccl.version) if nccl and nccl.version else None
  nvcc, engine = te_runtime._nvcc(), te_api.find()
  gpus, driver = _gpus()
  packages = {name: version for name in PACKAGES if (version := versions.installed(name))}
  maxtext = _maxtext(packages.pop("maxtext", None))
  return Machine(
    python=platform.python_version(),
    packages=packages | ({"maxtext": maxtext["version"]} if maxtext else {}),
    maxtext=maxtext,
    variables={name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)},
    gpus=gpus,
    driver=driver,
    no_peer_access=_no_peer_access(len(gpus)),
    libraries=libraries,
    nccl_files=nccl_files,
    cudnn_parts=cudnn_parts,
    nccl_headers=te_runtime.header_version(headers) if headers else None,
    nvcc=str(nvcc) if nvcc else None,
    gxx=shutil.which("g++"),
    jit_cache=_writable(Path(os.environ.get("NCCL_EP_JIT_CACHE_DIR") or os.path.expanduser("~"))),
    jax_refused=_jax_refused(),
    te=engine.facts() if engine else {},
    te_extension_error=extension_error,
    imported_at_start=_imported_at_start(),
    host_memory_bytes=_available_memory(),
    shared_memory_bytes=shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0,
  )


def _maxtext(metadata):
  try:
    version, standing = source.version(), known.standing()
  except VersionError:
    return {}
  digest = hashlib.sha256("".join(known.judge(group).digest for group in known.GROUPS).encode()).hexdigest()[:12]
  return {"version": version, "metadata": metadata, "standing": standing, "known": not known.unknown(), "digest": digest}


def _jax_refused():
  try:
    versions.check_jax()
  except VersionError as error:
    return error.fields


# Run by a fresh interpreter, so that what it loads is what a training process would find and nothing of it stays.
_LOAD = """
import ctypes, glob, json, os, sys
sonames, parts, extension, folders = json.loads(sys.argv[1])

def load(name, mode=ctypes.DEFAULT_MODE):
  # The loader's path first, then pip's folders, which JAX's plugin and Transformer Engine search by themselves.
  try:
    return ctypes.CDLL(name, mode=mode)
  except OSError:
    for folder in folders:
      if os.path.exists(os.path.join(folder, name)):
        return ctypes.CDLL(os.path.join(folder, name), mode=mode)
    raise

def file_of(handle, soname):
  for line in open("/proc/self/maps"):
    path = line.split()[-1]
    if os.path.basename(path).startswith(soname):
      return os.path.realpath(path)
  return ""

def version_of(library, name):
  if name.startswith("libcublasLt"):
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    return library.cublasLtGetVersion()
  if name.startswith("libcudnn"):
    library.cudnnGetVersion.restype = ctypes.c_size_t
    return library.cudnnGetVersion()
  if name.startswith("libnccl"):
    number = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(number))
    return number.value
  return None

found = {}
for name in sonames:
  try:
    library = load(name)
    found[name] = dict(path=file_of(library, name), version=version_of(library, name))
  except (OSError, AttributeError):
    pass
cudnn = {}
for part in parts:
  name = f"libcudnn_{part}.so.9"
  try:
    cudnn[part] = file_of(load(name), name)
  except OSError:
    pass
error = None
if extension:
  core, binding = extension
  # Transformer Engine loads these before its own library, which leaves their symbols open.
  for name in ("libnvrtc.so.13", "libcublasLt.so.13", "libcublas.so.13", "libcudnn.so.9", "libcurand.so.10", "libnccl.so.2"):
    try:
      load(name, ctypes.RTLD_GLOBAL)
    except OSError:
      pass
  for path in glob.glob(os.path.join(os.path.dirname(core), "**", "libnccl_ep.so*"), recursive=True):
    try:
      ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    except OSError:
      pass
  try:
    ctypes.CDLL(core, mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(binding, mode=os.RTLD_NOW)
  except OSError as problem:
    error = str(problem)
nccl = {}
for folder in [*os.environ.get("LD_LIBRARY_PATH", "").split(":"), *folders]:
  path = os.path.realpath(os.path.join(folder, "libnccl.so.2")) if folder else ""
  if path and os.path.isfile(path) and path not in nccl:
    try:
      nccl[path] = version_of(ctypes.CDLL(path), "libnccl")
    except (OSError, AttributeError):
      nccl[path] = None
print("FACTS", json.dumps([found, cudnn, error, nccl]))
"""


def _loaded():
  """(libraries, cuDNN's parts, error of Transformer Engine's extension, NCCL files) as a fresh process finds them."""
  folders = [str(folder) for root in te_runtime._pip_roots() for folder in sorted(root.glob("*/lib"))]
  request = json.dumps([LIBRARIES, CUDNN_PARTS, _extension(), folders])
  environment = dict(os.environ)
  te_runtime.prefer_pip_cudnn(environment)
  done = subprocess.run([sys.executable, "-c", _LOAD, request], capture_output=True, text=True, timeout=60, env=environment)
  if "FACTS" not in done.stdout:
    return {}, {}, None, {}
  found, cudnn, error, nccl = json.loads(done.stdout.split("FACTS", 1)[1])
  return {name: Library(**library) for name, library in found.items()}, cudnn, error, nccl


def _extension():
  """[core library, JAX extension] of Transformer Engine, or None."""
  spec = importlib.util.find_spec("transformer_engine")
  if spec is None or not spec.submodule_search_locations:
    return None
  folder = Path(next(iter(spec.submodule_search_locations)))
  core = [*folder.rglob("libtransformer_engine.so")]
  binding = [*folder.rglob("transformer_engine_jax*.so"), *folder.parent.glob("transformer_engine_jax*.so")]
  return [str(core[0]), str(binding[0])] if core and binding else None


@functools.cache
def _smi(*arguments):
  if shutil.which("nvidia-smi") is None:
    return ""
  try:
    done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=30)
  except subprocess.TimeoutExpired:
    return ""
  return done.stdout if done.returncode == 0 else ""


def _gpus():
  fields = "name,compute_cap,memory.total,memory.used,mig.mode.current,driver_version,uuid"
  gpus, driver = [], None
  for line in _smi(f"--query-gpu={fields}", "--format=csv,noheader,nounits").splitlines():
    name, capability, total, used, mig, driver, uuid = (field.strip() for field in line.split(","))
    mib = lambda text: int(float(text)) * 2**20 if text.replace(".", "").isdigit() else 0
    gpu = Gpu(name=name, capability=capability, memory_bytes=mib(total), used_bytes=mib(used), mig=mig == "Enabled", uuid=uuid)
    gpus.append(gpu)
  return tuple(gpus), driver


def _no_peer_access(count):
  """Pairs that `nvidia-smi topo` says cannot read each other."""
  rows = [line.split() for line in _smi("topo", "-p2p", "r").splitlines() if line.strip().startswith("GPU")]
  rows = [row for row in rows if len(row) == count + 1 and row[0].startswith("GPU") and not row[1].startswith("GPU")]
  return tuple((i, j) for i, row in enumerate(rows) for j, cell in enumerate(row[1:]) if i < j and cell not in ("OK", "X"))


def _imported_at_start():
  code = "import sys; print('FACTS', *[name for name in sys.modules if name in ('jax', 'transformer_engine')])"
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
  return tuple(done.stdout.split("FACTS", 1)[1].split()) if "FACTS" in done.stdout else ()


def _writable(folder):
  while not folder.exists():
    folder = folder.parent
  return os.access(folder, os.W_OK)


def _available_memory():
  try:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
  except (OSError, StopIteration):
    return 0


def digest(machine: Machine) -> str:
  """A short hash of `Machine.fingerprint`."""
  return hashlib.sha256(json.dumps(machine.fingerprint(), sort_keys=True).encode()).hexdigest()[:12]
