"""Transformer Engine's grouped GEMM: cuBLASLt, graph safe, group sizes stay on the device.

bfloat16 binds TE's primitive directly instead of calling `grouped_dense`, for one reason: `grouped_dense` makes zero-element
constants, and the compiler of JAX 0.11.2 crashes on those in a shard_map in a scan under grad. MXFP8 goes through `grouped_dense`,
which owns the quantization.

Imports Transformer Engine at call time, never at import; `te_api` says before that whether it has what is called here.
"""

import importlib

import jax
import jax.numpy as jnp

from maxtext_moe_te.errors import RefusedError
from maxtext_moe_te.moe import te_api

MXFP8_BLOCK = 128  # rows per expert and both widths must be multiples of this


def grouped_matmul(rows: jax.Array, kernels: jax.Array, group_sizes: jax.Array) -> jax.Array:
  """rows bfloat16 [R,k], kernels bfloat16 [e,k,n] -> bfloat16 [R,n]; rows past the sum of group_sizes are undefined.

  Raises:
    RefusedError: another dtype: TE would copy the group sizes to the host and wait for them.
  """
  if rows.dtype != jnp.bfloat16:
    raise RefusedError(
      found=f"moe_te.experts=te with dtype={rows.dtype}",
      needed="dtype=bfloat16, the one its grouped GEMM computes in without waiting for the host",
      fix="set dtype=bfloat16 or moe_te.experts=ragged_dot",
    )
  return _grouped_matmul(rows, kernels, group_sizes)


@jax.custom_vjp
def _grouped_matmul(rows, kernels, group_sizes):
  return _forward(rows, kernels, group_sizes)[0]


def _forward(rows, kernels, group_sizes):
  """rows [R,k] x kernels [e,k,n] -> [R,n]."""
  out = _bind(rows, kernels, group_sizes, ragged="rows", out_shape=(rows.shape[0], kernels.shape[2]))
  return out, (rows, kernels, group_sizes)


def _backward(residuals, d_out):
  rows, kernels, group_sizes = residuals
  d_rows = _bind(d_out, kernels, group_sizes, ragged="rows", transpose_kernels=True, out_shape=rows.shape)
  d_kernels = _bind(rows, d_out, group_sizes, ragged="both", out_shape=kernels.shape)
  return d_rows, d_kernels, None


_grouped_matmul.defvjp(_forward, _backward)


def _bind(lhs, rhs, group_sizes, *, ragged: str, out_shape, transpose_kernels: bool = False):
  """One grouped GEMM.

  Args:
    lhs: [R,a].
    rhs: kernels [e,b,c], or [R,c] if `ragged` is "both".
    group_sizes: int32 [e].
    ragged: "rows": lhs rows times the kernel of their group. "both": lhs^T rhs over the rows of each group.
    out_shape: of the result.
    transpose_kernels: multiply with the kernels' transposes.
  """
  from transformer_engine.jax.quantize import ScalingMode

  # Arrays of no elements, made from an input: as constants they crash JAX 0.11.2 (see the module's docstring).
  none_int = jax.lax.slice(group_sizes, (0,), (0,))
  none_float = none_int.astype(jnp.float32)
  both = ragged == "both"
  alphas = te_api.alphas(group_sizes.size)
  left, right = lhs.shape
  rhs_left = rhs.shape[0] if both else rhs.shape[0] * rhs.shape[1]
  (out,) = _gemm_module().GroupedGemmPrimitive.outer_primitive.bind(
    lhs,
    none_float,
    rhs,
    none_float,
    jnp.zeros((), jnp.float32),  # no bias: it would select a kernel that copies group_sizes to the host
    group_sizes,  # lhs rows
    none_int,
    group_sizes if both else none_int,  # rhs rows
    none_int,
    none_int if both else group_sizes,  # result rows
    none_int,
    jnp.ones((alphas,), jnp.float32),
    jnp.zeros((alphas,), jnp.float32),  # betas
    lhs_is_trans=both,
    rhs_is_trans=transpose_kernels,
    scaling_mode=ScalingMode.NO_SCALING.value,
    out_dtype=jnp.dtype(lhs.dtype),
    has_bias=False,
    use_async_d2h_group_sizes=False,
    use_v2_ffi=True,
    lhs_axis_boundary=1,
    rhs_axis_boundary=1 if both else 2,
    out_shape=tuple(out_shape),
    lhs_left_size=left,
    lhs_right_size=right,
    rhs_left_size=rhs_left,
    rhs_right_size=rhs.shape[-1],
  )
  return out


def _gemm_module():
  # Not `from … import gemm`: the package has a function of that name.
  return importlib.import_module("transformer_engine.jax.cpp_extensions.gemm")


def grouped_matmul_mxfp8(rows: jax.Array, kernels: jax.Array, group_sizes: jax.Array) -> jax.Array:
  """The same in MXFP8 (E4M3, one scale per 32 values, both directions); rows, kernels and result in bfloat16.

  The transport must align each expert's rows to `MXFP8_BLOCK`.

  Raises:
    RefusedError: a width is not a multiple of `MXFP8_BLOCK`.
  """
  for name, size in (("input", kernels.shape[1]), ("output", kernels.shape[2])):
    if size % MXFP8_BLOCK:
      raise RefusedError(
        found=f"an expert product with {name} width {size} on one rank, in MXFP8",
        needed=f"a multiple of {MXFP8_BLOCK}",
        fix="set moe_te.recipe=bf16, or change the model width or the tensor parallelism",
      )
  from transformer_engine.jax.dense import grouped_dense
  from transformer_engine.jax.quantize import QuantizerFactory, ScalingMode

  quantizers = QuantizerFactory.create_set(
    scaling_mode=ScalingMode.MXFP8_1D_SCALING,
    fwd_dtype=jnp.float8_e4m3fn,
    bwd_dtype=jnp.float8_e4m3fn,
    is_2x2x=True,
    n_groups=kernels.shape[0],
  )
  return grouped_dense(rows, kernels, group_sizes, quantizer_set=quantizers)
