"""A run changes between plain MaxText and the plugin at checkpoints, both ways, and its loss goes on as if nothing had happened.

Under Adam, whose moments are in the checkpoints too.
"""

import pytest

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
