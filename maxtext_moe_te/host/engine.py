"""Whether a run uses Transformer Engine's router and experts: decided before the model is traced, by all its processes together.

Layers are traced many times and in all processes alike, so each question is asked once.
"""

import functools

import jax

from maxtext_moe_te.errors import MoeTeError, RefusedError
from maxtext_moe_te.host import agreement
from maxtext_moe_te.moe import te_api, te_runtime
from maxtext_moe_te.settings.config import MoeTeOptions


def decide(options: MoeTeOptions, device) -> None:
  """Asks what the layers will ask, before any of them is traced.

  Args:
    options: the plugin's options.
    device: one of the mesh, a GPU.

  Raises:
    MoeTeError: a part was asked for by name and a process cannot use it; in every process the same.
  """
  if options.router == "te" and (error := router_error()):
    raise error
  asked = options.experts == "te" or options.recipe == "mxfp8"
  if (asked or options.experts == "auto") and (error := experts_error(options.recipe, device)) and asked:
    raise error


@functools.cache
def router_error() -> MoeTeError | None:
  """What the first process that cannot use the router has against it."""
  return agreement.together(lambda: te_api.installed().require("router"), "Transformer Engine's router")


@functools.cache
def experts_error(recipe: str, device) -> MoeTeError | None:
  """What the first process that cannot use the experts has against them: all use them, or none."""
  return agreement.together(lambda: check_experts(recipe, device), f"Transformer Engine's experts in {recipe}")


def check_experts(recipe: str, device) -> None:
  """Whether this process can use the experts on a device, or could on one that a run is only compiled for.

  Raises:
    RefusedError: the device cannot.
    VersionError: Transformer Engine or cuBLAS cannot.
  """
  api = te_api.installed()
  api.require("mxfp8" if recipe == "mxfp8" else "experts")
  if device.platform == "cpu":
    raise RefusedError(found="moe_te.experts=te on a CPU", needed="an NVIDIA GPU", fix="set moe_te.experts=auto")
  api.check_gpu(str(getattr(device, "compute_capability", "")))
  if is_here(device):
    te_runtime.check_grouped_gemm(device.compute_capability)
    if recipe == "mxfp8":
      te_runtime.check_mxfp8(device.compute_capability)


def is_here(device) -> bool:
  """Whether a device is one of this process's backends, not one that a run is only compiled for."""
  return hasattr(device, "client") and device.platform == jax.default_backend() and device in jax.devices()
