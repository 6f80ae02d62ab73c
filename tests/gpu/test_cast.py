"""`moe_te.cast_weights` on GPUs: with Transformer Engine's products, one cast per step changes no bit of the gradients."""

import jax
import numpy as np
import pytest

from tests.host.test_cast import SUMLESS, built, gradients_of

pytestmark = [pytest.mark.gpu, pytest.mark.te, pytest.mark.host]

WIDTHS = [
    "hardware=gpu", "base_emb_dim=256", "base_moe_mlp_dim=256", "base_mlp_dim=256", "max_target_length=128", "per_device_batch_size=2",
]  # fmt: skip
# Two programs: neither may choose its kernels by time, or leave out roundings that the other has.
REPEATABLE = {"xla_gpu_autotune_level": 0, "xla_gpu_deterministic_ops": True}


@pytest.mark.parametrize("case", ["qwen3-prefused-leading-layers", "mixtral-accumulated"])
def test_the_same_bits(tmp_path, case):
  words = [*SUMLESS[case], *WIDTHS, "ici_fsdp_parallelism=1", f"ici_expert_parallelism={jax.device_count()}"]
  wanted, found = (
      gradients_of(built(tmp_path, words, choice, keep_gradients=True), REPEATABLE) for choice in ("layer", "step")
  )
  assert any("'wo'" in name for name in wanted)
  assert [name for name in wanted if not np.array_equal(found[name], wanted[name])] == []
