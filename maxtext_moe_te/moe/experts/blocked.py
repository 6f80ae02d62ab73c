"""A grouped product from an ordinary batched one: each expert's rows are padded to whole blocks, each block has one expert.

For machines without a grouped GEMM. On a CPU `ragged_dot` multiplies every row with every expert; this multiplies each row once,
at the price of a copy of the kernel per block, so it suits small models.
"""

import jax
import jax.numpy as jnp

from maxtext_moe_te.moe.experts.base import expert_of_rows


def grouped_matmul(rows: jax.Array, kernels: jax.Array, group_sizes: jax.Array) -> jax.Array:
  """rows [R,k], kernels [e,k,n] -> [R,n] in the dtype of rows; unused rows are zero."""
  num_rows, (num_experts, width, _) = rows.shape[0], kernels.shape
  block = block_rows(num_rows, num_experts)
  blocks = -(-num_rows // block) + num_experts  # each expert adds at most one block that is not full

  blocks_of_expert = -(-group_sizes // block)
  first_block = jnp.cumsum(blocks_of_expert) - blocks_of_expert
  first_row = jnp.cumsum(group_sizes) - group_sizes

  # Where each row goes in the padded order; unused rows go to slots past the end, each its own.
  expert = expert_of_rows(group_sizes, num_rows)
  used = expert < num_experts
  of = lambda per_expert: jnp.take(per_expert, expert, mode="clip")
  row = jnp.arange(num_rows)
  slot = row + jnp.where(used, of(first_block) * block - of(first_row), blocks * block)

  padded = jnp.zeros((blocks * block, width), rows.dtype).at[slot].set(rows, mode="drop", unique_indices=True)
  kernel_of_block = jnp.searchsorted(jnp.cumsum(blocks_of_expert), jnp.arange(blocks), side="right")
  kernel = jnp.take(kernels, kernel_of_block, axis=0, mode="clip")
  out = jnp.einsum("bik,bkn->bin", padded.reshape(blocks, block, width), kernel, preferred_element_type=rows.dtype)
  return jnp.take(out.reshape(blocks * block, -1), slot, axis=0, mode="fill", fill_value=0)


def block_rows(num_rows: int, num_experts: int) -> int:
  """Rows per block: a power of two near a quarter of an expert's even share, between 8 and 256."""
  share = max(num_rows // (4 * num_experts), 1)
  return min(max(1 << (share.bit_length() - 1), 8), 256)
