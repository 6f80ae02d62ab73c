"""Which implementation each stage uses, decided once from the options, the mesh and what is installed, and logged with its reason.

An explicit choice is honoured or refused; `auto` may choose.
"""

import dataclasses
import functools
import logging
import math

import jax.numpy as jnp

from maxtext_moe_te import versions
from maxtext_moe_te.errors import MoeTeError, RefusedError, VersionError
from maxtext_moe_te.host import engine, overflow
from maxtext_moe_te.host.expert_group import EXPERT_AXIS
from maxtext_moe_te.moe import routing, te_api, te_router, te_runtime
from maxtext_moe_te.moe.block import GROUPED_MATMULS, LayerSpec, Layout, Parts
from maxtext_moe_te.moe.capacity import chunks_within
from maxtext_moe_te.moe.experts import gated, te
from maxtext_moe_te.moe.experts.base import activate_all
from maxtext_moe_te.moe.rules import RouterRule, Selection
from maxtext_moe_te.moe.transport import nccl_ep
from maxtext_moe_te.moe.transport.local import LocalTransport
from maxtext_moe_te.moe.transport.xla import XlaTransport
from maxtext_moe_te.settings.config import MoeTeOptions

log = logging.getLogger("maxtext_moe_te")
# Options that name a part of Transformer Engine, and the part.
TE_ONLY = (("router", "te", "router"), ("transport", "nccl_ep", "nccl_ep"), ("experts", "te", "experts"), ("recipe", "mxfp8", "mxfp8"))


