"""The oracle: one product per expert over all rows, in float32, masked. Slow and obvious; no speed tricks."""

import jax
import jax.numpy as jnp

from maxtext_moe_te.moe.experts.base import expert_of_rows


def grouped_matmul(rows: jax.Array, kernels: jax.Array, group_sizes: jax.Array) -> jax.Array:
  """rows [R,k], kernels [e,k,n] -> [R,n] in the dtype of rows, computed in float32; unused rows are zero."""
  expert = expert_of_rows(group_sizes, rows.shape[0])
  out = jnp.zeros((rows.shape[0], kernels.shape[-1]), jnp.float32)
  for e in range(kernels.shape[0]):
    mine = (expert == e)[:, None]
    own_rows = jnp.where(mine, rows, 0).astype(jnp.float32)
    out += jnp.dot(own_rows, kernels[e].astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
  return out.astype(rows.dtype)
