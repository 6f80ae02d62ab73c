"""The MoE layer: arrays in, arrays out. Imports jax, never MaxText.

x [B,S,D] -> routing -> dispatch -> experts -> combine -> y [B,S,D]

Shape letters, everywhere in this package: B batch, S sequence, D model width, E experts, e experts held by one rank, K experts per
token, F expert width, T tokens of one rank, N tokens of one expert-parallel group, R receive capacity in rows. A row is one copy
of a token sent to one expert.
"""
