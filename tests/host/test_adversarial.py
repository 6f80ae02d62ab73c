"""Routing that asks for the most of a finite capacity, for 30 steps: `moe_te.on_overflow=exact` trains as if nothing were limited."""

import contextlib
import functools
import gc
import itertools
import os
import pathlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_moe_te.settings.config import MoeTeOptions
from maxtext_moe_te.tools import demo
from tests import helpers, tolerances

pytestmark = pytest.mark.host

STEPS, EXPERTS = 30, 8
MIXTRAL = ["model_name=mixtral-8x7b", "base_num_decoder_layers=2", "load_balance_loss_weight=0.01", "max_target_length=16"]
MESHES = {
  "expert2": ["ici_expert_parallelism=2", "ici_data_parallelism=4", "ici_fsdp_parallelism=1"],
  "expert4": ["ici_expert_parallelism=4", "ici_data_parallelism=2", "ici_fsdp_parallelism=1"],
  "expert8": ["ici_expert_parallelism=8", "ici_fsdp_parallelism=1"],
  "expert4-fsdp2": ["ici_expert_parallelism=4", "ici_fsdp_parallelism=2"],
}
ACCUMULATED = ["gradient_accumulation_steps=4", "per_device_batch_size=4"]
# Every mesh, both ways of having layers, both accumulations, all factors, and each sequence twice; `--every-sequence` has all in all.
RUNS = [
  ("expert2", [], 1.25, ("one expert", "one rank")),
  ("expert4", ["scan_layers=false", *ACCUMULATED], 1.0, ("alternating ranks", "a spike every 7th step")),
  ("expert8", ACCUMULATED, 2.0, ("one expert", "alternating ranks")),
  ("expert4-fsdp2", ["scan_layers=false"], 1.0, ("one rank", "a spike every 7th step")),
]
# Which logits each step pulls up, by the number of the pattern that its batch carries.
FREE, CALM, ONE_EXPERT, FIRST_RANK, LAST_RANK = range(5)
SEQUENCES = {
  "one expert": [ONE_EXPERT] * STEPS,
  "one rank": [FIRST_RANK] * STEPS,
  "alternating ranks": [FIRST_RANK, LAST_RANK] * (STEPS // 2),
  "a spike every 7th step": [FIRST_RANK if step % 7 == 6 else CALM for step in range(STEPS)],
}


def pulls(ranks):
  """[pattern, token, E] to add to logits. But for FREE, no two experts of a token are near each other: rounding flips no choice."""
  table = np.zeros((5, 16, EXPERTS), np.float32)
  table[CALM:] += 2 * np.random.default_rng(0).permuted(np.tile(np.arange(EXPERTS), (16, 1)), axis=1)
  strong = 2 * EXPERTS  # above all others
  table[ONE_EXPERT, :, 3] += strong
  table[FIRST_RANK, :, : EXPERTS // ranks] += strong
  table[LAST_RANK, :, -(EXPERTS // ranks) :] += strong
  return jnp.asarray(table)


@contextlib.contextmanager
def pulled(ranks):
  """Within, what is traced has its logits pulled as its batch says."""
  from maxtext.trainers.pre_train import train

  from maxtext_moe_te.host import layer

  gate_logits, loss_fn, table, pattern = layer.gate_logits, train.loss_fn, pulls(ranks), []

  @functools.wraps(loss_fn)
  def of_pattern(model, config, data, *args, **kwargs):
    pattern[:] = [data["targets_position"][0, 0]]
    return loss_fn(model, config, data, *args, **kwargs)

  with (
    mock.patch.object(train, "loss_fn", of_pattern),
    mock.patch.object(layer, "gate_logits", lambda gate, inputs: gate_logits(gate, inputs) + table[pattern[0]]),
  ):
    yield


def made(tmp_path, mesh, words, options):
  from maxtext_moe_te.host import step

  words = helpers.tiny_run(tmp_path, [*MIXTRAL, *MESHES[mesh], *words])
  return step.build(words, options=options, keep_gradients=True)


def batch_of(step, number, pattern, text=False):
  """Random tokens, or bytes of English, and a pattern."""
  batch = step.random_batch(number)
  there = batch["targets_position"]
  batch["targets_position"] = jax.device_put(jnp.full_like(there, pattern), there.sharding)
  if text:
    tokens = batch["inputs"]
    more = np.frombuffer("".join(itertools.islice(demo.documents(), 400)).encode(), np.uint8).astype(tokens.dtype)
    of_step = more[number * tokens.size :][: tokens.size].reshape(tokens.shape)
    batch |= {"inputs": jax.device_put(of_step, tokens.sharding), "targets": jax.device_put(np.roll(of_step, -1, 1), tokens.sharding)}
  return batch


def trained(step, sequence):
  """(parameters after the run, its losses, steps that ran again)."""
  from maxtext_moe_te.host import replay

  state, metrics = step.initialize(), []
  for number, pattern in enumerate(sequence):
    state, of_step = step(state, batch_of(step, number, pattern))
    metrics.append(of_step["scalar"])
  replay.settle()
  return parameters(state), [float(m["learning/loss"]) for m in metrics], sum(int(m.get(replay.REPLAYED, 0)) for m in metrics)


def parameters(state):
  leaves = jax.tree_util.tree_leaves_with_path(state["model"])
  return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)}


@pytest.mark.parametrize(("mesh", "words", "factor", "names"), RUNS, ids=[run[0] for run in RUNS])
def test_exact_is_unlimited(tmp_path, caplog, pytestconfig, mesh, words, factor, names):
  unlimited = made(tmp_path, mesh, words, MoeTeOptions(capacity_factor=0))
  exact = made(tmp_path, mesh, words, MoeTeOptions(capacity_factor=factor, on_overflow="exact"))
  with pulled(unlimited.mesh.shape["expert"]), jax.log_compiles():
    first = parameters(unlimited.initialize())
    for name, sequence in SEQUENCES.items():
      if name not in names and not pytestconfig.getoption("every_sequence"):
        continue
      wanted, losses_wanted, _ = trained(unlimited, sequence)
      got, losses, replayed = trained(exact, sequence)
      assert replayed >= (4 if name.startswith("a spike") else STEPS), f"{name}: {replayed} steps ran again"
      np.testing.assert_allclose(losses, losses_wanted, rtol=tolerances.TRAINING_LOSS, err_msg=name)
      updates, moved = ({key: value - first[key] for key, value in of_run.items()} for of_run in (got, wanted))
      helpers.assert_same_gradients(updates, moved, tolerances.UPDATES_OF_30_STEPS)
    fresh_router_on_text(unlimited, exact)
    if mesh == "expert4-fsdp2":
      overflows_at_random_keep_memory_flat(exact)
  compiled = [record.getMessage() for record in caplog.records if "Finished XLA compilation of jit(train_step)" in record.getMessage()]
  assert len(compiled) == 3, f"the unlimited program and two, whatever happened: {compiled}"


def fresh_router_on_text(unlimited, exact):
  """Gradients at the unlimited run's state of each step: rounding may flip the choice of a token, after which states part."""
  from maxtext_moe_te.host import replay, step

  state, replayed = unlimited.initialize(), 0
  copied = jax.jit(lambda state: jax.tree.map(jnp.copy, state), out_shardings=jax.tree.map(lambda leaf: leaf.sharding, state))
  for number in range(STEPS):
    batch = batch_of(unlimited, number, FREE, text=True)
    of_exact, metrics = exact(copied(state), batch)
    replay.settle()
    replayed += int(metrics["scalar"][replay.REPLAYED])
    state, _ = unlimited(state, batch)
    helpers.assert_same_gradients(step.gradients(of_exact), step.gradients(state))
  assert replayed, "a fresh router never overflowed"


def overflows_at_random_keep_memory_flat(exact):
  """200 steps: what JAX holds is the same after each 50, and the process grows by less than one of its arrays per step."""
  from maxtext_moe_te.host import replay

  spikes, held, resident, state = np.random.default_rng(0).random(200) < 0.3, [], [], exact.initialize()
  for number, spike in enumerate(spikes):
    state, metrics = exact(state, batch_of(exact, number, FIRST_RANK if spike else CALM))
    float(metrics["scalar"]["learning/loss"])
    if number % 50 == 49:
      replay.settle()  # or the step's batch is still held, if it may have to run again
      del metrics
      gc.collect()
      held.append(sum(array.nbytes for array in jax.live_arrays()))
      resident.append(int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
  assert len(set(held)) == 1, held
  assert resident[-1] - resident[0] < 150 * max(leaf.nbytes for leaf in jax.tree.leaves(state)), resident
