"""What the doctor concludes: small functions from a machine and a job to findings, each with where it is known from.

A check that the run itself makes is asked there, not restated. Severities: an error stops the run or makes it wrong; a warning costs
speed, memory or certainty; a note says what could not be judged here.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Iterator

from packaging.version import Version

from maxtext_moe_te import versions
from maxtext_moe_te.errors import MoeTeError
from maxtext_moe_te.host.source import MISSING
from maxtext_moe_te.moe import te_api, te_runtime
from maxtext_moe_te.settings import xla_flags
from maxtext_moe_te.tools.doctor import rows
from maxtext_moe_te.tools.doctor.facts import Job, Machine, seen

ERROR, WARNING, NOTE = "error", "warning", "note"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
  """One conclusion, in the words of `errors.MoeTeError`.

  Args:
    source: where it is known from: a link, or `measured` or `tried` with the version.
  """

  severity: str
  found: str
  needed: str
  fix: str
  source: str

  def __str__(self):
    return f"{self.found}; needed: {self.needed}. Fix: {self.fix}. [{self.source}]"


CHECKS: list[Callable[[Machine, Job], Iterator[Finding]]] = []


def check(function):
  """Registers a check."""
  CHECKS.append(function)
  return function


def examine(machine: Machine, job: Job, *, names=None) -> list[Finding]:
  """All findings, errors first.

  Args:
    machine: the facts of this machine.
    job: what is to run.
    names: the XLA flags that the installed libraries know, see `settings.xla_flags.installed_names`; None checks none.
  """
  machine = seen(machine, {**machine.variables, **job.variables})
  found = [finding for one in CHECKS for finding in one(machine, job)]
  found += _flags(job, names)
  return sorted(found, key=lambda finding: (ERROR, WARNING, NOTE).index(finding.severity))


def _error(found, needed, fix, source):
  return Finding(severity=ERROR, found=found, needed=needed, fix=fix, source=source)


def _warning(found, needed, fix, source):
  return Finding(severity=WARNING, found=found, needed=needed, fix=fix, source=source)


def _note(found, needed, fix, source):
  return Finding(severity=NOTE, found=found, needed=needed, fix=fix, source=source)


def _asked(call, source, make=_error):
  """The finding of a check that raises."""
  try:
    call()
  except MoeTeError as error:
    yield make(error.found, error.needed, error.fix, source)


def _gib(size):
  return f"{size / 2**30:,.1f} GiB"


# Packages


@check
def maxtext(machine, job):
  if "maxtext" not in machine.packages:
    yield _error(**MISSING, source="Python's path")
  elif machine.maxtext:
    standing, needed = machine.maxtext["standing"], "a source that is known to the plugin, or equal by numbers"
    if job.refused and job.selfcheck == job.refused["found"]:
      return  # said by the check named so
    if job.selfcheck:
      yield _note(job.selfcheck, needed, "none", "the run's own check")
    elif machine.maxtext["known"]:
      yield _note(f"MaxText: {standing}", needed, "none", "known.json")
    else:
      yield _warning(f"MaxText: {standing}", needed, "give the doctor the words of the run: it compares them now", "known.json")


@check
def jax(machine, job):
  found, lib = machine.packages.get("jax"), machine.packages.get("jaxlib")
  install = "pip install 'jax[cuda13]>=0.12'"
  if found is None:
    yield _error("jax is not installed", f"jax {versions.JAX_FLOOR} or newer", install, "versions.py")
    return
  if problem := versions.jaxlib_problem(lib):
    yield _error(problem, f"{versions.JAX_FLOOR} or newer ({versions.JAX_REASON})", install, "https://github.com/openxla/xla/pull/46231")
  elif machine.jax_refused:
    yield _error(**machine.jax_refused, source="JAX's own source")
  elif (hazard := versions.jax_hazard(lib)) and machine.gpus:
    yield _warning(f"jaxlib {lib}: {hazard}", "0.12 or newer", install, "measured with 0.11.2")
  if lib is not None and versions.release(lib) != versions.release(found):
    yield _error(f"jax {found} beside jaxlib {lib}", "the same version of both", f"pip install 'jaxlib=={found}'", "JAX's version check")
  for plugin in ("jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-cuda12-plugin", "jax-cuda12-pjrt"):
    version = machine.packages.get(plugin)
    if lib is not None and version is not None and version != lib:
      yield _error(
        f"{plugin} {version} beside jaxlib {lib}: JAX leaves a plugin of another version unused and runs on the CPU",
        "the same version of both",
        f"pip install '{plugin}=={lib}'",
        "tried with jaxlib 0.12.0 and plugin 0.12.0.1",
      )
  if machine.gpus and not any(name.startswith("jax-cuda") for name in machine.packages):
    yield _error(
      f"{len(machine.gpus)} GPUs and a jax without a CUDA plugin, which runs on the CPU",
      "jax with CUDA",
      "pip install 'jax[cuda13]'",
      "JAX's installation guide",
    )
  if versions.release(found) >= (0, 12, 0) and Version(machine.python) < Version("3.12"):
    yield _error(f"Python {machine.python} with jax {found}", "Python 3.12 or newer", "use a Python 3.12", "jax 0.12's metadata")


@check
def two_cudas(machine, job):
  both = [name for name in machine.packages if name.startswith(("jax-cuda12", "transformer-engine-cu12"))]
  if both and any(name.startswith(("jax-cuda13", "transformer-engine-cu13")) for name in machine.packages):
    yield _error(
      f"{', '.join(both)} beside packages for CUDA 13",
      "one CUDA major version in a process",
      f"pip uninstall {' '.join(both)}",
      "two majors in one process: symbols of the first one loaded win",
    )
  loaded = [name for name in ("libcublasLt.so.12", "libcublasLt.so.13") if name in machine.libraries]
  if len(loaded) == 2 and not both:
    yield _warning(
      f"the loader finds {' and '.join(machine.libraries[name].path for name in loaded)}",
      "the libraries of one CUDA major version on the loader's path",
      "remove CUDA 12's folder from LD_LIBRARY_PATH",
      "two majors in one process: symbols of the first loaded win",
    )


def _asks_te_experts(job):
  """Whether the options name Transformer Engine's grouped GEMM, so that the run has no other way."""
  return job.options.get("enabled", True) and (job.options.get("experts") == "te" or job.options.get("recipe") == "mxfp8")


