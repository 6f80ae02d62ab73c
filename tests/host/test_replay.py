"""A finite capacity that steps exceed, under `moe_te.on_overflow`: exact is as if it had been enough, skip leaves updates out."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from maxtext_moe_te.errors import CapacityError, RefusedError
from maxtext_moe_te.settings.config import MoeTeOptions
from tests import helpers, tolerances
from tests.host.test_training import ACCUMULATED, DEEPSEEK3, EXPERT2

pytestmark = pytest.mark.host

HELD = 3.0  # rows that the first program of the toy holds


def toy(state, batch):
  """A step whose result depends on the order of batches, and that leaves the state where a batch needs more than is held."""
  from maxtext_moe_te.host import overflow

  new = {"w": 0.9 * state["w"] + batch["x"] * jnp.cos(state["w"]), "step": state["step"] + 1}
  over = jnp.bool_(False) if overflow.holds_all() else batch["rows"] > HELD
  scalars = {overflow.OVERFLOW: over.astype(jnp.int32), overflow.DEMAND: batch["rows"], overflow.CAPACITY: jnp.float32(HELD)}
  metrics = {"scalar": scalars | {"learning/loss": state["w"].sum()}}
  return overflow.selected(over, jax.tree.leaves(state), new, metrics), metrics


@functools.cache
def sharding():
  return NamedSharding(jax.make_mesh((1,), ("data",), devices=jax.devices()[:1]), PartitionSpec())


@pytest.fixture
def programs():
  from maxtext_moe_te.host import replay

  one = sharding()
  options = MoeTeOptions(capacity_factor=1.0)
  return replay._Programs(toy, (one, one), (one, None), (), 0, one, options)


def first_state():
  return jax.device_put({"w": jnp.arange(4.0), "step": jnp.int32(0)}, sharding())


def batches(rows, seed=0):
  values = np.random.default_rng(seed).standard_normal(len(rows), dtype=np.float32)
  return [jax.device_put({"x": x, "rows": jnp.float32(r)}, sharding()) for x, r in zip(values, rows)]


@functools.cache
def unlimited():
  from maxtext_moe_te.host import overflow

  def step(state, batch):
    with overflow.holding_all():
      return toy(state, batch)

  return jax.jit(step)


def expected(steps):
  state, losses = first_state(), []
  for batch in steps:
    state, metrics = unlimited()(state, batch)
    losses.append(float(metrics["scalar"]["learning/loss"]))
  return state, losses


def run(programs, steps, settled_after=()):
  """(state, losses, the state's counter where it was looked at) of a loop that reads a step's metrics one step later, as MaxText's does."""
  state, metrics, looked = first_state(), [], {}
  for number, batch in enumerate(steps):
    state, of_step = programs(state, batch)
    metrics.append(of_step)
    if number in settled_after:
      programs.settle()
      looked[number] = int(state["step"])
  programs.settle()
  return state, [float(of_step["scalar"]["learning/loss"]) for of_step in metrics], looked


def test_any_pattern_of_overflows(programs):
  """300 of them through the same two compiled programs, looked at in between: bit-equal to a capacity that was enough."""
  random = np.random.default_rng(1)
  for case in range(300):
    length = int(random.integers(1, 12))
    likely = random.choice([0.0, 0.1, 0.5, 1.0])
    steps = batches(np.where(random.random(length) < likely, 5.0, 1.0), seed=case)
    programs._direct = programs._in_a_row = 0
    looks = {int(n) for n in random.integers(0, length, 2)}
    state, losses, looked = run(programs, steps, looks)
    wanted, wanted_losses = expected(steps)
    np.testing.assert_array_equal(state["w"], wanted["w"])
    assert losses == wanted_losses and int(state["step"]) == length
    assert looked == {n: n + 1 for n in looks}
  assert programs._first._cache_size() == programs._second._cache_size() == 1
  assert programs.replayed > 100


def test_the_second_program_is_compiled_with_the_first(programs):
  (batch,) = batches([5.0])
  shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), (first_state(), batch))
  assert programs.lower(*shapes).compile().memory_analysis() is not None


def test_a_step_that_is_traced_for_its_text_leaves_nothing_behind(programs):
  """MaxText's dump_jaxpr, before the first step."""
  steps = batches([5.0, 1.0])
  assert "cos" in str(jax.make_jaxpr(programs)(first_state(), steps[0]))
  state, losses, _ = run(programs, steps)
  wanted, wanted_losses = expected(steps)
  np.testing.assert_array_equal(state["w"], wanted["w"])
  assert losses == wanted_losses


def test_a_router_that_collapsed_runs_in_parts_at_once(programs, caplog):
  from maxtext_moe_te.host import replay

  caplog.set_level(logging.WARNING, "maxtext_moe_te")
  steps = batches([5.0] * 90)
  state, losses, _ = run(programs, steps)
  wanted, wanted_losses = expected(steps)
  np.testing.assert_array_equal(state["w"], wanted["w"])
  assert losses == wanted_losses and programs.replayed < 90 - replay.DIRECT_STEPS + 2
  assert "8 steps in a row overflowed: the next 64 run in parts at once" in caplog.text
  assert "a rank was sent 5 rows in a step and holds 3 (moe_te.capacity_factor=1): the step runs again in parts; 1 so far" in caplog.text


