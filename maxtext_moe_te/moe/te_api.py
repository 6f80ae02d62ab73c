"""What we call of Transformer Engine, judged before anything starts by what it has: no version decides.

Every function is here by name and by the parameters we pass (`PARTS`), every kernel by the name under which its JAX extension
registers it (`TARGETS`). The source and the extension's file are read, nothing is imported, so that a machine without a driver judges
like one that runs. What a signature does not show, such as another meaning of the same parameters, is not seen.

Two states of it are known, and adapted to where they differ:

                                          main of 2026-08-22 (2.20.0.dev0)       2.20.2
    grouped GEMM on Hopper                its JAX side passes a scale per        one scale for all
                                          expert, which the kernel refuses
    several GPUs in one process           no                                     with XLA's communicators
    router's score functions              sigmoid, softmax                       sqrtsoftplus too

2.20.2 runs on GPUs. main's signatures are judged, and what we do with them is tried with stand-ins: on a GPU it has not been run.

Imports neither jax nor Transformer Engine, but for `alphas` and `shares_communicators`, which ask the one that runs.
"""

import functools
import importlib
import mmap
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxtext_moe_te import versions
from maxtext_moe_te.errors import RefusedError, VersionError
from maxtext_moe_te.signatures import Call, Package

PACKAGE = "transformer_engine"
TESTED = "2.20.2"
_EP, _GEMM, _ROUTER = (f"jax.cpp_extensions.{name}" for name in ("ep", "gemm", "router"))
_LAYER = ("top_k", "dispatch_output_per_expert_alignment")
_RECEIVE, _SEND = (*_LAYER, "recv_capacity_per_rank", "is_outer"), (*_LAYER, "out_leading_shape", "out_partition_spec")
_RULE = ("topk", "use_pre_softmax", "scaling_factor", "score_function", "compute_aux_scores", "routing_map_format")
MESH_AXES = ("dp_resource", "tp_resource", "tpsp_resource", "fsdp_resource", "pp_resource", "cp_resource", "ep_resource")

_CONTEXT = (
  Call("jax.sharding", "MeshResource", (), MESH_AXES),
  Call("jax.sharding", "global_shard_guard", ("resource",)),
  Call("jax.sharding", "global_mesh_resource", ()),
)
_EXPERTS = (
  Call(
    _GEMM,
    "GroupedGemmPrimitive.abstract",
    (
      "lhs_data_aval", "lhs_scale_inv_aval", "rhs_data_aval", "rhs_scale_inv_aval", "bias_aval", "lhs_first_dims_aval",
      "lhs_last_dims_aval", "rhs_first_dims_aval", "rhs_last_dims_aval", "out_first_dims_aval", "out_last_dims_aval", "*additional_args",
    ),
    (
      "lhs_is_trans", "rhs_is_trans", "scaling_mode", "out_dtype", "has_bias", "use_async_d2h_group_sizes", "use_v2_ffi",
      "lhs_axis_boundary", "rhs_axis_boundary", "out_shape", "lhs_left_size", "lhs_right_size", "rhs_left_size", "rhs_right_size",
    ),
  ),
  Call(_GEMM, "GroupedGemmPrimitive.outer_primitive"),
  Call("jax.quantize", "ScalingMode.NO_SCALING"),
)  # fmt: skip


def _primitive(module, name, arrays, static):
  """One that is bound per device: what its `abstract` takes is what it is bound with."""
  return Call(module, f"{name}.abstract", tuple(f"{array}_aval" for array in arrays), static), Call(module, f"{name}.inner_primitive")


