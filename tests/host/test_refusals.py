"""What the plugin refuses, word for word, and that errors of a run surface as they are."""

import contextlib
import importlib.util
import re
import sys
import types

import pytest

from maxtext_moe_te.errors import RefusedError, SeamError
from maxtext_moe_te.settings.config import MoeTeOptions
from tests import helpers

pytestmark = pytest.mark.host

OFF = ", or run this model without the plugin's layer (moe_te.enabled=false)."
BLOCKS = (
  "one of deepseek, deepseek4, envy, gemma4, gpt_oss, llama4, mixtral, qwen3_5, qwen3_custom_moe, qwen3_moe, qwen3_next, whose "
  "layers are held to MaxText's by a test"
)
# What the configuration says: what the error says.
CONFIGURATIONS = [
  (
    dict(decoder_block="simple_moe"),
    f"decoder_block=simple_moe (model_name=mixtral-8x7b); needed: {BLOCKS}. Fix: set moe_te.enabled=false to run this model on "
    "MaxText's own layer.",
  ),
  (
    dict(use_batch_split_schedule=True),
    "use_batch_split_schedule=true, a schedule that never calls the MoE layer the plugin replaces; needed: "
    "use_batch_split_schedule=false. Fix: set use_batch_split_schedule=false" + OFF,
  ),
  (
    dict(use_lineage=True),
    "use_lineage=true, a schedule that never calls the MoE layer the plugin replaces; needed: use_lineage=false. Fix: set "
    "use_lineage=false" + OFF,
  ),
  (
    dict(quantization="fp8"),
    "quantization=fp8, which MaxText applies to expert products too; needed: quantization='' or one of Transformer Engine's recipes "
    "(te_…). Fix: set quantization=''" + OFF,
  ),
  (
    dict(weight_dtype="float8_e4m3fn"),
    "weight_dtype=float8_e4m3fn, weights with scales; needed: weight_dtype=float32 or bfloat16. Fix: set weight_dtype=bfloat16 and "
    "convert the checkpoint" + OFF,
  ),
  (dict(shard_mode="explicit"), "shard_mode=explicit; needed: shard_mode=auto. Fix: set shard_mode=auto" + OFF),
  (
    dict(decoder_block="llama4", num_experts_per_tok=2),
    "decoder_block=llama4 with num_experts_per_tok=2, norm_topk_prob=False; needed: one expert per token and no normalization: the "
    "weight multiplies the token itself. Fix: set num_experts_per_tok=1 norm_topk_prob=false.",
  ),
  (
    dict(using_pipeline_parallelism=True),
    "pipeline parallelism (a stage axis larger than 1); needed: a mesh whose stage axis has size 1. Fix: set "
    "ici_pipeline_parallelism=1 dcn_pipeline_parallelism=1" + OFF,
  ),
  (
    dict(moe_dropless_fallback="per_step"),
    "moe_dropless_fallback=per_step, which replays what dropped tokens; needed: no fallback: under the plugin nothing drops any. "
    "Fix: remove moe_dropless_fallback (and retry_dropless_first_steps).",
  ),
]


@pytest.fixture
def config():
  return helpers.maxtext_config("mixtral-8x7b")


@pytest.mark.parametrize(("values", "text"), CONFIGURATIONS, ids=lambda value: next(iter(value)) if isinstance(value, dict) else "")
def test_configurations(config, monkeypatch, values, text):
  from maxtext_moe_te.host import seams

  seams.check_config(config)
  for key, value in values.items():
    monkeypatch.setitem(config._flat_config, key, value)
  with pytest.raises(RefusedError) as caught:
    seams.check_config(config)
  assert str(caught.value) == text


def test_a_dense_model_is_never_refused(config, monkeypatch):
  from maxtext_moe_te.host import seams

  for key, value in dict(num_experts=1, quantization="fp8", decoder_block="llama2").items():
    monkeypatch.setitem(config._flat_config, key, value)
  seams.check_config(config)


def test_a_router_that_is_not_exact(config, monkeypatch):
  from maxtext_moe_te.host import seams

  options = MoeTeOptions(router="te")
  seams.check_config(config, options)
  monkeypatch.setitem(config._flat_config, "dtype", "bfloat16")
  with pytest.raises(RefusedError, match=r"moe_te\.router=te for the rule .*: logits in bfloat16 .* often tie"):
    seams.check_config(config, options)
  seams.check_config(config, MoeTeOptions())


@pytest.mark.parametrize(
  ("values", "options", "text"),
  [
    (dict(dtype="float32"), {}, "dtype=float32 with NCCL EP"),
    (dict(mlp_bias=True), {}, "expert biases with NCCL EP"),
    (dict(use_random_routing=True), {}, "a router that may name an expert twice, with NCCL EP"),
    (dict(num_experts=6), {}, "num_experts=6 with NCCL EP; needed: a multiple of 4"),
    ({}, dict(padding="skip"), "moe_te.padding=skip with NCCL EP, which is not shown to serve tokens that select no expert"),
    ({}, {}, None),
  ],
)
def test_what_nccl_ep_cannot_serve(config, monkeypatch, values, options, text):
  from maxtext_moe_te.host import expert_group

  for key, value in {"dtype": "bfloat16", **values}.items():
    monkeypatch.setitem(config._flat_config, key, value)
  with contextlib.nullcontext() if text is None else pytest.raises(RefusedError, match=text):
    options = MoeTeOptions(capacity_factor=0, chunks=1, **options)
    expert_group.check_ep_group(options, config, expert_group.ep_group(options, config, {"expert": 2}))


