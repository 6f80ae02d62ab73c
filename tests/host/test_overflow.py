"""A finite capacity factor through MaxText's train loop: where it holds nothing changes, where it does not the run stops in time."""

import jax
import pytest

from maxtext_moe_te.errors import CapacityError
from maxtext_moe_te.settings.config import MoeTeOptions
from tests import helpers

pytestmark = pytest.mark.host

WORDS = ["model_name=mixtral-8x7b", "ici_expert_parallelism=4", "ici_fsdp_parallelism=2"]


def test_a_factor_that_holds_changes_nothing(tmp_path):
  worst = helpers.train(tmp_path, WORDS, options=MoeTeOptions())
  held = helpers.train(tmp_path, WORDS, options=MoeTeOptions(capacity_factor=3.0))
  assert held[-1]["moe_te/receive_capacity"] < 2 * worst[-1]["moe_te/receive_capacity"]
  assert held[-1]["moe_te/overflow"] == 0
  helpers.assert_same_losses(held, worst)


def test_an_overflow_stops_the_run_before_its_checkpoint(tmp_path):
  words = [*WORDS, "enable_checkpointing=true", "async_checkpointing=false", "checkpoint_period=1", "steps=3"]
  with pytest.raises(CapacityError) as stopped:
    helpers.train(tmp_path, words, options=MoeTeOptions(capacity_factor=1.0))
  text = str(stopped.value)
  assert "moe_te.capacity_factor=1" in text
  assert "the step's update was not applied" in text
  named = float(text.split("capacity_factor of at least ")[1].split(" ")[0])
  assert named > 1
  assert not list(tmp_path.rglob("checkpoints/[0-9]*")), "a checkpoint of a step that overflowed"
  retried = helpers.train(tmp_path, ["steps=1", *WORDS], options=MoeTeOptions(capacity_factor=named))
  assert retried[0]["moe_te/overflow"] == 0


def test_the_state_of_an_overflowed_step_is_the_one_before():
  from maxtext_moe_te.host import overflow

  def train_step(model, config, shardings, params, state, data):
    del model, config, shardings, params
    return {"w": state["w"] + 1, "step": state["step"] + 1}, {"scalar": {overflow.OVERFLOW: data}}

  step = jax.jit(lambda state, data: overflow.keeping_state(train_step, MoeTeOptions(capacity_factor=2.0))(0, 0, 0, 0, state, data))
  state = {"w": jax.numpy.ones(3), "step": jax.numpy.int32(7)}
  for rows, expected in ((0, 8), (1, 7)):
    assert int(step(state, rows)[0]["step"]) == expected
  assert overflow.keeping_state(train_step, MoeTeOptions()) is train_step
