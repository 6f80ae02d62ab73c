"""`moe_te.cast_weights` on GPUs: with Transformer Engine's products, one cast per step changes no bit of the gradients."""

import jax
import numpy as np
import pytest

from maxtext_moe_te.tools import gradients
from tests.host.test_cast import SUMLESS, built, gradients_of

pytestmark = [pytest.mark.gpu, pytest.mark.te, pytest.mark.host]

WIDTHS = [
    "hardware=gpu", "base_emb_dim=256", "base_moe_mlp_dim=256", "base_mlp_dim=256", "max_target_length=128", "per_device_batch_size=2",
    "use_iota_embed=true",  # a lookup's gradient adds up in no fixed order
]  # fmt: skip


@pytest.mark.parametrize("case", ["qwen3-prefused-leading-layers", "mixtral-accumulated"])
def test_the_same_bits(tmp_path, case):
  words = [*SUMLESS[case], *WIDTHS, "ici_fsdp_parallelism=1", f"ici_expert_parallelism={jax.device_count()}"]
  steps = (built(tmp_path, words, choice, keep_gradients=True) for choice in ("layer", "step"))
  wanted, found = (gradients_of(step, gradients.DETERMINISTIC) for step in steps)
  assert any("'wo'" in name for name in wanted)
  assert [name for name in wanted if not np.array_equal(found[name], wanted[name])] == []