def layer_error(batch=8, options=None, **settings):
  """What the layer says when it is called."""
  config = helpers.maxtext_config("mixtral-8x7b", **settings)
  mesh = helpers.mesh_of(config, 8)
  module = helpers.routed_moe(config, mesh)
  with pytest.raises(RefusedError) as caught:
    helpers.run_layer(config, mesh, helpers.our_call(**(options or {})), module, *helpers.layer_inputs(config, batch=batch))
  return str(caught.value)


def test_experts_that_do_not_divide():
  from maxtext_moe_te.host import seams

  config = helpers.maxtext_config("mixtral-8x7b", num_experts=6, ici_expert_parallelism=4, ici_fsdp_parallelism=2)
  with pytest.raises(RefusedError) as caught:
    seams.check_config(config)
  assert str(caught.value) == (
    "num_experts=6 on an expert axis of 4; needed: as many experts on every rank. Fix: set ici_expert_parallelism=2 (or another "
    "divisor of 6)."
  )


def test_a_batch_that_does_not_divide():
  text = layer_error(batch=6, ici_expert_parallelism=4, ici_fsdp_parallelism=2)
  assert text == (
    "a batch of 6 over mesh axes fsdp=2, expert=4; needed: a multiple of 8. Fix: change per_device_batch_size or the parallelism of "
    "those axes."
  )


def test_a_sequence_that_does_not_divide():
  text = layer_error(ici_context_parallelism=8, ici_fsdp_parallelism=1, max_target_length=12)
  assert text == (
    "a sequence of 12 over mesh axes context=8; needed: a multiple of 8. Fix: change max_target_length or the parallelism of those axes."
  )


def test_the_local_transport_with_an_expert_axis():
  text = layer_error(options=dict(transport="local"), ici_expert_parallelism=2, ici_fsdp_parallelism=4)
  assert text == (
    "moe_te.transport=local on an expert axis of 2; needed: a transport that moves rows between ranks. Fix: set moe_te.transport=auto."
  )


@pytest.mark.parametrize("transport", ["xla", "nccl_ep"])
def test_an_expert_parallel_transport_without_an_expert_axis(transport):
  text = layer_error(options=dict(transport=transport), ici_fsdp_parallelism=8)
  assert text == (
    f"moe_te.transport={transport} without an expert axis; needed: an expert axis larger than 1 (ici_expert_parallelism). Fix: set "
    "moe_te.transport=auto."
  )


@pytest.mark.parametrize("name", ["__call__", "load_balance_loss"])
def test_a_layer_that_somebody_replaced(monkeypatch, name):
  """Its file is the one that is known: what runs is not."""
  from maxtext.layers import moe

  import maxtext_moe_te

  changed = lambda self, inputs, gate_inputs=None, out_sharding=None: None
  monkeypatch.setattr(moe.RoutedMoE, name, changed)
  before = moe.RoutedMoE.__call__
  with pytest.raises(SeamError) as caught:
    maxtext_moe_te.activate(options=MoeTeOptions())
  assert re.fullmatch(
    rf"maxtext\.layers\.moe:RoutedMoE\.{name} is <code object <lambda> .*test_refusals\.py.*>, not the function of that name in MaxText's "
    r"file; needed: MaxText's own, by which the plugin is judged\. Fix: activate the plugin before anything else replaces that function\.",
    str(caught.value),
  )
  assert moe.RoutedMoE.__call__ is before, "nothing was changed"


@pytest.fixture
def transformer_engine(monkeypatch):
  """Transformer Engine's sharding module, or a stand-in for it where it is not installed."""
  if importlib.util.find_spec("transformer_engine") is None:
    sharding = types.ModuleType("transformer_engine.jax.sharding")
    sharding.MeshResource = lambda **axes: axes
    sharding.global_shard_guard = contextlib.nullcontext
    for name in ("transformer_engine", "transformer_engine.jax"):
      monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, sharding.__name__, sharding)


def test_errors_of_a_gpu_run_surface(transformer_engine, config, monkeypatch):
  """Plain MaxText replaces every error inside its Transformer Engine context; under the plugin it is the error itself."""
  from maxtext.utils import max_utils

  import maxtext_moe_te

  monkeypatch.setitem(config._flat_config, "hardware", "gpu")

  def run():
    with max_utils.maybe_get_transformer_engine_context(config):
      raise RefusedError(found="a", needed="b", fix="c")

  with pytest.raises(RuntimeError, match=r"generator didn't stop after throw"):
    run()
  with maxtext_moe_te.activate(options=MoeTeOptions()):
    with pytest.raises(RefusedError, match=r"a; needed: b\. Fix: c\."):
      run()
    with max_utils.maybe_get_transformer_engine_context(config):
      pass