PARTS: dict[str, tuple[Call, ...]] = {
  "context": _CONTEXT,
  "experts": _EXPERTS,
  "mxfp8": (
    Call("jax.dense", "grouped_dense", ("x", "kernel", "group_sizes"), ("quantizer_set",)),
    Call(
      "jax.quantize", "QuantizerFactory.create_set", (), ("scaling_mode", "fwd_dtype", "bwd_dtype", "is_2x2x", "n_groups")
    ),
    Call("jax.quantize", "ScalingMode.MXFP8_1D_SCALING"),
  ),
  "router": (
    *_primitive(_ROUTER, "FusedTopkWithScoreFunctionFwdPrimitive", ("logits", "expert_bias"), (*_RULE, "num_groups", "group_topk")),
    *_primitive(_ROUTER, "FusedTopkWithScoreFunctionBwdPrimitive", ("routing_map", "intermediate", "grad_probs"), _RULE),
    Call(_ROUTER, "ScoreFunction.SOFTMAX"),
    Call(_ROUTER, "ScoreFunction.SIGMOID"),
    Call(_ROUTER, "RoutingMapFormat.BYTEMAP"),
  ),
  "nccl_ep": (
    *_CONTEXT,
    Call(
      "jax.ep",
      "ep_bootstrap",
      (),
      (
        "world_size", "rank", "num_experts", "max_tokens_per_rank", "recv_capacity_per_rank", "hidden_dim", "max_token_dtype",
        "drop_on_overflow",
      ),
    ),
    Call("jax.ep", "ep_finalize", ()),
    Call(_EP, "_on_collective_stream", ("func",)),
    *_primitive(_EP, "EpPreparePrimitive", ("topk_idx",), (*_LAYER, "is_outer")),
    *_primitive(_EP, "EpDispatchPrimitive", ("handle_mem", "topk_idx", "tokens", "topk_weights"), _RECEIVE),
    *_primitive(_EP, "EpDispatchBwdPrimitive", ("handle_mem", "grad", "g_recv_topk_weights"), _SEND),
    *_primitive(_EP, "EpCombinePrimitive", ("handle_mem", "expert_out"), _SEND),
    *_primitive(_EP, "EpCombineBwdPrimitive", ("handle_mem", "grad"), _RECEIVE),
  ),
  # What tools/described.py pretends or asks where there is no GPU.
  "described": (
    Call(_EP, "set_ep_config", ("config",)),
    Call(
      _EP,
      "EpConfig",
      (),
      (
        "world_size", "rank", "ep_size", "num_ep_groups", "num_experts", "num_local_experts", "max_tokens_per_rank",
        "recv_capacity_per_rank", "hidden_dim",
      ),
    ),
    Call(_GEMM, "get_device_compute_capability"),
    Call("jax.cpp_extensions.misc", "jax_dtype_to_te_dtype", ("jax_dtype",)),
  ),
}  # fmt: skip
TARGETS: dict[str, tuple[str, ...]] = {
  "experts": ("te_grouped_gemm_v2_ffi",),
  "mxfp8": ("te_grouped_gemm_v2_ffi",),
  "router": tuple(f"te_fused_topk_with_score_function_{direction}_ffi" for direction in ("forward", "backward")),
  "nccl_ep": tuple(f"te_ep_{step}_ffi" for step in ("prepare", "dispatch", "dispatch_bwd", "combine", "combine_bwd")),
}
WITHOUT = {
  "experts": "set moe_te.experts=ragged_dot",
  "mxfp8": "set moe_te.recipe=bf16",
  "router": "set moe_te.router=jax",
  "nccl_ep": "set moe_te.transport=xla",
  "described": "leave --deep out",
}
_PER_GROUP = "_v2_grouped_gemm_supports_per_group_alpha_beta"
_BORROWS = "use_nccl_comm_from_xla"


