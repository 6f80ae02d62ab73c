"""One `RoutedMoE` of MaxText and everything it computes, forward and backward: by which MaxText's layer and ours are compared."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.linen import partitioning
from maxtext.layers import initializers, moe
from maxtext.utils import maxtext_utils

from maxtext_moe_te.host import layer
from maxtext_moe_te.settings.config import MoeTeOptions

FORWARD_NAMES = ("y", "load_balance_loss", "bias_update")
# The balance loss enters the scalar that is differentiated with this factor, so that its gradient is seen beside the output's.
BALANCE_LOSS_FACTOR = 3.0


def relative_error(actual, expected) -> float:
  """Relative Frobenius error, computed in float64; NaN if either has one."""
  actual, expected = (np.asarray(a, np.float64) for a in (actual, expected))
  return float(np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), 1e-30))


def mesh_of(config, devices: int) -> jax.sharding.Mesh:
  """The mesh MaxText makes for `config` on the first `devices` devices."""
  return jax.sharding.Mesh(maxtext_utils.create_device_mesh(config, jax.devices()[:devices]), config.mesh_axes)


def routed_moe(config, mesh, seed: int = 0, **options) -> moe.RoutedMoE:
  """A layer with random weights, biases and scales.

  Args:
    config: its MaxText configuration.
    mesh: its mesh.
    seed: of the weights.
    **options: further arguments of `RoutedMoE`.
  """
  with jax.set_mesh(mesh), partitioning.axis_rules(config.logical_axis_rules):
    module = moe.RoutedMoE(
      config=config,
      num_experts=config.num_experts,
      num_experts_per_tok=config.num_experts_per_tok,
      mesh=mesh,
      kernel_init=initializers.nd_dense_init(1.0, "fan_in", "truncated_normal"),
      kernel_axes=("embed", None),
      intermediate_dim=config.moe_mlp_dim,
      dtype=config.dtype,
      weight_dtype=config.weight_dtype,
      rngs=nnx.Rngs(seed),
      **options,
    )
    for name in ("gate.bias", "wi_0_bias", "wi_1_bias", "wo_bias", "per_expert_scale"):
      parameter = functools.reduce(lambda m, n: getattr(m, n, None), name.split("."), module)
      if parameter is not None:
        key = jax.random.fold_in(jax.random.key(seed + 1), len(name))
        parameter[...] = parameter[...] + 0.1 * jax.random.normal(key, parameter.shape, parameter.dtype)
  return module


def inputs(config, batch: int = 8, seed: int = 1) -> tuple[jax.Array, jax.Array]:
  """(x [B,S,D], cotangent [B,S,D]) in float32, random."""
  shape = (batch, config.max_target_length, config.emb_dim)
  return tuple(jax.random.normal(jax.random.key(seed + i), shape) for i in range(2))


def our_call(**options):
  """`RoutedMoE.__call__` under the plugin, without activating it."""
  return layer.replacing(MoeTeOptions(**options))(moe.RoutedMoE.__call__)


def run(config, mesh, call, module, x, cotangent, compiler_options=None, **more) -> dict:
  """Output, losses and every gradient of one layer.

  Args:
    config: its MaxText configuration.
    mesh: its mesh.
    call: `RoutedMoE.__call__`, MaxText's or ours.
    module: the layer.
    x: [B,S,D].
    cotangent: [B,S,D], weights of the scalar that is differentiated.
    compiler_options: XLA's, for this program.
    **more: further arguments of the call, arrays.

  Returns:
    dict of arrays: y, load_balance_loss, bias_update where there are any; one gradient per parameter and floating input.
  """
  graph, state = nnx.split(module)
  given = {"inputs": x, **more}
  fixed = {name: array for name, array in given.items() if not jnp.issubdtype(array.dtype, jnp.floating)}
  floating = {name: array for name, array in given.items() if name not in fixed}

  @functools.partial(jax.jit, compiler_options=compiler_options)
  def value_and_gradients(state, floating):
    def scalar(state, floating):
      y, loss, update = call(nnx.merge(graph, state), **floating, **fixed)
      total = (y.astype(jnp.float32) * cotangent).sum() + (0.0 if loss is None else BALANCE_LOSS_FACTOR * loss)
      return total, {"y": y, "load_balance_loss": loss, "bias_update": update}

    return jax.value_and_grad(scalar, argnums=(0, 1), has_aux=True, allow_int=True)(state, floating)

  with jax.set_mesh(mesh), partitioning.axis_rules(config.logical_axis_rules):
    (_, results), (d_state, d_inputs) = value_and_gradients(state, floating)
  results = {name: value for name, value in results.items() if value is not None}
  results |= {f"d_{name}": gradient for name, gradient in d_inputs.items()}
  for path, leaf in nnx.to_flat_state(d_state):
    name = ".".join(map(str, path))
    if "rng" not in name.lower():
      results[f"d_{name}"] = leaf[...] if hasattr(leaf, "shape") else leaf.value
  return jax.device_get(results)
