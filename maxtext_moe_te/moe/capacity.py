"""How many rows a rank must be able to receive so that no routing can overflow it."""


def worst_case_rows(*, group_tokens: int, experts_per_token: int, local_experts: int) -> int:
  """Receive capacity R that holds whatever the routing: every token of the group sends all it can to this rank.

  A token selects K different experts, so it sends a rank at most min(K, e) rows.

  Args:
    group_tokens: N, tokens of the whole expert-parallel group.
    experts_per_token: K.
    local_experts: e.

  Returns:
    R, in rows.
  """
  return group_tokens * min(experts_per_token, local_experts)
