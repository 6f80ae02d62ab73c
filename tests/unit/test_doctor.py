"""The doctor: every finding is triggered by made-up facts and says what it must; a healthy machine and job have none."""

import dataclasses
import json
import subprocess
import sys
import time
import types

import pytest

from maxtext_moe_te.errors import OptionError, OverlayError, RefusedError, VersionError
from maxtext_moe_te.settings.config import MoeTeOptions
from maxtext_moe_te.settings.overlay import Overlay
from maxtext_moe_te.settings.xla_flags import Names
from maxtext_moe_te.tools import deep, described, doctor
from maxtext_moe_te.tools.doctor import checks, facts, probes, resolve
from maxtext_moe_te.tools.doctor.facts import Gpu, Job, Library, Machine
from tests import te_stub

GIB = 2**30
H200 = Gpu(name="NVIDIA H200", capability="9.0", memory_bytes=141 * GIB)
B200 = Gpu(name="NVIDIA B200", capability="10.0", memory_bytes=178 * GIB)
LIB = "/opt/lib"
PACKAGES = {
  "maxtext": "0.2.5", "jax": "0.12.0.1", "jaxlib": "0.12.0.1", "jax-cuda13-plugin": "0.12.0.1", "jax-cuda13-pjrt": "0.12.0.1",
  "transformer-engine": "2.20.2", "transformer-engine-jax": "2.20.2", "transformer-engine-cu13": "2.20.2",
}  # fmt: skip
LIBRARIES = {
  "libcuda.so.1": Library(path=f"{LIB}/libcuda.so.1"),
  "libcublasLt.so.13": Library(path=f"{LIB}/libcublasLt.so.13", version=131000),
  "libnccl.so.2": Library(path=f"{LIB}/libnccl.so.2", version=23203),
  "libcudnn.so.9": Library(path=f"{LIB}/libcudnn.so.9", version=91900),
  "libcurand.so.10": Library(path=f"{LIB}/libcurand.so.10"),
}
MACHINE = Machine(
  python="3.12.1",
  packages=PACKAGES,
  gpus=(H200,) * 8,
  driver="580.159",
  libraries=LIBRARIES,
  nccl_files={f"{LIB}/libnccl.so.2": 23203},
  cudnn_parts={part: f"{LIB}/libcudnn_{part}.so.9" for part in facts.CUDNN_PARTS},
  nccl_headers=23203,
  nvcc="/usr/bin/nvcc",
  gxx="/usr/bin/g++",
  te={"problems": {}, "serves_hopper": True, "borrows": True, "nccl_floor": None},
  host_memory_bytes=2000 * GIB,
  shared_memory_bytes=64 * GIB,
)
# Qwen3-30B-A3B's shape on 8 GPUs.
CONFIG = dict(
  model_name="qwen3-30b-a3b", decoder_block="qwen3_moe", hardware="gpu", dtype="bfloat16", weight_dtype="float32", mu_dtype="float32",
  attention="cudnn_flash_te", attention_type="global", packing=False, max_segments_per_seq=-1, quantization="", num_experts=128,
  num_experts_per_tok=8, emb_dim=2048, moe_mlp_dim=768, num_decoder_layers=48, first_num_dense_layers=0, num_query_heads=32, num_kv_heads=4,
  head_dim=128, kv_lora_rank=0, q_lora_rank=0, max_target_length=1024, per_device_batch_size=4, micro_batch_size_to_train_on=32,
  gradient_accumulation_steps=1, scan_layers=True, tensors_to_offload=[], eval_interval=-1, moe_expert_input_dim=-1, num_slices=1,
  compile_xla_flags="", axis_sizes={"data": 1, "fsdp": 2, "expert": 4, "tensor": 1},
)  # fmt: skip
VARIABLES = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.85"}
JOB = Job(gpus_per_node=8, config=CONFIG, options=MoeTeOptions(experts="te", cast_weights="step").as_dict(), variables=VARIABLES)


def machine(packages=None, libraries=None, **changes):
  """The healthy machine with changes; of packages and libraries, None takes one away."""
  merge = lambda base, more: {name: value for name, value in {**base, **(more or {})}.items() if value is not None}
  return dataclasses.replace(MACHINE, packages=merge(PACKAGES, packages), libraries=merge(LIBRARIES, libraries), **changes)


def job(config=None, options=None, variables=None, axes=None, **changes):
  config = {**CONFIG, **(config or {})}
  config["axis_sizes"] = {**CONFIG["axis_sizes"], **(axes or {})}
  return dataclasses.replace(
    JOB, config=config, options={**JOB.options, **(options or {})}, variables={**VARIABLES, **(variables or {})}, **changes
  )


SAVING = dict(enable_checkpointing=True, enable_autocheckpoint=False, checkpoint_period=10000, steps=150)


def said(of_machine=MACHINE, of_job=JOB, names=None):
  return [(finding.severity, str(finding)) for finding in checks.examine(of_machine, of_job, names=names)]


def test_a_run_that_saves_at_a_stop_has_no_findings():
  for saves in ("enable_autocheckpoint", "enable_continuous_checkpointing"):
    assert said(of_job=job({**SAVING, saves: True})) == []


def test_a_healthy_machine_and_job_have_no_findings():
  assert said() == []