def choose(options: MoeTeOptions, layout: Layout, spec: LayerSpec, shape: tuple[int, int, int], hidden: int, logits_dtype) -> Parts:
  """The parts for a layer on a mesh, for inputs [B,S,D] of this shape, experts of width F and a gate that computes logits in
  `logits_dtype`. The options are settled ones.

  Raises:
    RefusedError: a part that was asked for cannot serve this layer or mesh.
    VersionError: what a part needs is missing or of another version.
  """
  device = layout.mesh.devices.flat[0]
  *tokens, width = shape
  router, why_router = _router(options, device, spec, logits_dtype)
  experts, why_experts = _experts(options, device, spec)
  transport, why_transport = _transport(options, layout, spec, width, device, mxfp8=options.recipe == "mxfp8")
  activation, why_activation = _activation(options, experts, transport, device, layout, spec, hidden)
  transport, chunks = _holding(options, transport, spec, math.prod(tokens) // layout.size(layout.tokens))
  log_once(
    f"MoE layer on {device.platform}: router {router}{why_router} ({spec.router}); transport {transport.name}{why_transport}; "
    f"experts {experts}{why_experts} ({spec.expert}){why_activation}"
    + (f"; tokens in {chunks} parts{', for what runs again' if overflow.holds_all() else ''}" if chunks > 1 else "")
  )
  if experts == "te":
    grouped_matmul = te.grouped_matmul_mxfp8 if options.recipe == "mxfp8" else te.grouped_matmul
  else:
    grouped_matmul = GROUPED_MATMULS[experts]
  route = te_router.route if router == "te" else routing.route
  return Parts(transport=transport, grouped_matmul=grouped_matmul, activation=activation, route=route, chunks=chunks)


def _holding(options, transport, spec, tokens):
  """(transport, parts): as asked for, or for a layer that must hold whatever the routing, in no more memory than a finite capacity."""
  if not overflow.holds_all() or not options.capacity_factor or isinstance(transport, LocalTransport):
    return transport, options.chunks
  top_k = spec.router.experts_per_token
  if isinstance(transport, nccl_ep.NcclEpTransport):  # a process has one group: its capacity stays
    capacity, rows = transport.group.capacity, transport.group.worst_case
  else:
    group = transport.ranks if transport.tokens_split else 1
    capacity = transport.capacity(-(-tokens // options.chunks) * group, top_k)
    transport = dataclasses.replace(transport, capacity_factor=0.0)
    rows = lambda part: transport.capacity(part * group, top_k, spec.router.selection is Selection.TOP)
  return transport, chunks_within(rows, capacity, tokens, at_least=options.chunks)


@functools.cache
def log_once(line: str) -> None:
  """What was chosen, for the log; layers are traced many times."""
  log.info(line)


def check_options(options: MoeTeOptions) -> None:
  """Refuses, before anything starts, parts whose packages are missing or have not what the parts call.

  Raises:
    VersionError: Transformer Engine is asked for and missing, or has not what is called of it.
    RefusedError: options that contradict each other.
  """
  asked = {f"moe_te.{option}={value}": part for option, value, part in TE_ONLY if getattr(options, option) == value}
  try:
    for part in asked.values():
      te_api.installed().require(part)
  except MoeTeError as error:
    raise type(error)(found=f"{' and '.join(asked)}, and {error.found}", needed=error.needed, fix=error.fix) from error
  check_recipe(options)


def check_recipe(options: MoeTeOptions) -> None:
  """Refuses a recipe that JAX's compiler or another option excludes, whatever Transformer Engine there is.

  Raises:
    VersionError: the compiler crashes on it.
    RefusedError: options that contradict each other.
  """
  if options.recipe == "mxfp8" and versions.jax_hazard() and te_runtime.makes_empty_constants():
    raise VersionError(
      found=f"moe_te.recipe=mxfp8 with jaxlib {versions.installed('jaxlib')}, whose compiler crashes on the quantized grouped product "
      "in scanned layers",
      needed="jax 0.11.1, or 0.12 or newer, or a patched Transformer Engine",
      fix="maxtext-moe-te patch apply transformer_engine, or pip install 'jax[cuda13]>=0.12', or set moe_te.recipe=bf16",
    )
  if options.recipe == "mxfp8" and options.experts not in ("auto", "te"):
    raise RefusedError(
      found=f"moe_te.recipe=mxfp8 with moe_te.experts={options.experts}",
      needed="Transformer Engine's grouped GEMM",
      fix="set moe_te.experts=te",
    )


def _router(options, device, spec, logits_dtype) -> tuple[str, str]:
  """(name, reason in brackets or nothing)."""
  check_router(options, spec.router, logits_dtype, of_device="a CPU" if device.platform == "cpu" else "")
  if options.router != "te":
    return "jax", ""
  if error := engine.router_error():
    raise error
  return "te", ""


def check_router(options: MoeTeOptions, rule: RouterRule, logits_dtype, of_device: str = "") -> None:
  """Refuses `router=te` for a rule that it does not compute exactly, or for what is said against the device.

  Raises:
    RefusedError: with the reason.
  """
  if options.router != "te":
    return
  found = te_api.find()  # none where a job for other machines is looked at
  if reason := te_router.reason_against(rule, logits_dtype, found.has_score_function if found else None) or of_device:
    raise RefusedError(
      found=f"moe_te.router=te for the rule ({rule}): {reason}",
      needed="a rule that Transformer Engine's router computes exactly, on an NVIDIA GPU",
      fix="set moe_te.router=auto",
    )


def _experts(options, device, spec) -> tuple[str, str]:
  """(name, reason in brackets or nothing)."""
  name = options.experts
  if name == "auto" and options.recipe == "mxfp8":
    name = "te"
  if name == "te":
    if error := engine.experts_error(options.recipe, device):
      raise error
    return name, f" {options.recipe}"
  if name != "auto":
    return name, ""
  if device.platform == "cpu":
    return "blocked", ""
  error = engine.experts_error(options.recipe, device)
  reason = error.found if error else ""
  if not reason and spec.dtype != jnp.bfloat16:
    reason = f"Transformer Engine's grouped GEMM computes in bfloat16, not {spec.dtype}"
  return ("ragged_dot", f" [{reason}]") if reason else ("te", f" {options.recipe}")


def _activation(options, experts, transport, device, layout, spec, hidden):
  """(what activates rows, reason in brackets or nothing)."""
  full = isinstance(transport, LocalTransport) and options.padding == "route"  # its buffer always is, but for padding
  if experts != "te" or device.platform == "cpu" or full:
    return activate_all, ""
  reason = gated.reason_against(spec.expert, hidden // layout.size(layout.width))
  return (activate_all, f" [activated in all rows of the buffer: {reason}]") if reason else (gated.activate_received, "")


def _transport(options, layout, spec, width, device, *, mxfp8):
  ranks = layout.size(layout.expert)
  name = options.transport
  alignment = te.MXFP8_BLOCK if mxfp8 else 1
  check_transport(options, ranks)
  if ranks == 1:
    return LocalTransport(spec.num_experts, alignment), ""
  if not overflow.holds_all():
    overflow.check_watched(options, ranks)
  reason = ""
  tokens_split = set(layout.expert) <= set(layout.tokens)
  if name != "xla":
    group = nccl_ep.bootstrapped()
    unshown = "moe_te.padding=skip, which it is not shown to serve" if options.padding == "skip" else ""
    reason = unshown or _reason_against_group(group, spec, width, ranks, layout, tokens_split)
    if not reason:
      return nccl_ep.NcclEpTransport(group), ""
    reason = "a CPU" if device.platform == "cpu" else reason
    reason = f" [no NCCL EP group: {reason}]"
    if name == "nccl_ep":
      raise RefusedError(
        found=f"moe_te.transport=nccl_ep{reason}",
        needed="a training entry point of MaxText on NVIDIA GPUs, with tokens and experts split over the axis `expert`",
        fix="set moe_te.transport=auto",
      )
  return XlaTransport(spec.num_experts, layout.expert, ranks, tokens_split, alignment, options.capacity_factor), reason


def _reason_against_group(group, spec, width, ranks, layout, tokens_split) -> str:
  """Why this process's NCCL EP group is not for this layer, or nothing."""
  if group is None:
    return "this entry point makes none"
  if (group.num_experts, group.experts_per_token, group.ranks, group.width) != (
    spec.num_experts,
    spec.router.experts_per_token,
    ranks,
    width,
  ):
    return "this process's is for another model"
  return "" if layout.expert == (EXPERT_AXIS,) and tokens_split else "its axes do not split the tokens"


def check_transport(options: MoeTeOptions, ranks: int) -> None:
  """Refuses a transport that a number of expert ranks has no use for, or that is not shown to leave padding out.

  Raises:
    RefusedError: with the option that fits.
  """
  name = options.transport
  if name == "nccl_ep" and options.padding == "skip":
    raise RefusedError(
      found="moe_te.transport=nccl_ep with moe_te.padding=skip: NCCL EP is not shown to serve tokens that select no expert",
      needed="XLA's collectives, or padding that is routed",
      fix="set moe_te.transport=auto",
    )
  if name == "local" and ranks > 1:
    raise RefusedError(
      found=f"moe_te.transport=local on an expert axis of {ranks}",
      needed="a transport that moves rows between ranks",
      fix="set moe_te.transport=auto",
    )
  if name in ("xla", "nccl_ep") and ranks == 1:
    raise RefusedError(
      found=f"moe_te.transport={name} without an expert axis",
      needed="an expert axis larger than 1 (ici_expert_parallelism)",
      fix="set moe_te.transport=auto",
    )