def _asks_te(job):
  """Whether the options name any part of Transformer Engine."""
  others = job.options.get("router") == "te" or job.options.get("transport") == "nccl_ep"
  return _asks_te_experts(job) or (others and job.options.get("enabled", True))


def _wants_te(machine, job):
  """Whether the run would use Transformer Engine's kernels here: asked for, or chosen by itself on such a GPU."""
  return _asks_te(job) or (job.options.get("experts", "auto") == "auto" and bool(machine.gpus) and job.options.get("enabled", True))


def _te_parts(machine, job):
  """The parts of Transformer Engine that the run uses, and how bad it is if one cannot be used; without a run, all of them."""
  option, on = job.options.get, job.options.get("enabled", True)
  parts = {} if job.config else dict.fromkeys(("context", "experts", "mxfp8", "router", "nccl_ep"), _warning)
  if job.config.get("hardware", "").startswith("gpu"):
    parts["context"] = _error
  if on and option("recipe") == "mxfp8":
    parts["mxfp8"] = _error
  elif on and (option("experts") == "te" or _wants_te(machine, job)):
    parts["experts"] = _error if option("experts") == "te" else _warning
  if on and option("router") == "te":
    parts["router"] = _error
  if job.expert_parallel:
    parts["nccl_ep"] = _ep_severity(job)
  return parts


@check
def transformer_engine(machine, job):
  found = machine.packages.get("transformer-engine")
  if found is None and not machine.te:
    if _wants_te(machine, job):
      yield (_error if _asks_te(job) else _warning)(
        "Transformer Engine is not installed",
        f"transformer-engine, as {te_api.TESTED}; without it expert products are slower",
        "pip install 'maxtext-moe-te[gpu]'",
        "measured on H200: tests/benchmarks",
      )
    return
  for part, make in _te_parts(machine, job).items():
    if refused := machine.te.get("problems", {}).get(part):
      yield make(**refused, source="its source, and its JAX extension")
  if found is None:
    return
  for name in ("transformer-engine-jax", "transformer-engine-cu13", "transformer-engine-cu12"):
    version = machine.packages.get(name)
    if version is not None and version != found:
      yield _error(
        f"transformer-engine {found} beside {name} {version}: Python calls that its library does not have",
        "one version of all its parts",
        f"pip install '{name}=={found}'",
        "ep_bootstrap: unexpected keyword; nvte_built_with_cublasmp: ImportError",
      )
  error = machine.te_extension_error
  # A library that cannot be opened is no proof: Transformer Engine searches more folders than the loader.
  if error and ("undefined symbol" in error or "not found (required by" in error):
    yield _error(
      f"Transformer Engine's JAX extension does not load: {error[-300:]}",
      "the libraries it was built against, or an extension built against the oldest ones it will meet",
      "build transformer-engine-jax anew beside the cuDNN that is loaded (pip install --no-build-isolation --no-cache-dir)",
      "measured: built with cuDNN 9.28, run beside 9.19: undefined symbol cudnnGetExecutionPlanWorkspaceSize",
    )
  if machine.gpus and "libcurand.so.10" not in machine.libraries:
    yield _error(
      "no libcurand.so.10, which jax[cuda13] does not bring and Transformer Engine's import wants",
      "cuRAND on the loader's path",
      "pip install 'nvidia-curand>=10.4'",
      "tried with 2.20.2: curand shared object not found",
    )
  if machine.imported_at_start[:1] == ("transformer_engine",):
    yield _error(
      "a fresh interpreter imports transformer_engine before jax (a .pth file or sitecustomize)",
      "jax first: it must load its cuDNN before Transformer Engine finds another",
      "remove that import",
      "measured: the CUDA client then mixes two cuDNN",
    )


# Libraries


