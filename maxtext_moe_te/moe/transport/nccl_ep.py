"""Expert parallelism with NCCL EP, through Transformer Engine: a token travels once to each rank that needs it.

Binds TE's per-device primitives, so that it is a transport like any other inside the layer's one shard_map: TE's own
`ep_dispatch` wants global arrays with a single outer data axis, which most MaxText meshes do not have.

Imports Transformer Engine at call time, never at import. `bootstrap` must have run before anything here is traced.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxtext_moe_te.errors import RefusedError
from maxtext_moe_te.moe import te_api
from maxtext_moe_te.moe.capacity import receive_rows
from maxtext_moe_te.moe.transport.base import Dispatched

ALIGNMENT = 128  # rows per expert come in multiples of this: what every grouped GEMM recipe of TE accepts
MAX_EXPERTS_PER_TOKEN = 32
MAX_LOCAL_EXPERTS = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bootstrap:
  """What one process's NCCL EP group is made for; a call may use fewer tokens, nothing else may differ.

  Attributes:
    num_experts: E.
    experts_per_token: K.
    ranks: size of the expert axis.
    max_tokens_per_rank: largest T.
    width: D.
    capacity_factor: receive capacity over that of perfectly balanced routing; 0 for the worst case, which nothing overflows.
  """

  num_experts: int
  experts_per_token: int
  ranks: int
  max_tokens_per_rank: int
  width: int
  capacity_factor: float = 0.0

  def check(self) -> None:
    """Refuses what NCCL EP answers with an abort or a trap.

    Raises:
      RefusedError: with the change that makes it possible.
    """
    for wrong, found, needed, fix in (
      (self.ranks < 2, "NCCL EP without an expert axis", "at least 2 ranks", "set ici_expert_parallelism=2 or more"),
      (
        self.experts_per_token > MAX_EXPERTS_PER_TOKEN,
        f"num_experts_per_tok={self.experts_per_token} with NCCL EP",
        f"at most {MAX_EXPERTS_PER_TOKEN}",
        "set moe_te.transport=xla",
      ),
      (
        self.num_experts % 4 != 0,
        f"num_experts={self.num_experts} with NCCL EP",
        "a multiple of 4",
        "set moe_te.transport=xla",
      ),
      (
        self.num_experts // self.ranks > MAX_LOCAL_EXPERTS,
        f"{self.num_experts // self.ranks} experts per rank with NCCL EP",
        f"at most {MAX_LOCAL_EXPERTS}",
        "raise ici_expert_parallelism",
      ),
      (self.width % 8 != 0, f"a model width of {self.width} with NCCL EP", "a multiple of 8", "set moe_te.transport=xla"),
      (
        self.max_tokens_per_rank * self.ranks % 4 != 0,
        f"{self.max_tokens_per_rank} tokens per rank on {self.ranks} ranks with NCCL EP",
        "tokens times ranks divisible by 4",
        "change per_device_batch_size or max_target_length",
      ),
    ):
      if wrong:
        raise RefusedError(found=found, needed=needed, fix=fix)

  def serves(self, other: "Bootstrap") -> bool:
    """Whether a group for this is one for `other` too: the same layers, with no more tokens."""
    return other.max_tokens_per_rank <= self.max_tokens_per_rank and self == dataclasses.replace(
      other, max_tokens_per_rank=self.max_tokens_per_rank
    )

  @property
  def capacity(self) -> int:
    """R, in rows."""
    return self._rows(self.max_tokens_per_rank, self.capacity_factor)

  def worst_case(self, tokens_per_rank: int) -> int:
    """The rows that hold whatever the routing, for a call with so many tokens."""
    return self._rows(tokens_per_rank, 0.0)

  def _rows(self, tokens_per_rank, capacity_factor):
    return receive_rows(
      tokens_per_rank=tokens_per_rank,
      ranks=self.ranks,
      experts_per_token=self.experts_per_token,
      local_experts=self.num_experts // self.ranks,
      alignment=ALIGNMENT,
      capacity_factor=capacity_factor,
    )


_bootstrapped: Bootstrap | None = None


def bootstrap(group: Bootstrap, mesh: jax.sharding.Mesh, expert_axis: str) -> None:
  """Makes this process's NCCL EP group, once. All processes call it together, before anything is traced.

  Args:
    group: what it is made for.
    mesh: the training mesh.
    expert_axis: its axis over which experts are split.

  Raises:
    RefusedError: NCCL EP cannot serve `group`, or this process has one for something else.
  """
  global _bootstrapped
  check_none_but(group)
  if _bootstrapped is not None:
    return
  group.check()
  from transformer_engine.jax.ep import ep_bootstrap
  from transformer_engine.jax.sharding import MeshResource, global_shard_guard

  with jax.set_mesh(mesh), mesh, global_shard_guard(MeshResource(ep_resource=expert_axis)):
    ep_bootstrap(
      world_size=mesh.devices.size,
      rank=jax.process_index(),
      num_experts=group.num_experts,
      max_tokens_per_rank=group.max_tokens_per_rank,
      recv_capacity_per_rank=group.capacity,
      hidden_dim=group.width,
      max_token_dtype=jnp.bfloat16,
      drop_on_overflow=bool(group.capacity_factor),
    )
  _bootstrapped = group


def check_none_but(group: Bootstrap) -> None:
  """Refuses a second group: a process has one.

  Raises:
    RefusedError: this process has a group that does not serve `group`.
  """
  if _bootstrapped is not None and not _bootstrapped.serves(group):
    raise RefusedError(
      found=f"this process's NCCL EP group is for {_bootstrapped}, and a model asks for {group}",
      needed="one shape of MoE layer per process",
      fix="set moe_te.transport=xla, or give each model a process of its own",
    )


def check_local_devices() -> None:
  """Refuses several GPUs in one process where Transformer Engine cannot borrow XLA's communicators.

  Raises:
    RefusedError: with the two ways out.
  """
  if jax.local_device_count() > 1 and not te_api.shares_communicators():
    raise RefusedError(
      found=f"{jax.local_device_count()} GPUs in one process, with a Transformer Engine or JAX that cannot share XLA's communicators",
      needed="JAX 0.11.2 or newer and a Transformer Engine built against it, or one GPU per process",
      fix="start one process per GPU, or set moe_te.transport=xla",
    )


def finalize() -> None:
  """Frees the group at the end of a run and leaves the distributed system, all processes together. Without one, does nothing.

  A rank that frees its buffers while another still reads them over NVLink, or that leaves this to the interpreter's exit, keeps
  processes from ending.
  """
  global _bootstrapped
  if _bootstrapped is None:
    return
  from jax.experimental import multihost_utils
  from transformer_engine.jax.ep import ep_finalize

  multihost_utils.sync_global_devices("maxtext-moe-te: end of run")
  ep_finalize()  # drops compiled programs first, they hold the communicator
  _bootstrapped = None
  jax.distributed.shutdown()


def bootstrapped() -> Bootstrap | None:
  """What this process's group is for, or None."""
  return _bootstrapped