@dataclass(frozen=True)
class Api:
  """One Transformer Engine.

  Args:
    package: its source.
    extension: the file of its JAX extension, or None.
    version: as its metadata says, or "".
    complete: whether `extension` and `version` are judged too; not for a source tree that is only read.
  """

  package: Package
  extension: Path | None = None
  version: str = ""
  complete: bool = True

  @property
  def incomplete(self) -> str:
    """Why it cannot be imported for JAX at all, or nothing: one for PyTorch alone is as good as none."""
    if not self.complete:
      return ""
    if not self.version:
      return "has no metadata (dist-info), which its own import asks for"
    return "" if self.extension else "has no JAX extension (transformer_engine_jax*.so)"

  def problem(self, part: str) -> str:
    """Why a part of `PARTS` cannot be used with it, or nothing."""
    if self.incomplete:
      return self.incomplete
    calls = next(filter(None, map(self.package.problem, PARTS[part])), "")
    missing = [target for target in TARGETS.get(part, ()) if self.extension and not _contains(self.extension, target)]
    return calls or (f"has a JAX extension that was built without {missing[0]} ({self.extension})" if missing else "")

  def refusal(self, part: str) -> dict[str, str] | None:
    """found, needed and fix, where a part cannot be used."""
    problem = self.problem(part)
    if not problem:
      return None
    return {
      "found": f"transformer-engine {self.version or 'of no known version'} in {self.package.folder} {problem}",
      "needed": f"what the plugin calls of it, as {TESTED} has it",
      "fix": ", or ".join(filter(None, (WITHOUT.get(part), f"pip install 'transformer-engine[jax]=={TESTED}'"))),
    }

  def require(self, part: str) -> None:
    """Refuses a part that cannot be used.

    Raises:
      VersionError: with the name or the parameter that is missing.
    """
    if refusal := self.refusal(part):
      raise VersionError(**refusal)

  def check_gpu(self, compute_capability: str) -> None:
    """Whether its grouped GEMM can serve a GPU.

    Args:
      compute_capability: as jax gives it, "9.0".

    Raises:
      RefusedError: it cannot.
    """
    check_gpu(compute_capability, self.serves_hopper, self.version)

  @property
  def serves_hopper(self) -> bool:
    """Whether its JAX side gives the grouped GEMM one scale for all experts, the only thing that the kernel takes on Hopper."""
    return self.package.has(_GEMM, _PER_GROUP)

  def has_score_function(self, name: str) -> bool:
    """Whether the fused router knows a score function, "sigmoid"."""
    return self.package.has(_ROUTER, f"ScoreFunction.{name.upper()}")

  @property
  def borrows(self) -> bool:
    """Whether it can share XLA's NCCL communicators at all; whether it does is for `shares_communicators`."""
    return self.package.has(_EP, _BORROWS)

  @property
  def nccl_floor(self) -> int | None:
    """The oldest NCCL that the NCCL EP linked into it takes, as it says (2.30.4 is 23004); None where NCCL EP is a file beside it."""
    bundled = next(self.package.folder.glob("wheel_lib/**/libnccl_ep.so*"), None)
    stated = self.package.constant("", "_NCCL_EP_MIN_VERSION")
    return stated[0] * 10000 + stated[1] * 100 + stated[2] if stated and bundled is None else None

  def facts(self) -> dict[str, Any]:
    """What decides about it, as JSON has it: problems by part (found, needed, fix), serves_hopper, borrows, nccl_floor."""
    problems = {part: refusal for part in PARTS if (refusal := self.refusal(part))}
    return {"problems": problems, "serves_hopper": self.serves_hopper, "borrows": self.borrows, "nccl_floor": self.nccl_floor}


def find() -> Api | None:
  """The installed Transformer Engine, or None."""
  package = Package.installed(PACKAGE)
  return None if package is None else _find(package)


@functools.cache
def _find(package):
  # Where Transformer Engine looks itself: beside it in an editable build, in it, where pip puts it, and in site-packages.
  roots = (package.folder.parent, package.folder, package.folder / "wheel_lib", Path(sysconfig.get_path("purelib"), PACKAGE, "wheel_lib"))
  extension = next((file for root in roots for file in sorted(root.glob("transformer_engine_jax*.so"))), None)
  return Api(package, extension, versions.installed("transformer-engine") or "")


def installed() -> Api:
  """The installed Transformer Engine.

  Raises:
    VersionError: there is none.
  """
  found = find()
  if found is None:
    raise VersionError(
      found="transformer-engine is not installed",
      needed=f"transformer-engine with its JAX extension, as {TESTED}",
      fix=f"pip install 'transformer-engine[jax]=={TESTED}'",
    )
  return found


def check_gpu(compute_capability: str, serves_hopper: bool, version: str) -> None:
  """See `Api.check_gpu`, for one that is known by these."""
  if compute_capability.startswith("9.") and not serves_hopper:
    raise RefusedError(
      found=f"a Hopper GPU with transformer-engine {version}, which gives its grouped GEMM a scale for each expert",
      needed="one scale for all, which is what the kernel takes before Blackwell",
      fix=f"set moe_te.experts=ragged_dot, or pip install 'transformer-engine[jax]=={TESTED}'",
    )


@functools.cache
def _contains(file, text):
  with open(file, "rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as content:
    return content.find(text.encode()) >= 0


def alphas(groups: int) -> int:
  """How many alphas and betas the running grouped GEMM takes for a number of groups: 1 in all on Hopper, else one per group."""
  per_group = getattr(importlib.import_module(f"{PACKAGE}.{_GEMM}"), _PER_GROUP, None)
  return groups if per_group is None or per_group() else 1


def shares_communicators() -> bool:
  """Whether the running one borrows XLA's NCCL communicators, so that a process may have several GPUs."""
  borrows = getattr(importlib.import_module(f"{PACKAGE}.{_EP}"), _BORROWS, None)
  return borrows is not None and borrows()
