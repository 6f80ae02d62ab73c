"""How many rows a rank must be able to receive, what they take in memory, and which capacity that leads to."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

GIB = 2**30
FACTOR = 2.0  # of the capacity that is taken where the worst case does not fit: NVIDIA's
CHUNKS = (1, 2, 4, 8, 16, 32)  # more save nothing: the weights' gradients are read and written once per part


def worst_case_rows(*, group_tokens: int, experts_per_token: int, local_experts: int, distinct: bool = True) -> int:
  """Receive capacity R that holds whatever the routing: every token of the group sends all it can to this rank.

  A token that selects K different experts sends a rank at most min(K, e) rows; one that may repeat an expert, K.

  Args:
    group_tokens: N, tokens of the whole expert-parallel group.
    experts_per_token: K.
    local_experts: e.
    distinct: whether the K experts of a token are different.

  Returns:
    R, in rows.
  """
  return group_tokens * (min(experts_per_token, local_experts) if distinct else experts_per_token)


def balanced_rows(*, group_tokens: int, experts_per_token: int, ranks: int) -> int:
  """Rows a rank receives when routing is perfectly balanced: N K / ranks, rounded up. Capacity factors multiply this."""
  return -(-group_tokens * experts_per_token // ranks)


def aligned_rows(rows: int, *, local_experts: int, alignment: int) -> int:
  """Rows needed when each expert's share of `rows` starts at a multiple of `alignment`; itself such a multiple."""
  return -(-(rows + min(local_experts, rows) * (alignment - 1)) // alignment) * alignment


def receive_rows(
  *, tokens_per_rank: int, ranks: int, experts_per_token: int, local_experts: int, alignment: int, capacity_factor: float = 0.0
) -> int:
  """Receive capacity R of a rank whose experts' rows each start at a multiple of `alignment`, as Transformer Engine's `moe()` has it.

  Args:
    tokens_per_rank: T.
    ranks: of the expert axis.
    experts_per_token: K, different ones.
    local_experts: e.
    alignment: in rows.
    capacity_factor: R over that of perfectly balanced routing, at most the worst case; 0 for the worst case.

  Returns:
    R, in rows, a multiple of `alignment`.
  """
  up = lambda rows: -(-rows // alignment) * alignment
  rows = worst_case_rows(group_tokens=ranks * tokens_per_rank, experts_per_token=experts_per_token, local_experts=local_experts)
  worst = min(aligned_rows(rows, local_experts=local_experts, alignment=alignment), local_experts * up(ranks * tokens_per_rank))
  if not capacity_factor:
    return worst
  balanced = local_experts * up(-(-tokens_per_rank * experts_per_token // local_experts))
  return min(up(math.ceil(balanced * capacity_factor)), worst)


def chunks_within(rows_of_a_rank: Callable[[int], int], capacity: int, tokens: int, at_least: int = 1) -> int:
  """The fewest parts of a rank's tokens whose worst case a capacity holds.

  Args:
    rows_of_a_rank: tokens of a part -> rows of its worst case.
    capacity: R, in rows.
    tokens: T of a rank.
    at_least: no fewer.

  Returns:
    int: a divisor of T; T itself where nothing less is enough.
  """
  parts = (chunks for chunks in range(at_least, tokens) if tokens % chunks == 0)
  return next((chunks for chunks in parts if rows_of_a_rank(tokens // chunks) <= capacity), tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Received:
  """What a rank of an expert axis receives of one MoE layer.

  Attributes:
    ranks: size of the expert axis.
    tokens: T of a rank.
    experts_per_token: K.
    num_experts: E.
    width: D.
    hidden: F of a rank.
    alignment: of each expert's rows.
    kept: elements of a row, in bfloat16, that all layers together keep for the backward pass.
  """

  ranks: int
  tokens: int
  experts_per_token: int
  num_experts: int
  width: int
  hidden: int
  alignment: int = 128
  kept: int = 0

  def rows(self, capacity_factor: float = 0.0, chunks: int = 1) -> int:
    """R of one part, see `receive_rows`."""
    return receive_rows(
      tokens_per_rank=-(-self.tokens // chunks),
      ranks=self.ranks,
      experts_per_token=self.experts_per_token,
      local_experts=self.num_experts // self.ranks,
      alignment=self.alignment,
      capacity_factor=capacity_factor,
    )

  def buffer_bytes(self, capacity_factor: float = 0.0, chunks: int = 1) -> int:
    """Of the rows and what is computed of them, in the forward and backward pass of a layer whose experts are computed anew there.

    Three buffers of width D and four of width F: compiled for an H200 at DeepSeek-V3's widths, expert 8, the temporaries grow by 58.1 kB
    a row, and this is 59.4.
    """
    of_a_row = 3 * self.width + 4 * self.hidden + (self.kept if chunks == 1 else 0)
    return 2 * of_a_row * self.rows(capacity_factor, chunks)

  def group_bytes(self, capacity_factor: float = 0.0, chunks: int = 1) -> int:
    """What NCCL EP allocates outside XLA's pool: staging, probabilities, scales. NCCL EP 0.1.0, nccl_ep.cc."""
    rows, local, tokens = self.rows(capacity_factor, chunks), self.num_experts // self.ranks, -(-self.tokens // chunks)
    return 2 * self.ranks * tokens * self.width * 2 + 2 * rows * local * self.ranks * 4 + rows * self.width * 2 + 32 * 2**20

  def handle_bytes(self, capacity_factor: float = 0.0, chunks: int = 1) -> int:
    """Of what a dispatch keeps for its combine, per layer. NCCL EP 0.1.0, approximately."""
    rows, tokens = self.rows(capacity_factor, chunks), -(-self.tokens // chunks)
    return rows * (self.num_experts // self.ranks) + 8 * rows * self.experts_per_token + 4 * tokens * self.num_experts

  def total_bytes(self, capacity_factor: float = 0.0, chunks: int = 1) -> int:
    """All of it."""
    return sum(part(capacity_factor, chunks) for part in (self.buffer_bytes, self.group_bytes, self.handle_bytes))


@dataclasses.dataclass(frozen=True)
class Choice:
  """Attributes: capacity_factor, chunks: the options. why: for the log; "" where nothing speaks against the worst case in one part."""

  capacity_factor: float
  chunks: int
  why: str = ""


def choose(received: Received, room: int | None, *, finite: bool, chunks: int | None = None) -> Choice:
  """The capacity and the parts with which no token is lost: the worst case where it fits, else one that a step may exceed, or parts.

  Args:
    received: by a rank.
    room: bytes that it may take; None where nobody knows.
    finite: whether a step that exceeds a finite capacity can run again.
    chunks: parts, where they are given.

  Returns:
    Choice.
  """
  first = chunks or 1
  if room is None or received.total_bytes(0.0, first) <= room:
    return Choice(0.0, first)
  over = f"the worst case of {received.rows(0.0, first):,} rows on a rank takes {_gib(received.total_bytes(0.0, first))} of {_gib(room)}"
  if finite and received.rows(FACTOR, first) < received.rows(0.0, first):
    taken = received.total_bytes(FACTOR, first)
    return Choice(FACTOR, first, f"{over}; {FACTOR:g} times balanced routing takes {_gib(taken)}, and a step that needs more runs again")
  parts = [first] if chunks else [c for c in CHUNKS if received.tokens % c == 0]
  fewest = next((c for c in parts if received.total_bytes(0.0, c) <= room), parts[-1])
  return Choice(0.0, fewest, f"{over}; in {fewest} parts {_gib(received.total_bytes(0.0, fewest))}")


def decided(
  config: Mapping[str, Any],
  axis_sizes: Mapping[str, int],
  *,
  capacity_factor: float | None,
  chunks: int | None,
  memory: int | None,
  finite: bool,
  call: tuple[int, int] | None = None,
) -> Choice:
  """What a run under a configuration of MaxText takes.

  Args:
    config: see `received_by`.
    axis_sizes: of the mesh.
    capacity_factor, chunks: the options; None for auto.
    memory: bytes of XLA's pool on a GPU; None where nobody knows.
    finite: see `choose`.
    call: sequences and their length in the largest batch that a call of the model gets; None for a train step's.

  Returns:
    Choice.
  """
  if capacity_factor is not None or axis_sizes.get("expert", 1) == 1:
    return Choice(capacity_factor or 0.0, chunks or 1)
  space = None if memory is None else room(memory, least_state_bytes(config, axis_sizes))
  return choose(received_by(config, axis_sizes, *(call or ())), space, finite=finite, chunks=chunks)


def room(memory: int, state: int) -> int:
  """Bytes that rows may take: half of what weights and optimizer leave, the other half being for all other activations."""
  return max(memory - state, 0) // 2


def _gib(size):
  return f"{size / GIB:.1f} GiB"


def tokens_per_rank(sequences: int, length: int, axis_sizes: Mapping[str, int]) -> int:
  """T: tokens of one rank in a call with so many sequences, over the axes that split them."""
  axes = ("data", "fsdp", "fsdp_transpose", "expert", "context", "context_usp_ulysses", "tensor_sequence")
  return -(-sequences * length // math.prod(axis_sizes.get(axis, 1) for axis in axes))


def least_state_bytes(config: Mapping[str, Any], axis_sizes: Mapping[str, int]) -> int:
  """Bytes per GPU of the experts' weights and Adam's two moments of them; less than what a run holds there.

  Args:
    config: MaxText's configuration, with `decoder_block` as text.
    axis_sizes: of the mesh.
  """
  layers = config["num_decoder_layers"] - (config.get("first_num_dense_layers") or 0)
  block = config.get("decoder_block")
  if block not in ("deepseek", "mixtral", "qwen3_moe", "gpt_oss") or config.get("parameter_memory_host_offload"):
    return 0  # others have no experts in every layer
  hidden = config["mlp_dim" if block in ("mixtral", "gpt_oss") else "moe_mlp_dim"]
  elements = layers * config["num_experts"] * 3 * expert_width(config) * hidden
  weight = 2 if str(config.get("weight_dtype")) == "bfloat16" else 4
  moments = weight + (2 if str(config.get("mu_dtype")) == "bfloat16" else weight)  # mu_dtype is the first one's
  elsewhere = config.get("shard_optimizer_over_data") or config.get("optimizer_memory_host_offload")
  if str(config.get("opt_type") or "adamw") not in ("adamw", "adam_pax") or elsewhere:
    moments = 0
  split = math.prod(axis_sizes.get(axis, 1) for axis in ("fsdp", "fsdp_transpose", "expert", "tensor"))
  return elements * (weight + moments) // split


def expert_width(config: Mapping[str, Any]) -> int:
  """D of the experts' inputs."""
  width = config.get("moe_expert_input_dim")
  return width if width and width > 0 else config["emb_dim"]


def received_by(
  config: Mapping[str, Any], axis_sizes: Mapping[str, int], sequences: int | None = None, length: int | None = None
) -> Received:
  """What a rank receives under a configuration of MaxText.

  Args:
    config: its keys, with `decoder_block` as text.
    axis_sizes: of the mesh.
    sequences, length: of the largest batch that a call of the model gets; those of a train step if not given.
  """
  block, split = config.get("decoder_block"), math.prod(axis_sizes.get(axis, 1) for axis in ("tensor", "tensor_transpose"))
  width = expert_width(config)
  hidden = config["mlp_dim" if block in ("mixtral", "gpt_oss") else "moe_mlp_dim"] or config["mlp_dim"]
  per_row = {"moe_x_sorted": width, "moe_mlpwi_0": 2 * hidden, "moe_mlpwo": width}
  kept = 0
  if config.get("remat_policy") == "custom":
    kept = sum(elements for name, elements in per_row.items() if config.get(name) == "device")
  layers = config["num_decoder_layers"] - (config.get("first_num_dense_layers") or 0)
  return Received(
    ranks=axis_sizes.get("expert", 1),
    tokens=tokens_per_rank(sequences or config["micro_batch_size_to_train_on"], length or config["max_target_length"], axis_sizes),
    experts_per_token=config["num_experts_per_tok"],
    num_experts=config["num_experts"],
    width=width,
    hidden=-(-hidden // split),
    kept=layers * kept,
  )
