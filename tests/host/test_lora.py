"""LoRA adapters of Qwix under the plugin: the same ones as without it, with the same gradients."""

import contextlib
import re

import jax
import pytest

from maxtext_moe_te.errors import RefusedError
from maxtext_moe_te.settings.config import MoeTeOptions
from tests import helpers, tolerances

pytestmark = pytest.mark.host

# The gate's product is made by our layer; Qwix finds the module of a product by walking up the frames.
PATH = "decoder/layers/.*(self_attention/(query|value)|MoeBlock_0/gate)"
WORDS = [
  "model_name=mixtral-8x7b",
  "ici_fsdp_parallelism=1",
  "ici_data_parallelism=8",
  "lora.enable_lora=true",
  "lora.lora_rank=4",
  "base_num_decoder_layers=1",
]


def adapted(output, words, options):
  """(loss, gradient of each adapter) of a model with random adapters; None for `options` leaves the plugin inactive."""
  from flax import nnx
  from flax.core.spmd import logical_axis_rules
  from maxtext.configs import pyconfig
  from maxtext.trainers.pre_train import train
  from maxtext.utils import lora_utils, maxtext_utils, model_creation_utils

  import maxtext_moe_te

  with contextlib.nullcontext() if options is None else maxtext_moe_te.activate(options=options):
    config = pyconfig.initialize(["test", *helpers.tiny_run(output, words)])
    model, mesh = model_creation_utils.from_pretrained(config)
    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
      model = lora_utils.apply_lora_to_model(model, mesh, config)
      nnx.pop(model, nnx.Intermediate)
      graph, adapters, rest = nnx.split(model, nnx.LoRAParam, ...)
      adapters = jax.tree.map(lambda a: 0.1 * jax.random.normal(jax.random.key(a.size), a.shape, a.dtype), adapters)
      shapes = maxtext_utils.get_shaped_batch(config)
      batch = {name: jax.numpy.ones(shape.shape, shape.dtype) for name, shape in shapes.items()}
      tokens = jax.random.randint(jax.random.key(0), batch["inputs"].shape, 0, config.vocab_size)
      batch |= {"inputs": tokens, "targets": jax.numpy.roll(tokens, -1, 1)}

      def loss(adapters):
        return train.loss_fn(nnx.merge(graph, adapters, rest), config, batch, None, None)[0]

      value, gradients = jax.jit(jax.value_and_grad(loss))(adapters)
  leaves = jax.tree_util.tree_leaves_with_path(gradients)
  return float(value), {jax.tree_util.keystr(path): jax.device_get(leaf) for path, leaf in leaves}


def test_the_router_is_adapted(tmp_path):
  words = [*WORDS, f"lora.lora_module_path={PATH}"]
  plain_loss, plain = adapted(tmp_path, words, None)
  loss, ours = adapted(tmp_path, words, MoeTeOptions())
  assert {name for name in ("gate", "query", "value") if any(f"'{name}'" in path for path in ours)} == {"gate", "query", "value"}
  helpers.assert_close(ours, plain, forward=tolerances.FLOAT32_FORWARD, gradient=tolerances.FLOAT32_GRADIENT)
  assert loss == pytest.approx(plain_loss, rel=tolerances.FLOAT32_FORWARD)


EXPERTS = "expert weights get no adapters; needed: modules with a product of their own"


def test_a_path_that_names_expert_weights_is_refused(tmp_path, caplog):
  from flax import nnx
  from maxtext.configs import pyconfig
  from maxtext.utils import model_creation_utils

  from maxtext_moe_te.host import lora

  model, _ = model_creation_utils.from_pretrained(pyconfig.initialize(["test", *helpers.tiny_run(tmp_path, WORDS)]))
  for path, named in {
    "decoder/layers/.*(self_attention/query|MoeBlock_0/(wi_0|wo))": "decoder/layers/MoeBlock_0/wi_0",
    ".*/MoeBlock_0": "decoder/layers/MoeBlock_0",
  }.items():
    with pytest.raises(RefusedError, match=re.escape(f"lora.lora_module_path={path}, which names {named}: {EXPERTS}")):
      lora.check(model, path)
  caplog.set_level("INFO", "maxtext_moe_te")
  lora.check(model, PATH)
  assert not caplog.messages
  model.decoder.shared = nnx.Module()
  model.decoder.shared.wi_0 = nnx.Module()
  lora.check(model, "decoder/.*wi_0")  # the shared experts'
  assert len(caplog.messages) == 1
  caplog.clear()
  lora.check(model, "decoder/.*")  # everything: no one means the experts by that
  assert caplog.messages == ["LoRA makes no adapters for expert weights, which lora.lora_module_path=decoder/.* covers"]


def test_it_is_asked_where_adapters_are_made(tmp_path):
  with pytest.raises(RefusedError, match=EXPERTS):
    adapted(tmp_path, [*WORDS, "lora.lora_module_path=.*wi_0"], MoeTeOptions())