KNOWN = dict(version="0.2.5", metadata="0.2.5", standing="source 0.2.5 in /x, known to the plugin", known=True, digest="a")
OFF = dict(found="something else", needed="b", fix="c")
UNKNOWN = KNOWN | dict(standing="source 0.2.5 in /x, not known to the plugin: permute [+7: x = 2]", known=False, digest="b")
LARGE = {"emb_dim": 4096, "moe_mlp_dim": 1536}  # fits without Adam's moments
E, W, N = checks.ERROR, checks.WARNING, checks.NOTE
CASES = {
  # packages
  "maxtext missing": (machine({"maxtext": None}), JOB, E, "maxtext cannot be imported; needed: MaxText's container"),
  "maxtext known": (machine(maxtext=KNOWN), JOB, N, "MaxText: source 0.2.5 in /x, known to the plugin; needed: "),
  "maxtext not known": (machine(maxtext=UNKNOWN), job(config=None), W, "not known to the plugin: permute [+7: x = 2]; needed: "),
  "maxtext equal by numbers": (machine(maxtext=UNKNOWN), job(selfcheck="self-check of MaxText"), N, "self-check of MaxText; needed: "),
  "maxtext not equal": (
    machine(maxtext=UNKNOWN),
    job(refused=OFF, selfcheck=OFF["found"]),
    E,
    "something else; needed: b. Fix: c",
  ),
  "hidden gpus": (
    machine(variables={"CUDA_VISIBLE_DEVICES": "0,1"}),
    JOB,
    W,
    "a job of 8 GPUs per node, and CUDA_VISIBLE_DEVICES=0,1 hides 6 of 8 here; needed: all of them, or a value of its own for each process",
  ),
  "gpus hidden by the overlay": (machine(), job(variables={"CUDA_VISIBLE_DEVICES": ""}), E, "CUDA_VISIBLE_DEVICES='' hides the 8 GPUs"),
  "jax missing": (machine({"jax": None}), JOB, E, "jax is not installed; needed: jax 0.11.1 or newer"),
  "jax without a function": (machine(jax_refused=dict(found="a", needed="b", fix="c")), JOB, E, "a; needed: b. Fix: c. [JAX's own source]"),
  "jax gives wrong gradients": (
    machine({"jax": "0.11.0", "jaxlib": "0.11.0", "jax-cuda13-plugin": "0.11.0", "jax-cuda13-pjrt": "0.11.0"}),
    JOB,
    E,
    "jaxlib 0.11.0 is installed; needed: 0.11.1 or newer (0.10.2 and 0.11.0 give wrong gradients when tensors are offloaded",
  ),
  "jax 0.11.2 crashes": (
    machine({"jax": "0.11.2", "jaxlib": "0.11.2", "jax-cuda13-plugin": "0.11.2", "jax-cuda13-pjrt": "0.11.2"}),
    JOB,
    W,
    "jaxlib 0.11.2: its compiler crashes on zero-element constants",
  ),
  "jaxlib differs": (machine({"jaxlib": "0.11.2"}), JOB, E, "jax 0.12.0.1 beside jaxlib 0.11.2; needed: the same version of both"),
  "plugin left unused": (
    machine({"jax-cuda13-plugin": "0.12.0"}),
    JOB,
    E,
    "jax-cuda13-plugin 0.12.0 beside jaxlib 0.12.0.1: JAX leaves a plugin of another version unused and runs on the CPU",
  ),
  "no cuda plugin": (
    machine({"jax-cuda13-plugin": None, "jax-cuda13-pjrt": None}),
    JOB,
    E,
    "8 GPUs and a jax without a CUDA plugin, which runs on the CPU; needed: jax with CUDA. Fix: pip install 'jax[cuda13]'",
  ),
  "old python": (machine(python="3.11.9"), JOB, E, "Python 3.11.9 with jax 0.12.0.1; needed: Python 3.12 or newer"),
  "two CUDA packages": (
    machine({"jax-cuda12-plugin": "0.12.0.1"}),
    JOB,
    E,
    "jax-cuda12-plugin beside packages for CUDA 13; needed: one CUDA major version in a process. Fix: pip uninstall jax-cuda12-plugin",
  ),
  "two CUDA libraries": (
    machine(libraries={"libcublasLt.so.12": Library(path="/usr/lib/libcublasLt.so.12", version=120900)}),
    JOB,
    W,
    "the loader finds /usr/lib/libcublasLt.so.12 and /opt/lib/libcublasLt.so.13",
  ),
  "te missing": (machine({"transformer-engine": None}, te={}), JOB, E, "Transformer Engine is not installed"),
  "te missing, its router asked for": (
    machine({"transformer-engine": None}, te={}),
    job(options={"experts": "auto", "router": "te"}),
    E,
    "Transformer Engine is not installed",
  ),
  **{
    f"te without what {part} calls, {severity}": (
      machine(te={"problems": {part: dict(found="a", needed="b", fix="c")}}),
      job(options={"experts": "auto", **options}),
      severity,
      "a; needed: b. Fix: c.",
    )
    for part, options, severity in (
      ("context", {}, E),
      ("experts", {"experts": "te"}, E),
      ("experts", {}, W),
      ("router", {"router": "te"}, E),
      ("mxfp8", {"recipe": "mxfp8"}, E),
      ("nccl_ep", {}, W),
      ("nccl_ep", {"transport": "nccl_ep"}, E),
    )
  },
  "te that lacks something, without a run": (
    machine(te={"problems": {"router": dict(found="a", needed="b", fix="c")}}, gpus=()),
    Job(),
    W,
    "a; needed: b. Fix: c.",
  ),
  "te that is not for Hopper": (
    machine({"transformer-engine": "2.20.0.dev0"}, te={"serves_hopper": False}),
    JOB,
    E,
    "a Hopper GPU with transformer-engine 2.20.0.dev0, which gives its grouped GEMM a scale for each expert; needed: one scale for all",
  ),
  "te python against its library": (
    machine({"transformer-engine-cu13": "2.19.0"}),
    JOB,
    E,
    "transformer-engine 2.20.2 beside transformer-engine-cu13 2.19.0: Python calls that its library does not have",
  ),
  "te extension against cuDNN": (
    machine(te_extension_error="x.so: undefined symbol: cudnnGetExecutionPlanWorkspaceSize"),
    JOB,
    E,
    "Transformer Engine's JAX extension does not load: x.so: undefined symbol: cudnnGetExecutionPlanWorkspaceSize; needed: the "
    "libraries it was built against",
  ),
  "no curand": (machine(libraries={"libcurand.so.10": None}), JOB, E, "no libcurand.so.10, which jax[cuda13] does not bring"),
  "te before jax": (
    machine(imported_at_start=("transformer_engine", "jax")),
    JOB,
    E,
    "a fresh interpreter imports transformer_engine before jax",
  ),
  # libraries
  "cuDNN from two folders": (
    machine(cudnn_parts={"graph": "/usr/lib/libcudnn_graph.so.9"}),
    JOB,
    E,
    "cuDNN is loaded from /opt/lib and its sub-libraries from /usr/lib: CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED, after which Transformer "
    "Engine computes attention unfused and says nothing; needed: all of cuDNN from one folder. Fix: put /opt/lib first in LD_LIBRARY_PATH",
  ),
  "cuDNN incomplete": (
    machine(cudnn_parts={"ops": f"{LIB}/libcudnn_ops.so.9"}),
    JOB,
    E,
    "cuDNN in /opt/lib lacks its sub-library libcudnn_graph",
  ),
  "cuDNN old": (
    machine(libraries={"libcudnn.so.9": Library(path=f"{LIB}/libcudnn.so.9", version=91100)}),
    JOB,
    E,
    "cuDNN 9.11.0 at run time; needed: 9.12 or newer",
  ),
  "cuBLAS old": (
    machine(libraries={"libcublasLt.so.13": Library(path=LIB, version=130200)}),
    JOB,
    E,
    "cuBLAS 13.2.0 at run time; needed: 13.4.0 or newer for this GPU",
  ),
  "cuBLAS old, MXFP8": (
    machine(libraries={"libcublasLt.so.13": Library(path=LIB, version=130200)}, gpus=(B200,) * 8),
    job(options={"experts": "auto", "recipe": "mxfp8"}),
    E,
    "cuBLAS 13.2.0 at run time; needed: 13.3.0 or newer for this GPU",
  ),
  "cuBLAS corrupts": (
    machine(libraries={"libcublasLt.so.13": Library(path=LIB, version=130700)}),
    JOB,
    E,
    "cuBLAS 13.7.0 at run time; needed: 13.4.0 or newer",
  ),
  "cuBLAS missing": (machine(libraries={"libcublasLt.so.13": None}), JOB, E, "no libcublasLt.so.13 on the loader's path"),
  "several NCCL": (
    machine(nccl_files={"/a/libnccl.so.2": 23203, "/b/libnccl.so.2": 23007}),
    JOB,
    E,
    "several NCCL: /a/libnccl.so.2 (2.32.3), /b/libnccl.so.2 (2.30.7); needed: one NCCL",
  ),
  "NCCL old": (
    machine(libraries={"libnccl.so.2": Library(path=LIB, version=23007)}, nccl_headers=23007),
    JOB,
    W,
    "NCCL 2.30.7 at run time; needed: 2.32.3 or newer for NCCL EP",
  ),
  "NCCL old, NCCL EP asked for": (
    machine(libraries={"libnccl.so.2": Library(path=LIB, version=23007)}, nccl_headers=23007),
    job(options={"transport": "nccl_ep"}),
    E,
    "NCCL 2.30.7 at run time; needed: 2.32.3 or newer for NCCL EP",
  ),
  "NCCL missing": (machine(libraries={"libnccl.so.2": None}), JOB, E, "no libnccl.so.2; needed: NCCL for more than one GPU"),
  # GPUs
  "no GPU": (machine(gpus=()), job(options={"experts": "auto"}), N, "no GPU here: kernels, links and memory are not judged"),
  "GPUs hidden": (machine(variables={"CUDA_VISIBLE_DEVICES": ""}), JOB, E, "CUDA_VISIBLE_DEVICES='' hides the 8 GPUs"),
  "jax on the CPU": (machine(variables={"JAX_PLATFORMS": "cpu"}), JOB, E, "JAX_PLATFORMS=cpu with hardware=gpu; needed: JAX on the GPUs"),
  "mixed GPUs": (machine(gpus=(H200,) * 4 + (B200,) * 4), JOB, E, "GPUs of several kinds: NVIDIA B200, NVIDIA H200"),
  "MIG": (machine(gpus=(dataclasses.replace(H200, mig=True),) * 8), JOB, E, "MIG is on, and NCCL cannot connect slices of GPUs"),
  "driver old": (machine(driver="550.54"), JOB, E, "driver 550.54; needed: 580 or newer for CUDA 13"),
  "GPU in use": (
    machine(gpus=(*(H200,) * 7, dataclasses.replace(H200, used_bytes=60 * GIB))),
    JOB,
    W,
    "GPU 7 has 60.0 GiB of 141.0 GiB in use before the run",
  ),
  "fewer GPUs than the job wants": (machine(gpus=(H200,) * 4), JOB, E, "a job of 8 GPUs per node on a machine with 4"),
  "mxfp8 on Hopper": (
    MACHINE,
    job(options={"recipe": "mxfp8"}),
    E,
    "moe_te.recipe=mxfp8 on a GPU of compute capability 9.0; needed: Blackwell (10.0) or newer. Fix: set moe_te.recipe=bf16",
  ),
  "mxfp8 attention on Hopper": (MACHINE, job({"quantization": "te_mxfp8"}), E, "quantization=te_mxfp8 on NVIDIA H200; needed: Blackwell"),
  "A100": (
    machine(gpus=(dataclasses.replace(H200, capability="8.0"),) * 8),
    JOB,
    E,
    "a GPU of compute capability 8.0; needed: Hopper (9.0) or data-centre Blackwell",
  ),
  "bf16 on Blackwell": (machine(gpus=(B200,) * 8), JOB, N, "NVIDIA B200 computes expert products in MXFP8 too"),
  # expert parallelism
  "no nvcc": (machine(nvcc=None), JOB, W, "no nvcc; the run takes XLA's slower collectives; needed: a compiler: NCCL EP compiles"),
  "no nvcc, NCCL EP asked for": (machine(nvcc=None), job(options={"transport": "nccl_ep"}), E, "no nvcc; needed: a compiler"),
  "no g++": (machine(gxx=None), JOB, W, "no g++; the run takes XLA's slower collectives"),
  "NCCL headers differ": (machine(nccl_headers=23007), JOB, W, "headers of NCCL 2.30.7 beside NCCL 2.32.3"),
  "no NCCL headers": (machine(nccl_headers=None), job(options={"transport": "nccl_ep"}), E, "no NCCL headers beside NCCL 2.32.3; needed"),
  "cache not writable": (machine(jit_cache=False), JOB, W, "NCCL EP's kernel cache cannot be written"),
  "peer access off in the overlay": (MACHINE, job(variables={"NCCL_P2P_DISABLE": "1"}), E, "NCCL_P2P_DISABLE=1 with NCCL EP"),
  "no peer access": (machine(no_peer_access=((0, 4), (1, 5))), JOB, E, "GPUs 0-4, 1-5 have no peer-to-peer access"),
  "peer access off": (machine(variables={"NCCL_P2P_DISABLE": "1"}), JOB, E, "NCCL_P2P_DISABLE=1 with NCCL EP"),
  "experts across domains": (
    MACHINE,
    job({"micro_batch_size_to_train_on": 64}, axes={"fsdp": 1, "expert": 16}, nodes=2),
    W,
    "an expert axis of 16 over NVLink domains of 8 GPUs; needed: an expert axis inside one domain, or RDMA with GIN. Fix: set "
    "ici_expert_parallelism=8",
  ),
  "44 ranks of one rack": (
    machine(gpus=(B200,) * 8),
    job({"micro_batch_size_to_train_on": 256}, axes={"fsdp": 1, "expert": 64}, nodes=8, nvlink_domain=72),
    W,
    "an expert axis of 64: NCCL was seen to crash with 44 ranks or more of one NVLink rack; needed: NCCL_MNNVL_ENABLE=0",
  ),
  "several GPUs in a process": (
    machine({"jax": "0.11.1", "jaxlib": "0.11.1", "jax-cuda13-plugin": "0.11.1", "jax-cuda13-pjrt": "0.11.1"}),
    job(processes_per_node=1),
    W,
    "8 GPUs in one process with jax 0.11.1",
  ),
  "several GPUs in a process, te that borrows nothing": (
    machine(te={"borrows": False}),
    job(processes_per_node=1),
    W,
    "8 GPUs in one process with jax 0.12.0.1 and transformer-engine 2.20.2",
  ),
  "one process for a node": (MACHINE, job(processes_per_node=1), W, "1 processes for 8 GPUs of a node; needed: one process per GPU"),
  "a model that NCCL EP cannot serve": (
    machine(nvcc=None),
    job({"nccl_ep_refused": dict(found="a", needed="b", fix="c")}),
    W,
    "a; the run takes XLA's slower collectives; needed: b. Fix: c.",
  ),
  "a model that NCCL EP cannot serve, asked for": (
    MACHINE,
    job({"nccl_ep_refused": dict(found="a", needed="b", fix="c")}, {"transport": "nccl_ep"}),
    E,
    "a; needed: b. Fix: c.",
  ),
  "many tokens": (MACHINE, job({"max_target_length": 4096}), N, "16384 tokens per rank in a call of NCCL EP; needed: 8,192"),
  # mesh
  "mesh and GPUs": (
    MACHINE,
    job(axes={"fsdp": 4}),
    E,
    "a mesh of 16 devices (fsdp 4 x expert 4) on 1 x 8 = 8 GPUs; needed: as many devices as GPUs. Fix: set ici_fsdp_parallelism=-1",
  ),
  "experts and axis": (MACHINE, job({"num_experts": 60}, axes={"expert": 8, "fsdp": 1}), E, "num_experts=60 on an expert axis of 8"),
  "heads and tensor axis": (
    MACHINE,
    job(axes={"tensor": 8, "fsdp": 1, "expert": 1}),
    E,
    "4 key-value heads on a tensor axis of 8; needed: as many heads on every rank. Fix: set ici_tensor_parallelism=4",
  ),
  "batch and mesh": (
    MACHINE,
    job({"micro_batch_size_to_train_on": 12}),
    E,
    "a batch of 12 sequences over 8 devices (fsdp 2 x expert 4); needed: a multiple of 8",
  ),
  "batch without an expert axis": (
    MACHINE,
    job({"micro_batch_size_to_train_on": 4}, axes={"fsdp": 8, "expert": 1}),
    W,
    "a batch of 4 sequences over 8 devices (fsdp 8): some compute the same; needed: a multiple of 8",
  ),
  "latent rank and 1,024 GPUs": (
    machine(gpus=(B200,) * 8),
    job(
      {
        "attention_type": "mla",
        "kv_lora_rank": 512,
        "micro_batch_size_to_train_on": 1024,
        "lora_axes": {"kv_lora": {"fsdp": 128, "expert": 8}, "q_lora": {}},
      },
      axes={"fsdp": 128, "expert": 8},
      nodes=128,
      nvlink_domain=64,
    ),
    E,
    "kv_lora_rank=512 split over fsdp 128 x expert 8 = 1024; needed: a divisor of 512, or another rule. Fix: add "
    "logical_axis_rules=[['kv_lora',",
  ),
  "dcn split solved": (
    machine(gpus=(B200,) * 4),
    job({"micro_batch_size_to_train_on": 128}, axes={"fsdp": 16, "expert": 8}, nodes=32, gpus_per_node=4, nvlink_domain=64),
    N,
    "128 GPUs in 2 NVLink domains of 64, and a mesh without dcn_ axes; needed: fast axes inside a domain: the innermost axis is, in "
    "device order. Fix: leave it, or where MaxText sees 2 slices write dcn_fsdp_parallelism=2 ici_fsdp_parallelism=8",
  ),
  # memory
  "experts do not fit": (
    MACHINE,
    job({"num_experts": 512, "emb_dim": 4096, "moe_mlp_dim": 1536}),
    E,
    "weights and optimizer state of the experts alone take 648.0 GiB of each GPU, XLA's pool is 119.8 GiB",
  ),
  "no room for NCCL EP": (
    MACHINE,
    job({"emb_dim": 7168, "num_decoder_layers": 4}, variables={"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.97"}),
    W,
    "beside XLA's pool of 0.97, which leaves 4.2 GiB; needed: room for its buffers, NCCL and CUDA graphs (2 GiB)",
  ),
  "worst case too large": (
    MACHINE,
    job(
      {"emb_dim": 7168, "max_target_length": 12288, "num_decoder_layers": 4},
      options={"capacity_factor": 0.0},
      variables={"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"},
    ),
    W,
    "1,576,960 rows that a rank may receive make each buffer of them 21.1 GiB; needed: buffers that fit several times. Fix: set "
    "a smaller per_device_batch_size, or moe_te.chunks=2",
  ),
  "no checkpoints": (MACHINE, job({**SAVING, "enable_checkpointing": False}), N, "enable_checkpointing=false: a run that ends before its"),
  "a stop saves nothing": (
    MACHINE,
    job(SAVING),
    W,
    "enable_autocheckpoint=false: a stop or a preemption (SIGTERM) saves nothing; checkpoint_period=10000 of 150 steps; needed: a "
    "checkpoint at the stop, if the run is to resume there. Fix: set enable_autocheckpoint=true",
  ),
  "layers not scanned": (MACHINE, job({"scan_layers": False}), W, "scan_layers=false with 48 layers"),
  "pool of host memory": (
    MACHINE,
    job(offloaded_bytes=115 * GIB, xla_flags="--xla_disable_hlo_passes=rematerialization"),
    E,
    "115.0 GiB offloaded by each process, and XLA's pool of host memory ends at 64 GB; needed: room for them and a tenth more. Fix: set "
    "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=149",
  ),
  "host memory": (
    machine(host_memory_bytes=200 * GIB),
    job(offloaded_bytes=40 * GIB, xla_flags="--xla_disable_hlo_passes=rematerialization"),
    E,
    "320.0 GiB offloaded on a node with 200.0 GiB of free memory",
  ),
  "offload and rematerialization": (
    MACHINE,
    job(offloaded_bytes=GIB),
    W,
    "offload without --xla_disable_hlo_passes=rematerialization: XLA counts host memory as device memory",
  ),
  "docker's shared memory": (
    machine(shared_memory_bytes=64 * 2**20),
    JOB,
    E,
    "/dev/shm of 64 MiB, Docker's default; needed: 1 GiB or more",
  ),
  "the run's own refusal": (MACHINE, job(refused=dict(found="a", needed="b", fix="c")), E, "a; needed: b. Fix: c."),
  "experts do not fit with Adam's moments": (MACHINE, job(LARGE), E, "alone take 162.0 GiB of each GPU, XLA's pool is 119.8 GiB"),
  # combinations
  "float32 sums": (
    MACHINE,
    job(options={"cast_weights": "auto"}, axes={"data": 3}),
    N,
    "gradients of expert weights summed over 6 devices in float32",
  ),
  "packing": (MACHINE, job({"packing": True}), E, "attention=cudnn_flash_te with packing and no max_segments_per_seq"),
  "bfloat16 weights": (MACHINE, job({"weight_dtype": "bfloat16"}), N, "weight_dtype=bfloat16: small updates of weights are rounded away"),
  "collectives captured": (
    MACHINE,
    job(xla_flags="--xla_gpu_enable_command_buffer=FUSION,COLLECTIVES"),
    E,
    "COLLECTIVES in xla_gpu_enable_command_buffer",
  ),
  "EP calls captured": (
    MACHINE,
    job(xla_flags="--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL"),
    W,
    "CUSTOM_CALL in xla_gpu_enable_command_buffer: replayed",
  ),
  "overlap limit": (
    MACHINE,
    job(
      xla_flags="--xla_gpu_enable_latency_hiding_scheduler=true --xla_gpu_experimental_enable_collective_multi_streaming=true "
      "--xla_gpu_experimental_parallel_collective_overlap_limit=2"
    ),
    W,
    "a collective overlap limit above 1: gradients were seen not to repeat",
  ),
  "EP beside multi-stream": (
    MACHINE,
    job(xla_flags="--xla_gpu_enable_latency_hiding_scheduler=true --xla_gpu_collective_domain_assignment=scale_up_fabric"),
    W,
    "NCCL EP beside multi-stream collectives: XLA's guard against deadlock does not see NCCL EP's calls",
  ),
  "one domain": (
    MACHINE,
    job(xla_flags="--xla_gpu_enable_latency_hiding_scheduler=true --xla_gpu_collective_domain_assignment=scale_up_fabric"),
    N,
    "multi-stream flags on one NVLink domain of 8 GPUs: every collective is in it, so nothing overlaps",
  ),
  "no scheduler": (
    MACHINE,
    job(xla_flags="--xla_gpu_collective_domain_assignment=scale_up_fabric"),
    W,
    "multi-stream flags without xla_gpu_enable_latency_hiding_scheduler: nothing is scheduled to overlap",
  ),
  "one-shot ragged all-to-all": (
    MACHINE,
    job({"micro_batch_size_to_train_on": 256}, {"enabled": False}, axes={"fsdp": 1, "expert": 64}, nodes=8),
    E,
    "MaxText's own ragged all-to-all on an expert axis of 64; needed: at most 32 ranks",
  ),
  "switched off": (MACHINE, job(options={"enabled": False}), W, "moe_te.enabled=false: MaxText's own expert products"),
  "unfused attention": (MACHINE, job(variables={"NVTE_FUSED_ATTN": "0"}), E, "NVTE_FUSED_ATTN=0 with attention=cudnn_flash_te"),
  "flags dropped under PGLE": (
    MACHINE,
    job({"compile_xla_flags": "--xla_x=1"}, variables={"JAX_ENABLE_PGLE": "true"}),
    E,
    "compile_xla_flags with JAX_ENABLE_PGLE: MaxText drops those flags",
  ),
  "slop factor": (
    MACHINE,
    job(xla_flags="--xla_gpu_memory_limit_slop_factor=99"),
    N,
    "xla_gpu_memory_limit_slop_factor=99 without offload",
  ),
  "blocking launches": (MACHINE, job(variables={"CUDA_LAUNCH_BLOCKING": "1"}), E, "CUDA_LAUNCH_BLOCKING=1: nothing overlaps"),
  "verbose NCCL": (
    MACHINE,
    job({"micro_batch_size_to_train_on": 64}, variables={"NCCL_DEBUG": "info"}, axes={"fsdp": 4}, nodes=2),
    N,
    "NCCL_DEBUG=info: every rank",
  ),
  # flags and their environment, as settings/xla_flags.py finds them
  "one hardware queue": (
    MACHINE,
    job(variables={"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
    W,
    "CUDA_DEVICE_MAX_CONNECTIONS=1 puts all streams on one",
  ),
  "no number": (
    MACHINE,
    job(offloaded_bytes=GIB, variables={"XLA_CLIENT_MEM_FRACTION": "most", "XLA_PYTHON_CLIENT_MEM_FRACTION": ""}),
    E,
    "XLA_CLIENT_MEM_FRACTION=most; needed: a number above 0. Fix: correct or unset XLA_CLIENT_MEM_FRACTION.",
  ),
  "two memory fractions": (
    MACHINE,
    job(variables={"XLA_CLIENT_MEM_FRACTION": "0.8"}),
    E,
    "XLA_CLIENT_MEM_FRACTION=0.8 and XLA_PYTHON_CLIENT_MEM_FRACTION=0.85 are both set",
  ),
  "half a pair": (MACHINE, job(xla_flags="--xla_gpu_experimental_enable_collective_multi_streaming=true"), E, "multi_streaming"),
  "not a boolean": (
    MACHINE,
    job(xla_flags="--xla_gpu_enable_latency_hiding_scheduler=maybe"),
    E,
    "xla_gpu_enable_latency_hiding_scheduler=maybe",
  ),
  "a space in a list": (
    MACHINE,
    job(xla_flags="--xla_gpu_enable_command_buffer=FUSION, CUBLAS"),
    E,
    "XLA reads nothing from there on: CUBLAS",
  ),
}


QUIET = {
  "source that was judged": (machine(maxtext=UNKNOWN), job(refused=OFF, selfcheck=OFF["found"]), "not known to the plugin"),
  "an overlay's variable": (
    machine(gpus=(B200,) * 8),
    job(
      {"micro_batch_size_to_train_on": 256}, variables={"NCCL_MNNVL_ENABLE": "0"}, axes={"fsdp": 1, "expert": 64}, nodes=8, nvlink_domain=72
    ),
    "44 ranks",
  ),
  "MaxText's own layer makes no NCCL EP group": (machine(nvcc=None), job(options={"enabled": False}), "nvcc"),
  "a dense model on an expert axis": (machine(nvcc=None), job({"num_experts": 1}), "nvcc"),
  "a refused group wants no compiler": (
    machine(nvcc=None),
    job({"nccl_ep_refused": dict(found="a", needed="b", fix="c")}),
    "nvcc",
  ),
  "another rule for the latent rank": (
    MACHINE,
    job({"attention_type": "mla", "kv_lora_rank": 512, "lora_axes": {"kv_lora": {"fsdp": 128}}}, axes={"fsdp": 128, "expert": 8}),
    "kv_lora_rank",
  ),
  "te that another part cannot use": (
    machine(te={"problems": {part: dict(found="a", needed="b", fix="c") for part in ("router", "mxfp8", "described")}}),
    JOB,
    "a; needed: b",
  ),
  "te from source, in one package": (machine({"transformer-engine-jax": None, "transformer-engine-cu13": None}), JOB, "transformer-engine"),
  "te of Blackwell alone, there": (machine(gpus=(B200,) * 8, te={"serves_hopper": False}), JOB, "a Hopper GPU"),
  "said by the run's own check already": (
    MACHINE,
    job({"num_experts": 60}, axes={"expert": 8, "fsdp": 1}, refused=dict(found="num_experts=60 on an expert axis of 8", needed="", fix="")),
    "as many experts on every rank",
  ),
  "moments on the host": (MACHINE, job({**LARGE, "optimizer_memory_host_offload": True}), "weights and optimizer state"),
  "no moments": (MACHINE, job({**LARGE, "opt_type": "sgd"}), "weights and optimizer state"),
}


@pytest.mark.parametrize("case", QUIET)
def test_no_finding(case):
  of_machine, of_job, text = QUIET[case]
  assert not [message for _, message in said(of_machine, of_job) if text in message]


@pytest.mark.parametrize("case", CASES)
def test_finding(case):
  of_machine, of_job, severity, text = CASES[case]
  findings = said(of_machine, of_job)
  assert any(found == severity and text in message for found, message in findings), findings
  assert all("Fix: " in message and message.endswith("]") and "[]" not in message for _, message in findings)


def test_there_are_many():
  assert len({text for *_, text in CASES.values()}) >= 80


def test_an_unknown_flag_is_found_by_what_is_installed():
  names = Names(libraries={"jaxlib 0.12.0.1": frozenset({"xla_gpu_enable_latency_hiding_scheduler"})}, version="0.12.0.1")
  findings = said(of_job=job(xla_flags="--xla_gpu_enable_latency_hiding_schedular=true"), names=names)
  assert any("jaxlib 0.12.0.1 has no flag --xla_gpu_enable_latency_hiding_schedular" in text for _, text in findings)


def test_errors_come_first():
  severities = [severity for severity, _ in said(machine(nvcc=None, driver="550.1"), job({"max_target_length": 4096}))]
  assert severities == sorted(severities, key=(E, W, N).index) and set(severities) == {E, W, N}


def test_machine_survives_json():
  changed = machine(no_peer_access=((0, 1),), imported_at_start=("jax",))
  assert facts.machine_from(json.loads(json.dumps(dataclasses.asdict(changed)))) == changed


def test_only_known_variables_are_told(monkeypatch):
  monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
  monkeypatch.setenv("NCCL_DEBUG", "WARN")
  told = facts.gather().variables
  assert told["NCCL_DEBUG"] == "WARN" and "AWS_SECRET_ACCESS_KEY" not in told


# What the user says


def test_a_saved_report_is_judged(tmp_path, capsys):
  saved = tmp_path / "report.json"
  for content in ({"machine": dataclasses.asdict(MACHINE), "version": "0.1.0"}, dataclasses.asdict(MACHINE)):
    saved.write_text(json.dumps(content))
    assert doctor.main(["--machine", str(saved)]) == 0
    assert "8 x NVIDIA H200" in capsys.readouterr().out


NO_REPORTS = [None, b"", b"\xff", b"[1]", b"{}", b'{"machine": 1}', b'{"python": "3", "gpus": [{}]}', b'{"python": "3", "x": 1}']


@pytest.mark.parametrize("content", NO_REPORTS)
def test_a_report_that_is_none(tmp_path, content):
  saved = tmp_path / "report.json"
  if content is not None:
    saved.write_bytes(content)
  with pytest.raises(OptionError, match=r"^--machine .*; needed: a report of this version's doctor --json\. Fix: correct the path"):
    doctor.main(["--machine", str(saved)])


@pytest.mark.parametrize(
  ("words", "text"),
  [
    (["--gpu", "B200"], "--gpu or --topology alone; needed: --deep, which compiles for them."),
    (["--ranks", "x", "--rank", "2", "--rank-count", "2"], "--rank 2 of --rank-count 2; needed: a number from 0"),
    (["overlay="], "'' names no overlay"),
  ],
)
def test_words_that_do_not_fit(words, text):
  with pytest.raises(OptionError if words[0].startswith("-") else OverlayError, match=text):
    doctor.main(words)


@pytest.mark.parametrize("option", ["--nodes", "--gpus-per-node", "--nvlink-domain", "--processes-per-node", "--rank-count"])
def test_counts_are_positive(option, capsys):
  for value, text in (("0", "0 is not 1 or more"), ("x", "invalid int value: 'x'")):
    with pytest.raises(SystemExit, match="2"):
      doctor.main([option, value])
    assert capsys.readouterr().err.endswith(f"error: argument {option}: {text}\n")


def test_the_overlay_of_the_variable_is_judged(monkeypatch):
  monkeypatch.setenv("MAXTEXT_MOE_TE_OVERLAY", "nope")
  with pytest.raises(OverlayError, match="no overlay is called nope, from MAXTEXT_MOE_TE_OVERLAY"):
    doctor.main([])


# Across ranks


def test_the_rank_that_differs_is_named():
  machines = {f"rank {i}": MACHINE for i in range(4)}
  assert checks.compare(machines) == []
  machines["rank 2"] = machine(libraries={"libnccl.so.2": Library(path=LIB, version=23007)})
  (finding,) = checks.compare(machines)
  assert str(finding).startswith("library libnccl.so.2 is 23007 on rank 2 and 23203 on 3 others; needed: the same everywhere")


def test_ranks_meet_in_a_folder(tmp_path, monkeypatch):
  doctor.gather_ranks(tmp_path, MACHINE, rank=0, count=1)
  with pytest.raises(OptionError, match=r"rank-0\.json is of an earlier run; needed: a folder of its own for each run\."):
    doctor.gather_ranks(tmp_path, MACHINE, rank=0, count=1)
  with pytest.raises(OptionError, match=r"rank-0\.json cannot be written: Not a directory"):
    doctor.gather_ranks(tmp_path / "rank-0.json" / "below", MACHINE, rank=0, count=1)
  findings = doctor.gather_ranks(tmp_path, machine(driver="570.1"), rank=1, count=2)
  assert "driver is 5" in str(findings[0]) and "rank 1" in str(findings[0])
  monkeypatch.setattr(doctor, "RANKS_TIMEOUT_S", 0.1)
  (tmp_path / "rank-1.json").unlink()
  findings = doctor.gather_ranks(tmp_path, MACHINE, rank=1, count=3)
  assert [str(f).split(";")[0] for f in findings] == [f"rank 2 of 3 left nothing in {tmp_path} within 0.1 s"]


# Probes


def test_expert_parallelism_is_tried_where_a_job_has_it(monkeypatch):
  tried = []
  monkeypatch.setattr(probes, "_start", lambda name, ranks, one_gpu: (tried.append(name), ({"refused": ""}, None))[1])
  for of_job, expected in ((JOB, True), (Job(), True), (job(axes={"expert": 1, "fsdp": 8}), False)):
    tried.clear()
    probes.run(MACHINE, of_job)
    assert ("expert-parallel" in tried) == expected and {"offload", "grouped-gemm"} <= set(tried)


@pytest.mark.parametrize(
  ("name", "result", "failure", "severity", "text"),
  [
    ("grouped-gemm", {"tflops": 600, "error": 0.003}, None, None, None),
    ("grouped-gemm", {"tflops": 90, "error": 0.003}, None, W, "grouped GEMM reaches 90 TFLOP/s here; needed: 200 or more"),
    ("grouped-gemm", {"tflops": 600, "error": float("nan")}, None, E, "grouped GEMM is off by nan"),
    ("offload", {"equal": True, "error": 0.0}, None, None, None),
    ("offload", {"equal": False, "error": 770.0}, None, E, "is not that of saved ones: relative error 7.7e+02; needed: the same bits"),
    ("expert-parallel", None, "was killed by signal 6: jit", E, "a trial of NCCL EP's dispatch and combine was killed by signal 6: jit"),
    ("expert-parallel", {"refused": "no nvcc"}, None, W, "NCCL EP's dispatch and combine was not tried: no nvcc"),
    ("expert-parallel", {"error": 0.5}, None, E, "NCCL EP's dispatch and combine is off by 5.0e-01"),
  ],
)
def test_probes_are_judged(name, result, failure, severity, text):
  findings = [(finding.severity, str(finding)) for finding in probes.judge(name, result, failure, "9.0")]
  assert findings == [] if text is None else (findings[0][0] == severity and text in findings[0][1])


def test_a_probe_that_dies_is_a_finding():
  result, failure = probes._start("no-such-probe", 1, one_gpu=True)
  assert result is None and failure.startswith("ended with status 1: ") and "no-such-probe" in failure


def test_a_rank_that_dies_ends_its_probe(monkeypatch, tmp_path):
  """The other one waits for it, as ranks do."""
  python = tmp_path / "python"
  python.write_text('#!/bin/sh\nif [ "$4" = 1 ]; then echo "no device 1" >&2; exit 3; fi\nexec sleep 100\n')
  python.chmod(0o755)
  monkeypatch.setattr(probes.sys, "executable", str(python))
  assert probes._start("expert-parallel", 2, one_gpu=False) == (None, "ended with status 3: no device 1")


@pytest.mark.parametrize(
  ("asked", "shown"),
  [
    (None, range(8)), ("0,1", (0, 1)), ("7", (7,)), ("", ()), ("-1", ()), ("0,9,1", (0,)), ("GPU-5,1", (5, 1)), ("GPU-,1", ()),
    (" 2 , 3 ", (2, 3)), ("0,0", ()), ("1,GPU-1", ()), ("\u00b2", ()), ("MIG-7a,MIG-7b", ()),
  ],
)  # fmt: skip
def test_only_visible_gpus_are_judged(asked, shown):
  gpus = tuple(dataclasses.replace(H200, uuid=f"GPU-{index}-abc") for index in range(8))
  whole = machine(gpus=gpus, no_peer_access=((0, 1), (2, 3)))
  seen = facts.seen(whole, {} if asked is None else {"CUDA_VISIBLE_DEVICES": asked})
  assert [gpu.index for gpu in seen.gpus] == list(shown) and seen.hidden == 8 - len(shown)
  assert set(seen.no_peer_access) == {pair for pair in ((0, 1), (2, 3)) if set(pair) <= set(shown)}


def test_a_slice_of_a_gpu_is_one():
  sliced = machine(gpus=(H200, dataclasses.replace(H200, mig=True)))
  assert [gpu.index for gpu in facts.seen(sliced, {"CUDA_VISIBLE_DEVICES": "MIG-7a,MIG-7b"}).gpus] == [1]


def test_the_kind_of_gpu_is_that_of_a_visible_one():
  """An older one beside it does not count once it is hidden, as the doctor advises."""
  old = Gpu(name="NVIDIA A100", capability="8.0", memory_bytes=80 * GIB)
  two = machine(gpus=(old, H200), variables={"CUDA_VISIBLE_DEVICES": "1"})
  one = dataclasses.replace(JOB, gpus_per_node=1, config={**CONFIG, "axis_sizes": {"fsdp": 1, "expert": 1}, "num_decoder_layers": 2})
  assert [str(finding) for finding in checks.examine(two, one) if finding.severity == E] == []


# A compiled step


def test_a_plugin_without_descriptions_is_said(monkeypatch, tmp_path):
  (tmp_path / "xla_cuda_plugin.so").write_bytes(b"\0binary\0")
  found = types.SimpleNamespace(submodule_search_locations=[str(tmp_path)])
  monkeypatch.setattr(described.importlib.util, "find_spec", lambda name: found)
  with pytest.raises(RefusedError, match=r"no descriptions of GPUs in .*xla_cuda_plugin.so; needed: .* from 0\.12 on"):
    described.target("H200")
  (tmp_path / "xla_cuda_plugin.so").unlink()
  with pytest.raises(RefusedError, match=r"no .*xla_cuda_plugin.so; needed: the CUDA plugin whole"):
    described.target("H200")


def deep_result(**changes):
  streams = dict(collectives=15, in_domain=9, eligible=8, overlapped=[["a", "b"]], hazards=[], expert_calls=0)
  figures = dict(host_bytes=100, device_temporary_bytes=50, device_peak_bytes=10, remat_instructions=0, streams=streams)
  variants = {name: {**figures, "streams": dict(streams)} for name in ("device", "offload", *deep.PROFILES)}
  variants["device"] |= {"host_bytes": 0, "device_temporary_bytes": 150}
  result = dict(
    devices=8, gpu="NVIDIA H200", mesh={"fsdp": 8}, layers=48, attention="x", names=["query_proj"], asked=True, no_offload="",
    expected_host_bytes=100,
    device_memory_bytes=20, variants=variants,
  )  # fmt: skip
  for path, value in changes.items():
    name, _, key = path.partition("__")
    target = variants[name.replace("_", "-")]
    (target["streams"] if key in streams else target)[key] = value
  return result


@pytest.mark.parametrize(
  ("changes", "severity", "text"),
  [
    (dict(offload__host_bytes=98), E, "offload of query_proj puts 0.0 MiB into host memory"),
    (dict(offload__remat_instructions=137), W, "XLA repeats 137 operations to save memory, counting host memory as device memory"),
    (dict(offload__device_peak_bytes=21), E, "the step needs 0.0 GiB (offload) and the GPU has 0.0"),
    (
      dict(multistream_aggressive__hazards=[["reduce-scatter.8", "all-gather.53"]]), W,
      "multistream-aggressive: 1 pairs of collectives on the same GPUs may run at once, such as reduce-scatter.8 beside all-gather.53",
    ),
    (dict(multistream_domain__overlapped=[]), N, "multistream-domain overlaps no pair of collectives on different streams; 8 pairs could"),
  ],
)  # fmt: skip
def test_a_compiled_step_is_judged(changes, severity, text):
  assert deep.findings(deep_result()) == []
  (finding,) = deep.findings(deep_result(**changes))
  assert finding.severity == severity and text in str(finding)


def test_a_profile_without_streams_need_not_overlap():
  result = deep_result(multistream_domain__overlapped=[])
  result["variants"]["published"] = result["variants"].pop("multistream-domain")
  assert deep.findings(result) == []


def test_offload_that_nobody_asked_for_is_no_error():
  result = deep_result(offload__host_bytes=98) | {"asked": False}
  assert [finding.severity for finding in deep.findings(result)] == [W]
  result = deep_result() | {"names": [], "no_offload": "x", "expected_host_bytes": 0}
  del result["variants"]["offload"]
  (finding,) = deep.findings(result)
  assert finding.severity == N and "no offload was compiled: x" in str(finding)
  assert "MiB in host memory" not in deep.text(result)


WANTED = dict(router="te", experts="te", transport="auto", recipe="mxfp8")
ALL = "moe_te.experts=ragged_dot, moe_te.recipe=bf16, moe_te.router=jax, moe_te.transport=xla, attention=cudnn_flash_jax, quantization="


@pytest.mark.parametrize(
  ("engine", "config", "options", "stand_ins"),
  [
    (None, {"quantization": "te_mxfp8"}, WANTED, f"{ALL} [Transformer Engine is not installed]"),
    (None, {"attention": "dot_product"}, {"enabled": False, **WANTED}, ""),
    (None, {"attention": "dot_product", "num_experts": 1}, WANTED, ""),
    (
      None, {"axis_sizes": {"expert": 1}, "attention": "dot_product"}, dict(experts="auto"),
      "moe_te.experts=ragged_dot [Transformer Engine is not installed]",
    ),
    (None, {"attention": "dot_product"}, dict(experts="ragged_dot", transport="xla"), ""),
    ("2.20.2", {}, WANTED, ""),
    (
      "main", {}, dict(experts="te"),
      "moe_te.transport=xla [transformer-engine 2.20.0.dev0 makes its communicators at once, which takes GPUs]",
    ),
  ],
)  # fmt: skip
def test_what_cannot_be_compiled_has_a_stand_in_that_is_named(monkeypatch, tmp_path, engine, config, options, stand_ins):
  """Without Transformer Engine, or with one that cannot be pretended to, the step is compiled all the same; the report says with what."""
  if engine:
    te_stub.install(monkeypatch, tmp_path, engine)
  else:
    monkeypatch.setattr(deep.te_api, "find", lambda: None)
  request = deep.Request(words=("base.yml", "model_name=x"), options={"experts": "te"})
  config = {**CONFIG, **config}
  changed = deep.without_engine(request, config, MoeTeOptions().as_dict() | options)
  assert changed.stand_ins == stand_ins
  chosen = dict(word.split("=") for word in stand_ins.partition(" [")[0].split(", ") if word)
  assert changed.options == {"experts": "te"} | {key[7:]: value for key, value in chosen.items() if key.startswith("moe_te.")}
  assert changed.words == (*request.words, *(f"{key}={value}" for key, value in chosen.items() if not key.startswith("moe_te.")))

  result = deep_result() | {"stand_ins": stand_ins}
  assert [finding.severity for finding in deep.findings(result)] == ([N] if stand_ins else [])
  assert (f"with stand-ins for Transformer Engine: {stand_ins}" in deep.text(result)) == bool(stand_ins)


def test_without_transformer_engine_the_step_is_compiled(monkeypatch, capsys):
  """Its absence is said once, and does not keep the rest from being looked at."""
  asked = []
  monkeypatch.setattr(doctor.facts, "gather", lambda: machine({"transformer-engine": None}, te={}, gpus=()))
  monkeypatch.setattr(deep.te_api, "find", lambda: None)
  monkeypatch.setattr(deep, "compile_step", lambda request: asked.append(request) or deep_result() | {"stand_ins": request.stand_ins})
  resolved = {"words": ["base.yml"], "overlay": "", "options": {}}
  monkeypatch.setattr(doctor, "read_job", lambda words, machine, args: (job(), resolved))
  assert doctor.main(["--deep", "--gpu", "H200"]) == 1, "the run asks for it"
  out = capsys.readouterr().out
  assert out.count("error: Transformer Engine is not installed") == 1
  assert "compiled for 8 NVIDIA H200" in out and "note: compiled with moe_te.experts=ragged_dot, moe_te.transport=xla, attention=" in out
  assert asked[0].options == {"experts": "ragged_dot", "transport": "xla"}


def test_a_compiled_step_as_text():
  text = deep.text(deep_result())
  assert "compiled for 8 NVIDIA H200, fsdp 8, 48 layers" in text
  assert "(100.00 %); device memory +0.0 MiB saved" in text
  assert "15 collectives, 9 in the NVLink domain; 8 pairs may overlap, 1 do on different streams, 0 of them share" in text


def test_topology_is_checked():
  with pytest.raises(OptionError, match="the topology '8x'; needed: NVLink domains x processes x GPUs per process"):
    deep.compile_step(deep.Request(words=("base.yml",), topology="8x"))


# The command


def call(*words):
  start = time.monotonic()
  done = subprocess.run([sys.executable, "-m", "maxtext_moe_te", "doctor", *words], capture_output=True, text=True)
  return done.returncode, done.stdout, done.stderr, time.monotonic() - start


def test_the_machine_alone():
  status, out, err, seconds = call()
  assert (status, err) == (0, ""), out
  assert "0 errors" in out and seconds < 20


def test_a_saved_machine_as_json(tmp_path):
  (tmp_path / "machine.json").write_text(json.dumps(dataclasses.asdict(machine(driver="550.1"))))
  status, out, _, _ = call("--machine", str(tmp_path / "machine.json"), "--json")
  report = json.loads(out)
  assert status == 1 and [finding["found"] for finding in report["findings"]] == ["driver 550.1"]
  assert report["machine"]["gpus"][0]["name"] == "NVIDIA H200" and len(report["machine_digest"]) == 12


def test_image_has_no_notes():
  status, out, _, _ = call("--image")
  assert status == 0 and "note:" not in out


def test_wrong_words():
  status, _, err, _ = call("--nonsense")
  assert status == 2 and "the word '--nonsense'; needed: an option of doctor, or what MaxText takes" in err
  status, _, err, _ = call("--deep")
  assert status == 2 and "--deep without a job" in err


def test_without_maxtext_the_machine_is_judged_all_the_same(monkeypatch, capsys):
  def root():
    raise VersionError(**doctor.source.MISSING)

  monkeypatch.setattr(doctor.source, "root", root)
  monkeypatch.setattr(doctor.facts, "gather", lambda: machine(packages={"maxtext": None}))
  assert doctor.main(["overlay=te-moe-bf16", "--deep", "--no-probes"]) == 1
  out = capsys.readouterr().out
  assert out.count("maxtext cannot be imported") == 1 and "error: maxtext cannot be imported; needed: MaxText's container" in out


@pytest.mark.host
def test_a_job_is_resolved_by_maxtext():
  status, out, err, seconds = call(
    "--gpus-per-node", "4", "model_name=deepseek3-671b-batchsplit", "ici_expert_parallelism=3", "moe_te.experts=te"
  )
  assert status == 1, out + err
  assert "job: deepseek3-671b-batchsplit on 1 x 4 GPUs" in out
  assert "a mesh of 3 devices (expert 3) on 1 x 4 = 4 GPUs" in out
  assert "error: use_batch_split_schedule=true, a schedule that never calls" in out, "whatever else is missing here"
  assert seconds < 90  # 9 s of one core


def test_a_rule_splits_over_axes_larger_than_1():
  rules = [["q_lora", ["fsdp"]], ["kv_lora", ["fsdp", "context", "expert"]], ["kv_lora", ["expert"]]]
  assert resolve.split(rules, "kv_lora", {"fsdp": 4, "context": 1, "expert": 2}) == {"fsdp": 4, "expert": 2}
  assert resolve.split(rules, "embed", {"fsdp": 4}) == {}


def test_an_overlay_may_split_over_domains(monkeypatch):
  asked = {}

  def run(command, **kwargs):
    asked.update(json.loads(kwargs["input"]))
    return subprocess.CompletedProcess(command, 0, 'ANSWER {"config": {}, "refused": null}', "")

  monkeypatch.setattr(doctor.subprocess, "run", run)
  of_job = Job(nodes=4, gpus_per_node=4, nvlink_domain=8)
  doctor.ask_maxtext(["base.yml"], "x", Overlay(("x",), maxtext={"dcn_fsdp_parallelism": 2}), MoeTeOptions(), of_job, None)
  assert (asked["domains"], asked["per_domain"]) == (2, 8)
  doctor.ask_maxtext(["base.yml"], "x", Overlay(("x",), maxtext={"dcn_fsdp_parallelism": 1}), MoeTeOptions(), of_job, None)
  assert (asked["domains"], asked["per_domain"]) == (1, 16)


@pytest.mark.parametrize(
  ("options", "deep_result", "compared"),
  [
    ({}, dict(names=["key_proj"]), ["key_proj"]),
    ({}, None, ["query_proj", "value_proj"]),
    ({"offload": ["out_proj"]}, None, ["out_proj"]),
    ({}, dict(names=[]), None),
  ],
)
def test_gradients_are_compared_even_where_nothing_can_be_compiled(monkeypatch, capsys, options, deep_result, compared):
  from maxtext_moe_te.tools import gradients

  def compile_step(request):
    if deep_result is None:
      raise RefusedError(found="no descriptions of GPUs", needed="JAX 0.12", fix="pip install")
    return deep_result

  asked = []
  monkeypatch.setattr(doctor.facts, "gather", lambda: MACHINE)
  resolved = {"words": ["base.yml"], "overlay": "", "options": {}}
  monkeypatch.setattr(doctor, "read_job", lambda words, machine, args: (dataclasses.replace(JOB, options=JOB.options | options), resolved))
  monkeypatch.setattr(deep, "compile_step", compile_step)
  monkeypatch.setattr(deep, "findings", lambda result: [])
  monkeypatch.setattr(gradients, "check", lambda request: (asked.append(request.options["offload"]) or {}, []))
  assert doctor.main(["--verify-offload", "--no-probes", "--json"]) == (1 if deep_result is None else 0)
  assert asked == ([] if compared is None else [compared])
  capsys.readouterr()


def test_gradients_that_differ_are_measured():
  import numpy as np

  from maxtext_moe_te.tools import gradients

  same = {"w": np.float32([3, -0.0, 4]), "b": np.float32([2])}
  assert gradients.differing({name: array.copy() for name, array in same.items()}, same) == {}
  assert gradients.differing({**same, "w": np.float32([3, 0.0, 4])}, same) == {"w": 0.0}, "bits, not values"
  assert gradients.differing({**same, "w": np.float32([3, 5, 4])}, same) == {"w": 1.0}
  broken = {**same, "w": np.float32([np.nan, 0, 4])}
  assert gradients.differing(broken, same) == {"w": None}
  assert gradients.differing(same, broken) == {}
  assert gradients.proving_nothing(broken | {"b": np.zeros(2, np.float32), "c": np.float32([0, 1])}) == ["w", "b"]


EQUAL, ROUNDED = [[7.5, 7.25]] * 2, [[7.5, 7.25], [7.501, 7.25]]
CHANGED = "offload of query_proj changes gradients, by up to {}; needed: the same bits as without it. Fix: remove moe_te.offload. [here]"


@pytest.mark.parametrize(
  ("result", "severity", "text"),
  [
    (dict(losses=EQUAL, differ={"step 0: w": 0.0, "step 1: b": 1e-4}), "error", CHANGED.format("1.0e-04: step 1: b, step 0: w")),
    (
      dict(losses=ROUNDED, differ={"step 0: w": 0.02, "step 0: b": 0.03}),
      "warning",
      "XLA rounds the forward pass with offload of query_proj otherwise: the first loss is 7.5 instead of 7.501, gradients are up to "
      "3.0e-02 apart; needed: the same forward pass, to compare gradients bit for bit. Fix: watch the loss of the first steps with "
      "moe_te.offload and without it. [here]",
    ),
    # What rounding does not explain is not blamed on it.
    (dict(losses=ROUNDED, differ={"step 0: w": 0.02, "step 0: b": 1.2}), "error", CHANGED.format("1.2e+00: step 0: b, step 0: w")),
    (dict(losses=ROUNDED, differ={"step 0: w": None}), "error", CHANGED.format("inf: step 0: w")),
    (dict(losses=[[9.0], [7.5]], differ={"step 0: w": 0.02}), "error", CHANGED.format("2.0e-02: step 0: w")),
    (dict(losses=[[None], [7.5]], differ={"step 0: w": 0.02}), "error", CHANGED.format("2.0e-02: step 0: w")),
    (
      dict(losses=EQUAL, nothing=["step 0: w", "step 1: w"]),
      "warning",
      "gradients that are zero or not finite without offload too prove nothing: step 0: w, step 1: w; needed: "
      "gradients that can be compared. Fix: look at the loss of the first steps with moe_te.offload and without it. [here]",
    ),
  ],
)
def test_what_compared_gradients_say(result, severity, text):
  from maxtext_moe_te.tools import gradients

  (finding,) = gradients.findings({"names": ["query_proj"], "differ": {}, "nothing": []} | result, "here")
  assert (finding.severity, str(finding)) == (severity, text)


def test_equal_gradients_say_nothing():
  from maxtext_moe_te.tools import gradients

  result = {"names": ["query_proj"], "attention": "dot_product", "arrays": 14, "differ": {}, "nothing": [], "losses": EQUAL}
  assert gradients.findings(result, "here") == []
  report = {"machine": dataclasses.asdict(MACHINE), "machine_digest": "0", "job": dataclasses.asdict(JOB), "seconds": 1}
  line = "gradients of the reduced model, attention=dot_product: 0 of 2 steps x 14 arrays differ with offload"
  assert line in doctor.text(report | {"gradients": result}, []).splitlines()
