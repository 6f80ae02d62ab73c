"""Expert weights cast to the compute dtype once per step, in front of the loop over layers, instead of inside every layer.

The loop then reads weights and stacks gradients of two bytes instead of four, XLA lets the grouped products read and write the
stacks directly, and a layer that is recomputed does not cast again. Where no gradient is summed over devices the results are the
same to the last bit. Where they are, the sums are then taken in the compute dtype, as by MaxText's own layer, instead of in
float32: `auto` leaves the cast of those in the layer.
"""

import contextlib
import functools
import math

import jax.numpy as jnp
from flax import nnx
from maxtext.layers import moe

from maxtext_moe_te.host import layer, parts, rules_from_config
from maxtext_moe_te.settings.config import MoeTeOptions

KERNELS = ("wi", "wi_0", "wi_1", "wo")


def casting(options: MoeTeOptions):
  """The factory of the seam: `Transformer.__call__` on a model whose expert weights are cast while it runs."""

  def replace(original):
    @functools.wraps(original)
    def __call__(self, *args, **kwargs):
      with _cast(self, options):
        return original(self, *args, **kwargs)

    return __call__

  return replace


@contextlib.contextmanager
def _cast(model, options):
  kept = []
  try:
    for _, module in nnx.iter_graph(model):
      if isinstance(module, moe.RoutedMoE) and _before_the_loop(module, options):
        for kernel in (getattr(module, name) for name in KERNELS if hasattr(module, name)):
          kept.append((kernel, kernel.get_value()))
          kernel.set_value(kept[-1][1].astype(module.config.dtype))
    yield
  finally:
    for kernel, value in reversed(kept):
      kernel.set_value(value)


def _before_the_loop(module, options) -> bool:
  config = module.config
  if rules_from_config.is_sampler(config) or jnp.dtype(config.dtype).itemsize >= jnp.dtype(config.weight_dtype).itemsize:
    return False
  if options.cast_weights == "step":
    return True
  if config.parameter_memory_host_offload:
    return False
  sums = gradient_sums(module)
  parts.log_once(
    f"expert weights are cast to {config.dtype} once per step"
    if sums == 1
    else f"expert weights are cast to {config.dtype} in every layer, so that {sums} devices sum their gradients in "
    f"{config.weight_dtype}; moe_te.cast_weights=step is faster and sums them in {config.dtype}"
  )
  return sums == 1


def gradient_sums(module: moe.RoutedMoE) -> int:
  """How many devices sum the gradient of one expert weight: those between which it is not split for computing."""
  expert, _, width = layer.mesh_axes(module, ("exp", None, "mlp_no_fsdp"))
  return module.mesh.size // math.prod(module.mesh.shape[axis] for axis in (*expert, *width))
