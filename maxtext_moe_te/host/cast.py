"""Expert weights cast to the compute dtype once per step, in front of the loop over layers, instead of inside every layer.

The loop then reads weights and stacks gradients of two bytes instead of four, XLA lets the grouped products read and write the
stacks directly, and a layer that is recomputed does not cast again. On one device the results are the same to the last bit. Where
devices sum their gradients, they then sum them in the compute dtype, as MaxText's own layer does, instead of in float32: `auto`
leaves those in the layer.
"""

import contextlib
import functools
import logging

import jax.numpy as jnp
from flax import nnx
from maxtext.layers import moe

from maxtext_moe_te.host import layer
from maxtext_moe_te.settings.config import MoeTeOptions

log = logging.getLogger("maxtext_moe_te")
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
        for kernel in filter(None, (getattr(module, name, None) for name in KERNELS)):
          kept.append((kernel, kernel.get_value()))
          kernel.set_value(kept[-1][1].astype(module.config.dtype))
    yield
  finally:
    for kernel, value in kept:
      kernel.set_value(value)


def _before_the_loop(module, options) -> bool:
  config = module.config
  if options.cast_weights != "auto":
    return options.cast_weights == "step"
  if config.parameter_memory_host_offload or jnp.dtype(config.weight_dtype) == jnp.dtype(config.dtype):
    return False
  sums = gradient_sums(module)
  if sums > 1:
    _log(
        f"expert weights are cast to {config.dtype} in every layer, so that {sums} devices sum their gradients in "
        f"{config.weight_dtype}; moe_te.cast_weights=step is faster and sums them in {config.dtype}"
    )
  return sums == 1


def gradient_sums(module: moe.RoutedMoE) -> int:
  """How many devices sum the gradient of one expert weight: those between which it is not split for computing."""
  expert, _, width = layer.mesh_axes(module, ("exp", None, "mlp_no_fsdp"))
  sums = module.mesh.size
  for axis in (*expert, *width):
    sums //= module.mesh.shape[axis]
  return sums


@functools.cache
def _log(line):
  log.info(line)
