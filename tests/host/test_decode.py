"""Decoding under the plugin: MaxText's engine prefills with a batch of 1, which no expert axis splits."""

import contextlib
import dataclasses
import functools

import jax
import numpy as np
import pytest

from maxtext_moe_te.settings.config import MoeTeOptions
from tests import helpers, tolerances

pytestmark = pytest.mark.host

WORDS = [
  "model_name=mixtral-8x7b", "base_num_decoder_layers=1", "max_prefill_predict_length=16", "max_target_length=20",
  "decode_sampling_strategy=greedy", "return_log_prob=true",
]  # fmt: skip


@functools.partial(
  jax.tree_util.register_dataclass, data_fields=["data", "log_prob"], meta_fields=["tokens_idx", "valid_idx", "length_idx"]
)
@dataclasses.dataclass
class Tokens:
  """What JetStream, which is not installed here, would call ResultTokens."""

  data: jax.Array
  tokens_idx: tuple[int, int]
  valid_idx: tuple[int, int]
  length_idx: tuple[int, int]
  log_prob: jax.Array | None = None
  samples_per_slot: dataclasses.InitVar[int] = 1


def decoded(output, words, options):
  """(logits after the prompt, tokens that follow it)."""
  from maxtext.configs import pyconfig
  from maxtext.inference.maxengine import maxengine

  import maxtext_moe_te

  with contextlib.nullcontext() if options is None else maxtext_moe_te.activate(options=options):
    config = pyconfig.initialize(["test", *helpers.tiny_run(output, [*WORDS, *words])])
    engine = maxengine.MaxEngine(config)
    params = engine.load_params(rng=jax.random.key(0))
    prompt = np.arange(16) % 7 + 1
    prefix, _ = engine.prefill(params=params, padded_tokens=prompt, true_length=16, rng=jax.random.key(1), slot=0)
    logits = np.asarray(prefix["logits"])
    state = engine.insert(prefix, engine.init_decode_state(jax.random.key(2)), slot=0)
    tokens = []
    for _ in range(2):
      state, result = engine.generate(params, state, rng=jax.random.key(3))
      tokens.append(int(np.asarray(result.data)[0, 0]))
  return logits, tokens


def test_prefill_and_decode_on_an_expert_axis(tmp_path, monkeypatch):
  from maxtext.inference.maxengine import maxengine

  if getattr(maxengine.engine_api, "_IS_STUB", False):
    monkeypatch.setattr(maxengine.engine_api, "ResultTokens", Tokens)
  plain_logits, plain = decoded(tmp_path, ["ici_fsdp_parallelism=1", "ici_data_parallelism=8"], None)
  mesh = ["ici_fsdp_parallelism=1", "ici_data_parallelism=4", "ici_expert_parallelism=2"]
  logits, tokens = decoded(tmp_path, mesh, MoeTeOptions())
  assert helpers.relative_error(logits, plain_logits) < tolerances.FLOAT32_FORWARD
  assert tokens == plain