@check
def cudnn(machine, job):
  main = machine.libraries.get("libcudnn.so.9")
  if main is None:
    return
  home = os.path.dirname(main.path)
  astray = sorted({os.path.dirname(path) for path in machine.cudnn_parts.values() if os.path.dirname(path) != home})
  if astray:
    yield _error(
      f"cuDNN is loaded from {home} and its sub-libraries from {', '.join(astray)}: CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED, after which "
      "Transformer Engine computes attention unfused and says nothing",
      "all of cuDNN from one folder",
      f"put {home} first in LD_LIBRARY_PATH",
      "measured on H200: 125.8 instead of 266.5 TFLOP/s, seen only under NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2",
    )
  if machine.cudnn_parts and "graph" not in machine.cudnn_parts:
    yield _error(
      f"cuDNN in {home} lacks its sub-library libcudnn_graph.so.9",
      "a whole cuDNN 9",
      "pip install --force-reinstall nvidia-cudnn-cu13",
      "cuDNN 9's layout",
    )
  if main.version and main.version < 91200 and "transformer-engine" in machine.packages:
    yield _error(
      f"cuDNN {_cudnn(main.version)} at run time",
      "9.12 or newer for Transformer Engine 2.20",
      "pip install 'nvidia-cudnn-cu13>=9.12'",
      "Transformer Engine 2.20's requirements",
    )


def _cudnn(version):
  return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


@check
def cublas(machine, job):
  library = machine.libraries.get("libcublasLt.so.13")
  if not machine.capability or not _wants_te(machine, job) or not machine.capability.startswith(("9.", "10.", "11.")):
    return
  if library is None or not library.version:
    yield _error("no libcublasLt.so.13 on the loader's path", "cuBLAS 13.4 or newer", "pip install 'nvidia-cublas>=13.8.1'", "grouped GEMM")
    return
  make = _error if _asks_te_experts(job) else _warning  # `auto` takes ragged_dot instead
  yield from _asked(
    lambda: te_runtime.check_grouped_gemm(machine.capability, library.version),
    "Transformer Engine 2.20's cublaslt_grouped_gemm.cu; 13.2: https://github.com/NVIDIA/TransformerEngine/issues/2765",
    make,
  )
  serves_hopper, version = machine.te.get("serves_hopper", True), machine.packages.get("transformer-engine")
  yield from _asked(lambda: te_api.check_gpu(machine.capability, serves_hopper, version), "its cpp_extensions/gemm.py", make)


@check
def nccl(machine, job):
  library = machine.libraries.get("libnccl.so.2")
  versions_found = {version for version in machine.nccl_files.values() if version}
  if len(versions_found) > 1:
    files = ", ".join(f"{path} ({te_runtime.dotted(version)})" for path, version in sorted(machine.nccl_files.items()) if version)
    yield (_error if job.expert_parallel else _warning)(
      f"several NCCL: {files}",
      "one NCCL: which one is loaded depends on who loads first",
      "remove the others from LD_LIBRARY_PATH",
      "https://github.com/marin-community/marin/issues/8313: ILLEGAL_ADDRESS at EP 64",
    )
  if machine.gpus and job.gpus > 1 and library is None:
    yield _error("no libnccl.so.2", "NCCL for more than one GPU", "pip install 'nvidia-nccl-cu13>=2.32.3'", "XLA loads it at run time")
  if job.expert_parallel and library and library.version:
    source = "Transformer Engine itself, or NCCL EP 0.2.0, which compares with the version it was built with, 2.32.3"
    yield from _asked(lambda: te_runtime.check_nccl(library.version, machine.te.get("nccl_floor")), source, _ep_severity(job))


# GPUs


