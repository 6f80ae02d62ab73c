"""How many rows a rank must be able to receive."""

import math
from collections.abc import Callable


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