def test_warm_up_steps_are_not_replayed(programs):
  (bad, *steps) = batches([5.0, 1.0, 5.0, 1.0])
  programs(first_state(), bad)  # its result is thrown away
  state, losses, _ = run(programs, steps)
  wanted, wanted_losses = expected(steps)
  np.testing.assert_array_equal(state["w"], wanted["w"])
  assert losses == wanted_losses


def test_a_state_that_goes_astray(programs):
  steps = batches([1.0, 5.0, 1.0])
  state, _ = programs(first_state(), steps[0])
  state, _ = programs(state, steps[1])
  with pytest.raises(CapacityError, match=r"the next one was given another state than the one it returned; .* moe_te\.on_overflow=stop"):
    programs(dict(state), steps[2])


CASES = {
  "mixtral-expert4": ["model_name=mixtral-8x7b", "base_num_decoder_layers=2", "ici_expert_parallelism=4", "ici_fsdp_parallelism=2"],
  "deepseek3-accumulated": [*DEEPSEEK3, *EXPERT2, *ACCUMULATED, "base_num_decoder_layers=2", "scan_layers=false"],
}
EVALUATED = ["eval_interval=2", "eval_steps=1"]
SAVED = ["enable_checkpointing=true", "async_checkpointing=false", "checkpoint_period=3"]


@pytest.mark.parametrize(("case", "more"), [("mixtral-expert4", EVALUATED), ("deepseek3-accumulated", [])])
def test_exact_equals_unlimited(tmp_path, caplog, case, more):
  """With checkpoints in between, and with evaluation; and no program is compiled but the two."""
  words = [*CASES[case], *more, "steps=6", "load_balance_loss_weight=0.01"]
  whole, gradients = helpers.train_keeping_gradients(tmp_path, words, options=MoeTeOptions())
  options = MoeTeOptions(capacity_factor=1.0, on_overflow="exact")
  caplog.clear()
  with jax.log_compiles():
    exact, of_exact = helpers.train_keeping_gradients(tmp_path, [*words, *SAVED], options=options)
  said = [record.getMessage() for record in caplog.records]
  compiled = {name: sum(f"Finished XLA compilation of jit({name})" in line for line in said) for name in ("train_step", "eval_step")}
  assert compiled == {"train_step": 2, "eval_step": int(bool(more))}
  rows = lambda metrics, key: [step for step in metrics if key in step]
  pair = ((rows(exact, "learning/loss"), of_exact), (rows(whole, "learning/loss"), gradients))
  helpers.assert_same_training(*pair, moved=0.001 if more else 0.01)  # of evaluated runs, the last two steps are left
  replayed = [step["moe_te/replayed"] for step in rows(exact, "learning/loss")]
  assert len(replayed) == (2 if more else 6), "each evaluation truncates MaxText's file of metrics"
  assert sum(replayed) >= 2
  evaluated = [[step["eval/avg_loss"] for step in rows(metrics, "eval/avg_loss")] for metrics in (exact, whole)]
  assert bool(more) == bool(evaluated[0])
  np.testing.assert_allclose(*evaluated, rtol=tolerances.TRAINING_LOSS)


def test_skip_leaves_updates_out_and_goes_on(tmp_path, caplog):
  words = [*CASES["mixtral-expert4"], "steps=4"]
  caplog.set_level(logging.WARNING, "maxtext_moe_te")
  whole = helpers.train(tmp_path, words, options=MoeTeOptions())
  skipped = helpers.train(tmp_path, words, options=MoeTeOptions(capacity_factor=1.0, on_overflow="skip"))
  assert len(skipped) == 4 and all(step["moe_te/overflow"] > 0 for step in skipped)
  assert "the step's update is not applied; 1 so far" in caplog.text
  losses = {step["learning/loss"] for step in skipped}
  assert len(losses) == 1, "the same batch and the same state give the same loss"
  assert losses != {whole[0]["learning/loss"]}, "rows were dropped in the steps that do not count"


@pytest.mark.parametrize(
  ("words", "on_overflow", "text"),
  [
    (["eval_interval=2"], "skip", "moe_te.capacity_factor=2 moe_te.on_overflow=skip with eval_interval=2, whose steps are not checked"),
    (["compiled_trainstep_file=x"], "exact", "with compiled_trainstep_file=x, which holds one program of two; .* moe_te.capacity_factor=0"),
    (
      ["optimizer_memory_host_offload=true"],
      "exact",
      "with optimizer_memory_host_offload=true, whose state is not shown to stay",
    ),
  ],
)
def test_refused(tmp_path, words, on_overflow, text):
  with pytest.raises(RefusedError, match=text):
    helpers.train(tmp_path, [*CASES["mixtral-expert4"], *words], options=MoeTeOptions(capacity_factor=2.0, on_overflow=on_overflow))
