"""A finite capacity factor through MaxText's train loop: where it holds nothing changes, where it does not the run stops in time."""

import jax
import pytest

from maxtext_moe_te.errors import CapacityError, RefusedError
from maxtext_moe_te.settings.config import MoeTeOptions
from tests import helpers, tolerances

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
    helpers.train(tmp_path, words, options=MoeTeOptions(capacity_factor=1.0, on_overflow="stop"))
  text = str(stopped.value)
  assert "moe_te.capacity_factor=1" in text
  assert "the step's update was not applied" in text
  named = float(text.split("capacity_factor of at least ")[1].split(" ")[0])
  assert named > 1
  assert not list(tmp_path.rglob("checkpoints/[0-9]*")), "a checkpoint of a step that overflowed"
  retried = helpers.train(tmp_path, ["steps=1", *WORDS], options=MoeTeOptions(capacity_factor=named))
  assert retried[0]["moe_te/overflow"] == 0


def test_with_microbatches_the_named_factor_holds(tmp_path):
  """MaxText adds up what the layers of all microbatches report; the largest demand among them is known all the same."""
  words = [*WORDS, "base_num_decoder_layers=1", "gradient_accumulation_steps=2", "per_device_batch_size=2", "steps=1"]
  with pytest.raises(CapacityError, match=r"a rank was sent more rows than the .* it holds in one of 2 microbatches") as stopped:
    helpers.train(tmp_path, words, options=MoeTeOptions(capacity_factor=1.0, on_overflow="stop"))
  named = float(str(stopped.value).split("capacity_factor of at least ")[1].split(" ")[0])
  (step,) = helpers.train(tmp_path, words, options=MoeTeOptions(capacity_factor=named, on_overflow="stop"))
  assert step["moe_te/overflow"] == 0 and 1 < step["moe_te/demand_over_balanced"] <= named < 4


def test_native_fine_tuning_is_checked_too(tmp_path):
  module = "post_train.sft.train_sft_native"
  words = [*WORDS, "base_num_decoder_layers=1", "steps=1"]
  run = lambda factor, **more: helpers.train(tmp_path, words, options=MoeTeOptions(capacity_factor=factor, **more), module=module)
  (step,) = run(3.0)
  assert step["moe_te/overflow"] == 0 and step["moe_te/receive_rows_max"] <= step["moe_te/receive_capacity"]
  (again,) = run(1.0)
  assert again["moe_te/replayed"] == 1
  assert again["learning/loss"] == pytest.approx(step["learning/loss"], rel=tolerances.TRAINING_LOSS)
  with pytest.raises(CapacityError, match="the step's update was not applied"):
    run(1.0, on_overflow="stop")


def test_a_layer_that_nobody_watches_is_refused():
  """Every trainer and program that does not check its steps: rows past the capacity would be dropped in silence."""
  from maxtext_moe_te.host import overflow

  config = helpers.maxtext_config("mixtral-8x7b", ici_expert_parallelism=2, ici_fsdp_parallelism=1)
  mesh = helpers.mesh_of(config, 2)
  module, inputs = helpers.routed_moe(config, mesh), helpers.layer_inputs(config, batch=2)
  call = lambda factor: helpers.run_layer(config, mesh, helpers.our_call(capacity_factor=factor, transport="xla"), module, *inputs)
  with pytest.raises(RefusedError) as refused:
    call(1.5)
  assert str(refused.value) == (
    "moe_te.capacity_factor=1.5 where nothing checks a step for overflow; needed: the train step of MaxText's pre-training "
    "(train_sft_native has it too), or a capacity that nothing exceeds. Fix: set moe_te.capacity_factor=0."
  )
  holds = call(2)  # twice the rows of balanced routing, on two ranks: all there can be
  helpers.assert_close(holds, call(0), forward=tolerances.FLOAT32_FORWARD, gradient=tolerances.FLOAT32_GRADIENT)
  with overflow.watched() as watch:
    call(1.5)
  assert watch.needed


def test_a_step_that_reports_nothing_is_refused():
  from maxtext_moe_te.host import overflow

  options = MoeTeOptions(capacity_factor=1.5)

  def train_step(model, config, shardings, params, state, data):
    del model, config, shardings, params, data
    overflow.check_watched(options, 2)
    return state, {"scalar": {}}

  with pytest.raises(RefusedError, match="with a train step that does not report what its layers record"):
    overflow.keeping_state(train_step, options)(0, 0, 0, 0, {}, 0)


def test_the_state_of_an_overflowed_step_is_the_one_before():
  from maxtext_moe_te.host import overflow

  def train_step(model, config, shardings, params, state, data):
    del model, config, shardings, params
    return {"w": state["w"] + 1, "step": state["step"] + 1}, {"scalar": {overflow.OVERFLOW: data}}

  step = jax.jit(lambda state, data: overflow.keeping_state(train_step, MoeTeOptions(capacity_factor=2.0))(0, 0, 0, 0, state, data))
  state = {"w": jax.numpy.ones(3), "step": jax.numpy.int32(7)}
  for rows, expected in ((0, 8), (1, 7)):
    assert int(step(state, rows)[0]["step"]) == expected
  assert overflow.keeping_state(train_step, MoeTeOptions(capacity_factor=0)) is train_step