@dataclasses.dataclass(frozen=True)
class NcclEpTransport:
  """Attributes: group: what the process's NCCL EP group is for."""

  group: Bootstrap
  name: str = "nccl_ep"

  def dispatch(self, x, experts, weights, *, distinct):
    """See `Transport.dispatch`. Rows are aligned to `ALIGNMENT` and padded with zeros; past the last expert's they are undefined."""
    if not distinct:
      raise RefusedError(
        found="a router that may name an expert twice, with NCCL EP",
        needed="a top-k selection",
        fix="set moe_te.transport=xla",
      )
    group = self.group
    if x.shape[0] > group.max_tokens_per_rank or (x.shape[1], experts.shape[1]) != (group.width, group.experts_per_token):
      raise RefusedError(
        found=f"{x.shape[0]} tokens of width {x.shape[1]} per rank, {experts.shape[1]} experts each, in an NCCL EP group for {group}",
        needed="no more tokens than the group was made for, of its width and experts per token",
        fix="set moe_te.transport=xla, or undo the change of logical_axis_rules that gives a rank more tokens",
      )
    call = _Call(experts_per_token=group.experts_per_token, tokens=x.shape[0], capacity=group.capacity)
    rows, row_weights, counts, received, handle = _dispatch(call, x, experts, weights.astype(jnp.float32))
    # The weights of padding rows are not promised to be numbers, and their rows enter the experts' weight gradients.
    row_weights = jnp.where(jnp.isfinite(row_weights), row_weights, 0)
    return Dispatched(rows, row_weights, counts, received, (call, handle))

  def combine(self, rows, handle, *, sum_dtype):
    """See `Transport.combine`. The sum leaves NCCL EP in the dtype of `rows`."""
    return _combine(handle[0], rows, handle[1]).astype(sum_dtype)


class _Call(NamedTuple):
  """What is static about one dispatch and its combine."""

  experts_per_token: int
  tokens: int
  capacity: int

  def bind(self, primitive: str, *arrays, **static):
    """Binds one of TE's per-device primitives, where XLA runs its own collectives: on one stream, ranks cannot cross."""
    from transformer_engine.jax.cpp_extensions import ep

    inner = getattr(ep, primitive).inner_primitive
    static |= dict(top_k=self.experts_per_token, dispatch_output_per_expert_alignment=ALIGNMENT)
    return ep._on_collective_stream(lambda: inner.bind(*arrays, **static))()

  @property
  def receive(self):
    return dict(recv_capacity_per_rank=self.capacity, is_outer=False)

  @property
  def send(self):
    return dict(out_leading_shape=(self.tokens,), out_partition_spec=None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dispatch(call, x, experts, weights):
  """x [T,D], experts int32 [T,K], weights float32 [T,K] -> rows [R,D], weights [R], counts [e], received, handle uint8 [1,n]."""
  counts, received, handle = call.bind("EpPreparePrimitive", experts, is_outer=False)
  rows, row_weights = call.bind("EpDispatchPrimitive", handle, experts, x, weights, **call.receive)
  return rows[0], row_weights[0], counts[0], received[0, 0], handle


def _dispatch_forward(call, x, experts, weights):
  results = _dispatch(call, x, experts, weights)
  return results, results[-1]


def _dispatch_backward(call, handle, gradients):
  d_rows, d_row_weights = gradients[:2]
  d_x, d_weights = call.bind("EpDispatchBwdPrimitive", handle, d_rows[None], d_row_weights[None], **call.send)
  return d_x, None, d_weights


_dispatch.defvjp(_dispatch_forward, _dispatch_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _combine(call, rows, handle):
  """rows [R,D], handle of the dispatch -> [T,D]."""
  return call.bind("EpCombinePrimitive", handle, rows[None], **call.send)


def _combine_forward(call, rows, handle):
  return _combine(call, rows, handle), handle


def _combine_backward(call, handle, d_y):
  return call.bind("EpCombineBwdPrimitive", handle, d_y, **call.receive)[0], None


_combine.defvjp(_combine_forward, _combine_backward)
