"""Errors read: found; needed; Fix. Close matches help; errors survive pickling between processes."""

import pickle

import pytest

from maxtext_moe_te import errors


@pytest.mark.parametrize("kind", errors.MoeTeError.__subclasses__())
def test_text_status_and_pickling(kind):
  error = kind(found="x is 3", needed="x below 3", fix="write x=2")
  assert str(error) == "x is 3; needed: x below 3. Fix: write x=2."
  assert error.exit_status == 2
  assert isinstance(error, errors.MoeTeError)
  copy = pickle.loads(pickle.dumps(error))
  assert type(copy) is kind and str(copy) == str(error)


def test_nearest():
  assert errors.nearest("num_expert", ["num_experts", "steps"]) == "num_experts"
  assert errors.nearest("zzz", ["num_experts", "steps"]) is None
