"""How many rows a rank must be able to receive."""


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