@check
def gpus(machine, job):
  variables = {**machine.variables, **job.variables}
  wants = str(job.config.get("hardware", "")).startswith("gpu")
  if machine.hidden and not machine.gpus:
    hides = f"CUDA_VISIBLE_DEVICES={variables['CUDA_VISIBLE_DEVICES']!r} hides the {machine.hidden} GPUs"
    yield _error(hides, "the GPUs visible", "unset CUDA_VISIBLE_DEVICES", "CUDA")
  platforms = variables.get("JAX_PLATFORMS", "")
  if machine.gpus and wants and platforms and "cuda" not in platforms and "gpu" not in platforms:
    yield _error(f"JAX_PLATFORMS={platforms} with hardware={job.config['hardware']}", "JAX on the GPUs", "unset JAX_PLATFORMS", "JAX")
  if not machine.gpus:
    yield _note(
      "no GPU here: kernels, links and memory are not judged", "a machine like those of the job", "run the doctor there too", "nvidia-smi"
    )
    return
  if len({(gpu.name, gpu.capability) for gpu in machine.gpus}) > 1:
    kinds = ", ".join(sorted({gpu.name for gpu in machine.gpus}))
    yield _error(f"GPUs of several kinds: {kinds}", "one kind", "choose one by CUDA_VISIBLE_DEVICES", "one program is compiled for all")
  if any(gpu.mig for gpu in machine.gpus) and job.gpus > 1:
    yield _error(
      "MIG is on, and NCCL cannot connect slices of GPUs", "whole GPUs for more than one process", "nvidia-smi -mig 0", "NVIDIA's MIG guide"
    )
  if machine.driver and int(machine.driver.split(".")[0]) < 580 and any("cuda13" in name for name in machine.packages):
    yield _error(f"driver {machine.driver}", "580 or newer for CUDA 13", "update the driver, or install jax[cuda12]", "CUDA 13's notes")
  for gpu in machine.gpus:
    if gpu.memory_bytes and gpu.used_bytes > gpu.memory_bytes // 20:
      yield _warning(
        f"GPU {gpu.index} has {_gib(gpu.used_bytes)} of {_gib(gpu.memory_bytes)} in use before the run",
        "a free GPU: XLA takes its pool at the start",
        "end the process that nvidia-smi shows",
        "nvidia-smi",
      )
  there = len(machine.gpus) + machine.hidden
  if job.gpus_per_node > there:
    yield _error(
      f"a job of {job.gpus_per_node} GPUs per node on a machine with {there}",
      "as many as there are",
      f"use --gpus-per-node {there}",
      "nvidia-smi",
    )
  elif job.gpus_per_node > len(machine.gpus):
    yield _warning(
      f"a job of {job.gpus_per_node} GPUs per node, and CUDA_VISIBLE_DEVICES={variables['CUDA_VISIBLE_DEVICES']} hides {machine.hidden} of "
      f"{there} here",
      "all of them, or a value of its own for each process",
      "unset CUDA_VISIBLE_DEVICES",
      "CUDA",
    )


@check
def recipes(machine, job):
  if not machine.capability:
    return
  major = int(machine.capability.split(".")[0])
  if job.options.get("recipe") == "mxfp8":
    yield from _asked(lambda: te_runtime.check_mxfp8(machine.capability), "Blackwell's tensor cores; Hopper answers with a RuntimeError")
  if job.options.get("experts") == "te" and major not in (9, 10, 11):
    yield from _asked(lambda: te_runtime.check_grouped_gemm(machine.capability, 131000), "Transformer Engine 2.20's kernel table")
  if major >= 10 and job.options.get("recipe", "bf16") == "bf16" and job.config and job.options.get("enabled", True):
    yield _note(
      f"{machine.gpus[0].name} computes expert products in MXFP8 too",
      "bfloat16 is right as well",
      "try moe_te.recipe=mxfp8, after comparing losses",
      "configs/te-moe-mxfp8.yml",
    )
  quantization = str(job.config.get("quantization") or "")
  if quantization.startswith("te_mxfp8") and major < 10:
    yield _error(
      f"quantization={quantization} on {machine.gpus[0].name}",
      "Blackwell",
      "set quantization=te_fp8_currentscaling, or ''",
      "Transformer Engine",
    )


# Expert parallelism

_COMPILES = "a compiler: NCCL EP compiles its kernels at the first start"


def _ep_severity(job):
  """Where NCCL EP cannot be had, `auto` takes XLA's collectives instead."""
  return _error if job.options.get("transport") == "nccl_ep" else _warning


