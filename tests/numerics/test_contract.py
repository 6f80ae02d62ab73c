"""The contract, kept by the parts that run on any device: 8 CPU devices, each transport with each experts implementation."""

import jax.numpy as jnp
import pytest

from tests.numerics import contract


class OnOneDevice(contract.Contract):
  axes = {"data": 1}


class OnTwoRanks(contract.Contract):
  axes = {"data": 2, "expert": 2}


class OnFourRanks(contract.Contract):
  axes = {"data": 2, "expert": 4}


class TestLocalReference(OnOneDevice):
  experts = "reference"


class TestLocalRaggedDot(OnOneDevice):
  experts = "ragged_dot"


class TestLocalBlocked(OnOneDevice):
  experts = "blocked"


class TestLocalRaggedDotBfloat16(OnOneDevice):
  experts = "ragged_dot"
  dtype = jnp.bfloat16


class TestLocalBlockedAligned(OnOneDevice):
  experts = "blocked"
  alignment = 4


class TestXla2Reference(OnTwoRanks):
  experts = "reference"


class TestXla2RaggedDot(OnTwoRanks):
  experts = "ragged_dot"


class TestXla2Blocked(OnTwoRanks):
  experts = "blocked"


class TestXla4ReferenceAligned(OnFourRanks):
  experts = "reference"
  alignment = 4


class TestXla4RaggedDot(OnFourRanks):
  experts = "ragged_dot"


class TestXla4Blocked(OnFourRanks):
  experts = "blocked"


def losing(grouped_matmul):
  """A product that loses the last row of the last expert with any."""

  def product(rows, kernels, group_sizes):
    last = group_sizes.sum() - 1
    return grouped_matmul(rows, kernels, group_sizes).at[last].set(0)

  return product


@pytest.mark.parametrize("name", ["softmax", "sequence_33"])
def test_the_contract_can_be_broken(name, on_purpose):
  with pytest.raises(AssertionError, match="relative errors over their bound"):
    TestLocalReference().compare(contract.CASES[name], around=losing)


def test_garbage_is_seen_where_it_is_read(on_purpose):
  """Rows declared unused are filled with NaN: a layer that read one of them would not stay finite."""
  shrinking = lambda product: lambda rows, kernels, sizes: contract.with_garbage(product)(rows, kernels, sizes.at[-1].add(-1))
  with pytest.raises(AssertionError):
    TestLocalReference().compare(contract.CASES["deepseek3"], around=shrinking)
