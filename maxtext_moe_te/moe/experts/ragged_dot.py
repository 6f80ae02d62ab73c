"""`jax.lax.ragged_dot`: what XLA makes of a grouped product on any device."""

import jax


def grouped_matmul(rows: jax.Array, kernels: jax.Array, group_sizes: jax.Array) -> jax.Array:
  """rows [R,k], kernels [e,k,n] -> [R,n] in the dtype of rows."""
  return jax.lax.ragged_dot(rows, kernels, group_sizes, preferred_element_type=rows.dtype)
