"""`moe_te.padding=skip` in MaxText's own train step: what stands in padding reaches nothing, and a step is one without any."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_moe_te.errors import RefusedError
from maxtext_moe_te.settings.config import MoeTeOptions
from tests import helpers, tolerances
from tests.host import test_every_block
from tests.host.test_training import DATA8, DEEPSEEK3, EXPERT2, MIXTRAL, UNSCANNED

pytestmark = pytest.mark.host

SEQUENCE, SHORT = 32, 20
TWO_LAYERS = ["base_num_decoder_layers=2", "load_balance_loss_weight=0.05"]
SCANNED = [*MIXTRAL, *EXPERT2]
UNROLLED = [*MIXTRAL, *DATA8, *UNSCANNED]
FULL, MINIMAL = ["remat_policy=full"], ["remat_policy=minimal"]  # none is full to MaxText 0.2.5
# The model, and how it is remade in the backward pass.
CASES = {
  "scanned-full": (SCANNED, FULL),
  "scanned-minimal": (SCANNED, MINIMAL),
  "unscanned-full": (UNROLLED, FULL),
  "unscanned-minimal": (UNROLLED, MINIMAL),
  "deepseek3-accumulated": ([*DEEPSEEK3, *EXPERT2, "gradient_accumulation_steps=2"], FULL),
}
UNEVEN = [20, 32, 5, 0, 17, 31, 1, 8]  # real tokens of each sequence
LOAD = "moe_te/rows_per_expert_mean/layer_000"


@pytest.fixture(scope="module")
def step_of(tmp_path_factory):
  """One step of a case, from one state for all steps of its model, on a batch with so many real tokens in each sequence.

  Returns its gradients, scalar metrics and router biases after it. `garbage` chooses what stands in padding. Programs are shared.
  """
  from maxtext_moe_te.host import step

  output = tmp_path_factory.mktemp("steps")
  states = {}

  @functools.cache
  def compiled(words, padding, length):
    words = helpers.tiny_run(output, [*TWO_LAYERS, *words, f"max_target_length={length}"])
    built = step.build(words, options=MoeTeOptions(padding=padding), keep_gradients=True)
    return built, built.compile({})

  def run(case, padding, real, *, length=SEQUENCE, garbage=0):
    model, remat = CASES[case]
    # Remat changes no result, so that a model's steps without padding are of one program.
    built, program = compiled((*model, *(remat if padding == "skip" else FULL)), padding, length)
    key = tuple(model)
    if key not in states:
      states[key] = built.initialize()
    state = jax.tree.map(lambda leaf: jax.device_put(leaf, leaf.sharding, may_alias=False), states[key])  # a step takes its buffers
    with built.context():
      state, metrics = program(state, batch_of(built, real, garbage))
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}
    biases = {name: np.asarray(leaf) for name, leaf in leaves.items() if name.startswith("['model']") and "['gate']['bias']" in name}
    return step.gradients(state), {name: float(value) for name, value in metrics["scalar"].items()}, biases

  return run


def batch_of(built, real, garbage):
  """The same real tokens whatever the length: two segments in each sequence, and then padding with tokens of its own."""
  sequences, length = built.batch["inputs"].shape
  place = np.arange(length)
  real = np.resize(real, sequences)[:, None]
  tokens = np.random.default_rng(0).integers(0, built.config.vocab_size, (sequences, SEQUENCE + 1))
  other = np.random.default_rng(1 + garbage).integers(0, built.config.vocab_size, tokens.shape)
  tokens = np.where(np.arange(SEQUENCE + 1) < real, tokens, other)
  second = real // 2
  segments = np.where(place >= real, 0, np.where(place >= second, 2, 1))
  values = {
    "inputs": tokens[:, :length],
    "targets": np.roll(tokens, -1, axis=1)[:, :length],
    "position": np.where(place >= second, place - second, place),
    # What follows the last real token is no target.
    "targets_segmentation": np.where(place >= real - 1, 0, segments),
    "segmentation": segments,
  }
  found = {}
  for name, shape in built.batch.items():
    value = values[name] if name in values else values[name.partition("_")[2]]
    found[name] = jax.device_put(np.broadcast_to(value, shape.shape).astype(shape.dtype), shape.sharding)
  return found


@pytest.mark.parametrize("case", CASES)
def test_what_stands_in_padding_reaches_nothing(case, step_of):
  one, other = (step_of(case, "skip", UNEVEN, garbage=garbage) for garbage in (0, 1))
  helpers.assert_same_gradients(other[0], one[0])
  assert all(np.isfinite(gradient).all() for gradient in one[0].values())
  assert one[1]["learning/loss"] == other[1]["learning/loss"]
  assert one[1][LOAD] == other[1][LOAD] == sum(UNEVEN) * 2 / 8  # K is 2, E is 8
  np.testing.assert_equal(other[2], one[2])


@pytest.mark.parametrize("case", CASES)
def test_equals_a_batch_without_padding(case, step_of):
  """Of shorter sequences, routed as in MaxText."""
  skipped, short = step_of(case, "skip", [SHORT]), step_of(case, "route", [SHORT], length=SHORT)
  helpers.assert_same_gradients(skipped[0], short[0])
  for name in ("learning/loss", "learning/moe_lb_loss", "moe_te/rows_per_expert_max/layer_000", LOAD):
    assert helpers.within(name, abs(skipped[1][name] - short[1][name]), tolerances.TRAINING_LOSS * abs(short[1][name])), name
  np.testing.assert_equal(skipped[2], short[2])
  assert bool(skipped[2]) == ("deepseek3" in case) and all(bias.any() for bias in skipped[2].values()), "the router bias is updated"


@pytest.mark.parametrize("case", ["scanned-full", "unscanned-full", "deepseek3-accumulated"])
def test_padding_that_is_routed_shows(case, step_of, on_purpose):
  real = np.minimum(UNEVEN, SHORT)
  one, other = (step_of(case, "route", real, length=SHORT, garbage=garbage) for garbage in (0, 1))
  assert one[1][LOAD] == 8 * SHORT * 2 / 8
  with pytest.raises(AssertionError, match="relative errors of gradients over"):
    helpers.assert_same_gradients(other[0], one[0])


def test_no_block_is_missing():
  from maxtext_moe_te.host import padding, rules_from_config, source

  assert set(padding.LAYERS) == set(rules_from_config.DECODER_BLOCKS)
  assert len(padding.seams()) == len([layer for layer in padding.LAYERS.values() if source.function(f"{layer}.__call__")])


@pytest.mark.parametrize("block", test_every_block.BLOCKS)
def test_the_layers_of_every_block_are_reached(tmp_path, block, monkeypatch):
  """Traced, with the layer of multi-token prediction: one that is not reached is refused there."""
  from maxtext_moe_te.host import layer, step

  found, real_tokens = [], layer.padding.real_tokens
  monkeypatch.setattr(layer.padding, "real_tokens", lambda shape: found.append(real_tokens(shape)) or found[-1])
  words = test_every_block.MTP if block == "deepseek" else test_every_block.BLOCKS[block]
  built = step.build(helpers.tiny_run(tmp_path, [*words, *DATA8]), options=MoeTeOptions(padding="skip"))
  assert built.named_bytes, "the loss was traced"
  assert found and all(real is not None and real.dtype == bool for real in found)


def call_layer(shape=(8, 32), ids="given", **settings):
  """The plugin's layer with `padding=skip`, called as by a decoder layer that is given segment ids of a shape; y."""
  from maxtext_moe_te.host import padding

  config = helpers.maxtext_config("mixtral-8x7b", **settings)
  mesh = helpers.mesh_of(config, 8)
  module = helpers.routed_moe(config, mesh)
  x, cotangent = helpers.layer_inputs(config)
  call = helpers.our_call(padding="skip")
  if ids == "none called it":
    return helpers.run_layer(config, mesh, call, module, x, cotangent)["y"]
  segments = jnp.zeros(shape, jnp.int32) if ids == "given" else None
  through = padding.noting(lambda self, inputs, decoder_segment_ids: call(self, inputs))
  return helpers.run_layer(config, mesh, lambda self, inputs: through(self, inputs, segments), module, x, cotangent)["y"]


