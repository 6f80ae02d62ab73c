"""A run changes between plain MaxText and the plugin at checkpoints, both ways, and its loss goes on as if nothing had happened.

Under Adam, whose moments are in the checkpoints too.
"""

import logging

import numpy as np
import pytest

from maxtext_moe_te.errors import RefusedError
from maxtext_moe_te.settings.config import MoeTeOptions
from tests import helpers
from tests.host.test_every_block import DATA8, DEEPSEEK3

pytestmark = pytest.mark.host

STEPS = 6
COMMON = [*DATA8, *helpers.ADAM, f"learning_rate_schedule_steps={STEPS}"]
LAYOUTS = {
  "unfused": [*DEEPSEEK3, *COMMON],
  "prefused": ["model_name=qwen3-30b-a3b", "base_num_decoder_layers=2", "prefuse_moe_weights=true", *COMMON],
}
SAVED = ["enable_checkpointing=true", "async_checkpointing=false", "checkpoint_period=1000"]  # and after the last step


@pytest.mark.parametrize("layout", LAYOUTS)
def test_plain_then_plugin_then_plain(tmp_path, layout):
  words, parts = LAYOUTS[layout], []
  whole = helpers.train(tmp_path, [*words, f"steps={STEPS}"])
  for steps, options in ((2, None), (4, MoeTeOptions()), (6, None)):
    parts += helpers.train(tmp_path, [*words, *SAVED, f"steps={steps}"], options=options)
  assert [step["step"] for step in parts] == [step["step"] for step in whole], "each part goes on where the one before stopped"
  helpers.assert_same_losses(parts, whole, moved=0.05)


@pytest.mark.parametrize("scan", ["true", "false"])
def test_a_model_made_from_a_checkpoint_has_its_router_biases(tmp_path, caplog, scan):
  """MaxText's own `from_pretrained` hands over a freed array in their place."""
  import jax
  from flax import nnx
  from maxtext.configs import pyconfig
  from maxtext.utils import model_creation_utils

  import maxtext_moe_te

  words = [*DEEPSEEK3, f"scan_layers={scan}", "routed_bias_update_rate=0.01"]
  helpers.train(tmp_path, [*words, *SAVED, "steps=2"], options=MoeTeOptions())
  path = sorted(tmp_path.rglob("items"))[-1]  # of the last step
  caplog.set_level(logging.INFO, "maxtext_moe_te")
  config = pyconfig.initialize(["test", *helpers.tiny_run(tmp_path, [*words, f"load_parameters_path={path}"])])
  plain, _ = model_creation_utils.from_pretrained(config)
  assert any(leaf.is_deleted() for leaf in jax.tree.leaves(nnx.state(plain))), "MaxText was mended: remove ours"
  with maxtext_moe_te.activate(options=MoeTeOptions()):
    model, _ = model_creation_utils.from_pretrained(config)
  leaves = {jax.tree_util.keystr(name): leaf for name, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(model))}
  (bias,) = [np.asarray(leaf) for name, leaf in leaves.items() if "['gate']['bias']" in name]
  assert not any(leaf.is_deleted() for leaf in leaves.values())
  # Each of the two steps moves each expert's bias by the rate, up or down, or not at all.
  assert np.abs(bias).max() > 0.005 and np.allclose(bias / 0.01, np.round(bias / 0.01), atol=1e-3)
  assert "1 router biases restored" in caplog.text


def test_a_checkpoint_without_router_biases(tmp_path):
  from maxtext.configs import pyconfig
  from maxtext.utils import model_creation_utils

  import maxtext_moe_te

  words = [word for word in DEEPSEEK3 if not word.startswith("routed_bias")]
  helpers.train(tmp_path, [*words, *SAVED, "routed_bias=false", "steps=1"], options=MoeTeOptions())
  path = sorted(tmp_path.rglob("items"))[-1]  # of the last step
  with maxtext_moe_te.activate(options=MoeTeOptions()):
    config = pyconfig.initialize(["test", *helpers.tiny_run(tmp_path, [*words, f"load_parameters_path={path}"])])
    with pytest.raises(RefusedError, match=r"has no value for decoder/.*gate/bias \(1, 8\); .* or set routed_bias=false if"):
      model_creation_utils.from_pretrained(config)