@check
def expert_parallel(machine, job):
  if not job.wants_expert_parallel or not (machine.gpus or str(job.config.get("hardware", "")).startswith("gpu")):
    return
  ranks, variables = job.axis("expert"), {**machine.variables, **job.variables}
  make = _ep_severity(job)
  instead = "" if make is _error else "; the run takes XLA's slower collectives"
  refused = job.config.get("nccl_ep_refused")
  if refused:  # nothing of the machine changes that
    yield make(f"{refused['found']}{instead}", refused["needed"], refused["fix"], "the run's own check")
    return
  if machine.nvcc is None:
    yield make(f"no nvcc{instead}", _COMPILES, "pip install nvidia-cuda-nvcc", "NCCL EP 0.2.0")
  if machine.gxx is None:
    yield make(f"no g++{instead}", _COMPILES, "install g++", "NCCL EP 0.2.0")
  library = machine.libraries.get("libnccl.so.2")
  if library and library.version and machine.nccl_headers != library.version:
    has = f"headers of NCCL {te_runtime.dotted(machine.nccl_headers)}" if machine.nccl_headers else "no NCCL headers"
    yield make(
      f"{has} beside NCCL {te_runtime.dotted(library.version)}{instead}",
      "headers of the NCCL that is loaded",
      "set NCCL_HOME to a folder with its include/nccl.h",
      "measured: Could not find NCCL headers matching runtime NCCL",
    )
  if not machine.jit_cache:
    yield make(
      f"NCCL EP's kernel cache cannot be written{instead}",
      "a writable folder",
      "set NCCL_EP_JIT_CACHE_DIR to one",
      "NCCL EP 0.2.0: abort()",
    )
  if machine.no_peer_access:
    pairs = ", ".join(f"{i}-{j}" for i, j in machine.no_peer_access[:4])
    yield _error(
      f"GPUs {pairs} have no peer-to-peer access", "NVLink or PCIe peer access for NCCL EP", "set moe_te.transport=xla", "nvidia-smi topo"
    )
  if variables.get("NCCL_P2P_DISABLE") == "1":
    yield _error("NCCL_P2P_DISABLE=1 with NCCL EP", "peer access", "unset NCCL_P2P_DISABLE", "NCCL EP reads peers' memory over NVLink")
  if ranks > job.domain:
    yield _warning(
      f"an expert axis of {ranks} over NVLink domains of {job.domain} GPUs",
      "an expert axis inside one domain, or RDMA with GIN",
      f"set ici_expert_parallelism={math.gcd(ranks, job.domain)}, or NCCL_GIN_TYPE=3",
      "NCCL EP 0.1.0's notes: [HT GIN] internode requires GIN",
    )
  if min(ranks, job.domain) >= 44 and variables.get("NCCL_MNNVL_ENABLE") != "0":
    yield _warning(
      f"an expert axis of {ranks}: NCCL was seen to crash with 44 ranks or more of one NVLink rack",
      "NCCL_MNNVL_ENABLE=0, or fewer ranks",
      "set NCCL_MNNVL_ENABLE=0",
      "https://github.com/NVIDIA/nccl/issues/2186",
    )
  if job.processes_per_node and job.processes_per_node < job.gpus_per_node:
    version, engine = machine.packages.get("jax"), machine.packages.get("transformer-engine")
    if version and (versions.release(version) < (0, 11, 2) or not machine.te.get("borrows", True)):
      yield make(
        f"{job.gpus_per_node // job.processes_per_node} GPUs in one process with jax {version} and transformer-engine {engine}{instead}",
        "jax 0.11.2 or newer and a Transformer Engine that borrows XLA's communicators (2.20.2), or one GPU per process",
        "start one process per GPU",
        "Transformer Engine 2.20's ep.py",
      )
    yield _warning(
      f"{job.processes_per_node} processes for {job.gpus_per_node} GPUs of a node",
      "one process per GPU: many-GPU processes wedged at 512 GPUs",
      "start one process per GPU",
      "https://github.com/marin-community/marin/issues/7344",
    )
  of_job, chunks = rows.received(job), rows.chosen(job, rows.pool_of(machine, job)).chunks
  tokens = -(-of_job.tokens // chunks)
  if tokens > 8192:
    yield _note(
      f"{tokens} tokens per rank in a call of NCCL EP",
      "8,192, up to which it was tested by its authors",
      f"lower per_device_batch_size{rows.more_chunks(of_job, chunks, lambda more: of_job.tokens // more <= 8192)} if it fails",
      "https://github.com/NVIDIA/nccl-extensions RELEASE.md",
    )


# Mesh


@check
def mesh(machine, job):
  sizes = job.config.get("axis_sizes")
  if not sizes:
    return
  product = math.prod(sizes.values())
  if product != job.gpus:
    yield _error(
      f"a mesh of {product} devices ({_axes(sizes)}) on {job.nodes} x {job.gpus_per_node} = {job.gpus} GPUs",
      "as many devices as GPUs",
      f"set ici_fsdp_parallelism=-1, which takes what the other axes leave, or multiply to {job.gpus}",
      "MaxText: create_device_mesh",
    )
  experts, ranks = job.config.get("num_experts", 1), job.axis("expert")
  found = f"num_experts={experts} on an expert axis of {ranks}"
  if experts > 1 and experts % ranks and not (job.refused and job.refused["found"] == found):  # the run's check stops at its first refusal
    yield _error(
      found, "as many experts on every rank", f"set ici_expert_parallelism={math.gcd(experts, ranks)}", "rules_from_config.check_mesh"
    )
  tensor = job.axis("tensor") * job.axis("tensor_sequence")
  heads = job.config.get("num_kv_heads", tensor)
  if tensor > 1 and heads % tensor:
    yield _error(
      f"{heads} key-value heads on a tensor axis of {tensor}",
      "as many heads on every rank",
      f"set ici_tensor_parallelism={math.gcd(heads, tensor)}",
      "MaxText's kv_heads rule",
    )
  split = math.prod(job.axis(axis) for axis in ("data", "fsdp", "fsdp_transpose", "expert"))
  batch = job.config.get("micro_batch_size_to_train_on", split)
  if batch % split:
    # Without an expert axis MaxText and the layer leave the batch whole on devices that do not divide it.
    alone = job.axis("expert") == 1
    yield (_warning if alone else _error)(
      f"a batch of {batch} sequences over {split} devices ({_axes(sizes)}){': some compute the same' if alone else ''}",
      f"a multiple of {split}",
      f"set per_device_batch_size so that it times {job.gpus} devices is a multiple of {split}",
      "MaxText's activation_batch rule",
    )
  for name, axes in job.config.get("lora_axes", {}).items():
    rank, devices = job.config.get(f"{name}_rank", 0), math.prod(axes.values())
    if rank and job.config.get("attention_type") == "mla" and rank % devices:
      yield _error(
        f"{name}_rank={rank} split over {_axes(axes)} = {devices}",
        f"a divisor of {rank}, or another rule",
        f"add logical_axis_rules=[['{name}',['fsdp']]] if {job.axis('fsdp')} divides it, or fewer fsdp",
        "compiled for 1,024 GB300: IndivisibleError",
      )


def _axes(sizes):
  return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "all 1"


@check
def split_over_domains(machine, job):
  """MaxText wants ici_ axes inside what it calls a slice and dcn_ axes across."""
  slices = job.config.get("num_slices", 1)
  sizes = job.config.get("axis_sizes")
  if not sizes or job.gpus <= job.domain or slices > 1:
    return
  if job.axis("expert") * job.axis("tensor") > job.domain or math.prod(sizes.values()) != job.gpus:
    return
  outer = job.gpus // job.domain
  inner = {axis: size for axis, size in sizes.items() if size > 1}
  if "fsdp" in inner and inner["fsdp"] % outer == 0:
    solved = f"dcn_fsdp_parallelism={outer} ici_fsdp_parallelism={inner['fsdp'] // outer}"
  else:
    solved = f"dcn_data_parallelism={outer}"
  yield _note(
    f"{job.gpus} GPUs in {outer} NVLink domains of {job.domain}, and a mesh without dcn_ axes",
    "fast axes inside a domain: the innermost axis is, in device order",
    f"leave it, or where MaxText sees {outer} slices write {solved}",
    "MaxText: DCN parallelism requested but only one slice available",
  )


# Memory

HOST_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"


@check
def numbers(machine, job):
  for name in (*xla_flags.MEMORY_FRACTIONS, HOST_LIMIT):
    value = job.variables.get(name)
    if value and not _number(value) > 0:
      yield _error(f"{name}={value}", "a number above 0", f"correct or unset {name}", "JAX reads it as a number")


@check
def memory(machine, job):
  if not machine.gpus or not job.config.get("num_experts"):
    return
  config, have = job.config, machine.gpus[0].memory_bytes
  fraction = rows.fraction(job.variables)
  least = rows.least_state_bytes(job)
  if have and least > fraction * have:
    yield _error(
      f"weights and optimizer state of the experts alone take {_gib(least)} of each GPU, XLA's pool is {_gib(fraction * have)}",
      "a model that fits",
      "use more GPUs on fsdp and expert, weight_dtype=bfloat16 mu_dtype=bfloat16, or fewer layers",
      "arithmetic: weights and Adam's two moments, split over fsdp x expert x tensor",
    )
  if job.expert_parallel:
    of_job, choice = rows.received(job), rows.chosen(job, rows.pool_of(machine, job))
    factor, chunks = choice.capacity_factor, choice.chunks
    outside = of_job.group_bytes(factor, chunks)
    if have and outside + 2 * 2**30 > (1 - fraction) * have:
      best = max(0.5, math.floor(100 * (1 - (outside + 2 * 2**30) / have)) / 100)
      yield _warning(
        f"NCCL EP takes about {_gib(outside)} beside XLA's pool of {fraction:g}, which leaves {_gib((1 - fraction) * have)}",
        "room for its buffers, NCCL and CUDA graphs (2 GiB)",
        f"set XLA_PYTHON_CLIENT_MEM_FRACTION={best:g}"
        + rows.more_chunks(of_job, chunks, lambda more: of_job.group_bytes(factor, more) <= outside // 2),
        "NCCL EP 0.1.0's allocation; https://github.com/marin-community/marin/issues/7331: out of memory at 0.90",
      )
    one = lambda chunks: of_job.rows(factor, chunks) * of_job.width * 2
    if have and one(chunks) > have // 10:
      yield _warning(
        f"{of_job.rows(factor, chunks):,} rows that a rank may receive make each buffer of them {_gib(one(chunks))}",
        "buffers that fit several times",
        f"set a smaller per_device_batch_size{rows.more_chunks(of_job, chunks, lambda more: one(more) <= have // 10)}",
        "maxtext-moe-te capacity",
      )
  if config.get("scan_layers") is False and config.get("num_decoder_layers", 0) > 8:
    yield _warning(
      f"scan_layers=false with {config['num_decoder_layers']} layers: compile time and live copies grow with depth",
      "scan_layers=true",
      "set scan_layers=true",
      "seen: 192 live copies of one 1.9 GB array, out of memory at compile time",
    )


@check
def host_memory(machine, job):
  if job.offloaded_bytes:
    limit = _number(job.variables.get(HOST_LIMIT)) or 64
    per_process = job.offloaded_bytes * max(1, job.gpus_per_node // (job.processes_per_node or job.gpus_per_node))
    if per_process * 1.1 > limit * 1e9:
      yield _error(
        f"{_gib(per_process)} offloaded by each process, and XLA's pool of host memory ends at {limit:g} GB",
        "room for them and a tenth more",
        f"set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB={math.ceil(per_process * 1.2 / 1e9)}",
        "https://github.com/openxla/xla/pull/20633",
      )
    total = job.offloaded_bytes * job.gpus_per_node
    if machine.host_memory_bytes and machine.gpus and total > machine.host_memory_bytes:
      yield _error(
        f"{_gib(total)} offloaded on a node with {_gib(machine.host_memory_bytes)} of free memory",
        "memory for them",
        "offload fewer tensors, or a smaller per_device_batch_size",
        "arithmetic",
      )
    if "disable_hlo_passes=rematerialization" not in job.xla_flags:
      yield _warning(
        "offload without --xla_disable_hlo_passes=rematerialization: XLA counts host memory as device memory in that pass and repeats "
        "operations for nothing, once all-gathering the vocabulary 7 times",
        "the pass off where the step fits without it",
        "add xla_disable_hlo_passes=rematerialization to the XLA flags if `doctor --deep` counts .remat instructions",
        "compiled DeepSeek-V3 for 128 GB300 with jaxlib 0.12.0",
      )
  if machine.gpus and job.gpus > 1 and 0 < machine.shared_memory_bytes < 2**30:
    yield _error(
      f"/dev/shm of {machine.shared_memory_bytes / 2**20:.0f} MiB, Docker's default",
      "1 GiB or more for NCCL",
      "docker run --shm-size=8g",
      "NCCL's guide",
    )


@check
def refused(machine, job):
  if job.refused and "maxtext" in machine.packages:
    yield _error(job.refused["found"], job.refused["needed"], job.refused["fix"], "the run's own check")


# Combinations known to be bad


@check
def combinations(machine, job):
  config, options = job.config, job.options
  flags = dict(xla_flags.parse(job.xla_flags))
  captured = str(flags.get("xla_gpu_enable_command_buffer") or "").upper().strip("'\"").split(",")
  sums = math.prod(job.axis(axis) for axis in ("data", "fsdp", "fsdp_transpose", "context"))
  rows = (
    (
      options.get("enabled") and options.get("cast_weights") == "auto" and config.get("num_experts", 1) > 1 and sums > 1
      and config.get("weight_dtype") == "float32" and config.get("dtype") == "bfloat16",
      _note, f"gradients of expert weights summed over {sums} devices in float32", "sums in bfloat16, as MaxText's own, where speed counts",
      "set moe_te.cast_weights=step, or =layer to keep float32", "two H200 with fsdp 2: 262 instead of 229 TFLOP/s/device",
    ),
    (
      config.get("attention") == "cudnn_flash_te" and config.get("packing") is True and config.get("max_segments_per_seq", -1) <= 0,
      _error, "attention=cudnn_flash_te with packing and no max_segments_per_seq", "one of the two",
      "set packing=false, or max_segments_per_seq", "measured with MaxText 0.2.5",
    ),
    (
      config.get("weight_dtype") == "bfloat16" and bool(config.get("num_experts")),
      _note, "weight_dtype=bfloat16: small updates of weights are rounded away", "float32 weights where losses count",
      "set weight_dtype=float32 if memory allows", "MaxText commit 5ae391c17 removed it from its examples",
    ),
    (
      "COLLECTIVES" in captured or "+COLLECTIVES" in captured,
      _error, "COLLECTIVES in xla_gpu_enable_command_buffer", "collectives outside CUDA graphs", "remove COLLECTIVES",
      "https://github.com/marin-community/marin/pull/8277: hang at step 838",
    ),
    (
      job.expert_parallel and "CUSTOM_CALL" in captured and job.variables.get("NVTE_EP_HANDLE_CACHE_SIZE") != "-1",
      _warning, "CUSTOM_CALL in xla_gpu_enable_command_buffer: replayed NCCL EP calls miss Transformer Engine's cache of handles",
      "an unlimited cache, or the calls outside CUDA graphs", "set NVTE_EP_HANDLE_CACHE_SIZE=-1, or remove CUSTOM_CALL",
      "Transformer Engine 2.20: NVTE_EP_HANDLE_CACHE_SIZE",
    ),
    (
      _number(flags.get("xla_gpu_experimental_parallel_collective_overlap_limit")) > 1,
      _warning, "a collective overlap limit above 1: gradients were seen not to repeat, or the run to hang",
      "a limit of 1 until it is tried",
      "set xla_gpu_experimental_parallel_collective_overlap_limit=1, or compare three runs", "a 704-GB200 run, 2026-09-30",
    ),
    (
      xla_flags.is_multi_stream(flags) and job.config and job.gpus <= job.domain and not _number(flags.get(xla_flags.OVERLAP_LIMIT)) > 1,
      _note, f"multi-stream flags on one NVLink domain of {job.domain} GPUs: every collective is in it, so nothing overlaps",
      "more than one domain, or nothing", "remove them", "https://github.com/openxla/xla/pull/47091",
    ),
    (
      xla_flags.is_multi_stream(flags) and flags.get(xla_flags.SCHEDULER, "false") in ("false", "0"),
      _warning, "multi-stream flags without xla_gpu_enable_latency_hiding_scheduler: nothing is scheduled to overlap", "the scheduler on",
      f"add {xla_flags.SCHEDULER}=true", "compiled with 0.11.2",
    ),
    (
      job.expert_parallel and xla_flags.is_multi_stream(flags),
      _warning, "NCCL EP beside multi-stream collectives: XLA's guard against deadlock does not see NCCL EP's calls", "a long trial run",
      "run `doctor --deep` for the pairs, and a soak test", "XLA: gpu_latency_hiding_scheduler.cc treats custom calls as opaque",
    ),
    (
      job.axis("expert") > 32 and options.get("enabled") is False,
      _error, f"MaxText's own ragged all-to-all on an expert axis of {job.axis('expert')}", "at most 32 ranks for XLA's one-shot kernel",
      "set moe_te.enabled=true, or xla_gpu_unsupported_use_ragged_all_to_all_one_shot_kernel=false", "https://github.com/openxla/xla/issues/47283",
    ),
    (
      options.get("enabled") is False and config.get("num_experts", 1) > 1 and bool(machine.gpus),
      _warning, "moe_te.enabled=false: MaxText's own expert products", "Transformer Engine's, 6 to 97 times faster on H200",
      "remove moe_te.enabled=false", "tests/benchmarks/results",
    ),
    (
      job.variables.get("NVTE_FUSED_ATTN") == "0" and config.get("attention") == "cudnn_flash_te",
      _error, "NVTE_FUSED_ATTN=0 with attention=cudnn_flash_te: attention is computed unfused", "fused attention", "unset NVTE_FUSED_ATTN",
      "Transformer Engine's environment variables",
    ),
    (
      bool(config.get("compile_xla_flags")) and job.variables.get("JAX_ENABLE_PGLE", "").lower() in ("1", "true"),
      _error, "compile_xla_flags with JAX_ENABLE_PGLE: MaxText drops those flags", "flags in XLA_FLAGS",
      "move them to the overlay's xla_flags",
      "MaxText: train.py skips compilation ahead of time under PGLE",
    ),
    (
      _number(flags.get("xla_gpu_memory_limit_slop_factor")) > 95 and bool(machine.gpus) and not config.get("tensors_to_offload"),
      _note, f"xla_gpu_memory_limit_slop_factor={flags.get('xla_gpu_memory_limit_slop_factor')} without offload", "95, XLA's default",
      "remove it if the run is out of memory", "JAX-Toolbox: GPU_performance.md recommends the default",
    ),
    (
      job.variables.get("NCCL_DEBUG", "").upper() in ("TRACE", "INFO") and job.gpus > 8,
      _note, f"NCCL_DEBUG={job.variables.get('NCCL_DEBUG')}: every rank writes its log", "WARN", "set NCCL_DEBUG=WARN", "NCCL's guide",
    ),
    (
      job.variables.get("CUDA_LAUNCH_BLOCKING") == "1",
      _error, "CUDA_LAUNCH_BLOCKING=1: nothing overlaps", "asynchronous launches", "unset CUDA_LAUNCH_BLOCKING", "CUDA",
    ),
  )  # fmt: skip
  for wrong, make, found, needed, fix, source in rows:
    if wrong:
      yield make(found, needed, fix, source)


def _number(text):
  try:
    return float(text or 0)
  except ValueError:
    return 0.0


def _flags(job, names):
  for finding in xla_flags.check(job.xla_flags, names, job.variables):
    yield (_error if finding.fatal else _warning)(finding.found, finding.needed, finding.fix, "settings/xla_flags.toml")


# What a stop costs


@check
def resuming(machine, job):
  config = job.config
  if job.gpus < 2 or "enable_checkpointing" not in config:
    return
  if not config["enable_checkpointing"]:
    yield _note(
      "enable_checkpointing=false: a run that ends before its last step loses everything",
      "checkpoints, if it is to resume",
      "set enable_checkpointing=true enable_autocheckpoint=true",
      "MaxText: checkpointing.py",
    )
  elif not config.get("enable_autocheckpoint") and not config.get("enable_continuous_checkpointing"):
    yield _warning(
      f"enable_autocheckpoint=false: a stop or a preemption (SIGTERM) saves nothing; checkpoint_period={config['checkpoint_period']} of "
      f"{config['steps']} steps",
      "a checkpoint at the stop, if the run is to resume there",
      "set enable_autocheckpoint=true",
      "MaxText: checkpointing.py, should_save_checkpoint",
    )


# Across machines


def compare(machines: dict[str, Machine]) -> list[Finding]:
  """Where the machines of one job differ, with the rank that differs from most.

  Args:
    machines: by rank or host.
  """
  return list(_differences({rank: machine.fingerprint() for rank, machine in machines.items()}))


def _differences(told):
  for name in sorted({name for values in told.values() for name in values}):
    by_value = {}
    for rank, values in told.items():
      by_value.setdefault(values.get(name, "none"), []).append(rank)
    if len(by_value) > 1:
      most = max(by_value, key=lambda value: len(by_value[value]))
      for value, ranks in by_value.items():
        if value != most:
          yield _error(
            f"{name} is {value} on {', '.join(ranks)} and {most} on {len(by_value[most])} others",
            "the same everywhere",
            f"give {', '.join(ranks)} what the others have",
            "https://github.com/marin-community/marin/issues/8870: one rack of 11 hung",
          )