def test_a_layer_that_no_decoder_layer_called():
  with pytest.raises(RefusedError) as caught:
    call_layer(ids="none called it", ici_fsdp_parallelism=8)
  assert str(caught.value) == (
    "moe_te.padding=skip, and an MoE layer called by no decoder layer that the plugin knows; needed: a decoder layer that is given segment "
    "ids. Fix: set moe_te.padding=route."
  )


def test_segment_ids_of_other_tokens():
  with pytest.raises(RefusedError, match=r"segment ids of shape \[8, 40\] for tokens of shape \[8, 32\]; needed: one for each token"):
    call_layer(shape=(8, 40), ici_fsdp_parallelism=8)


def test_without_segment_ids_every_token_is_real():
  assert np.any(call_layer(ids="no ids", ici_fsdp_parallelism=8))
  assert not np.any(call_layer(ici_fsdp_parallelism=8))  # of segment 0, all of them


def test_a_model_whose_layers_are_not_reached(monkeypatch):
  from maxtext_moe_te.host import checks, padding

  config = helpers.maxtext_config("mixtral-8x7b")
  skip = MoeTeOptions(padding="skip")
  checks.check_config(config, skip)
  monkeypatch.setitem(padding.LAYERS, "mixtral", "maxtext.models.mixtral:NotThere")
  with pytest.raises(RefusedError, match=r"moe_te\.padding=skip with decoder_block=mixtral, whose layers bring no segment ids"):
    checks.check_config(config, skip)
  checks.check_config(config, MoeTeOptions())
  assert "maxtext.models.mixtral:NotThere.__call__" not in [seam.target for seam in padding.seams()]


def test_only_skip_wraps_decoder_layers():
  from maxtext_moe_te.host import padding, seams

  targets = {option: {seam.target for seam in seams.seams(None, MoeTeOptions(padding=option))} for option in ("route", "skip")}
  assert targets["skip"] - targets["route"] == {seam.target for seam in padding.seams()}
  assert targets["route"] < targets["skip"]


def test_nccl_ep_is_left_alone(monkeypatch):
  from maxtext_moe_te.host import checks, parts, rules_from_config
  from maxtext_moe_te.moe.block import Layout
  from maxtext_moe_te.moe.transport import nccl_ep

  config = helpers.maxtext_config("mixtral-8x7b", ici_expert_parallelism=2, ici_fsdp_parallelism=4)
  with pytest.raises(RefusedError, match=r"nccl_ep with moe_te\.padding=skip: .* Fix: set moe_te\.transport=auto\."):
    checks.check_config(config, MoeTeOptions(transport="nccl_ep", padding="skip"))
  group = nccl_ep.Bootstrap(num_experts=8, experts_per_token=2, ranks=2, max_tokens_per_rank=64, width=64)
  monkeypatch.setattr(nccl_ep, "_bootstrapped", group)
  layout = Layout(mesh=helpers.mesh_of(config, 8), batch=("fsdp", "expert"), expert=("expert",))
  spec = rules_from_config.layer_spec(config)
  for option, transport in (("route", "nccl_ep"), ("skip", "xla")):
    options = MoeTeOptions(capacity_factor=0, chunks=1, padding=option)
    assert parts.choose(options, layout, spec, (8, 32, 64), 64, jnp.float32).transport.name == transport
