"""MaxText's post-training entry points on Tunix, tiny and on synthetic data, so that what they computed can be compared."""

import contextlib
import functools
import types

import jax
import numpy as np

from tests import helpers

SGD = [
  "opt_type=sgd",
  "learning_rate=0.1",
  "warmup_steps_fraction=0.0",
  "gradient_clipping_threshold=0",
  "eval_interval=-1",
  "packing=false",
]


def parameters(model) -> dict:
  """Every parameter by its path, on the host."""
  from flax import nnx

  leaves = jax.tree_util.tree_leaves_with_path(nnx.state(model, nnx.Param))
  return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


class _Batches:
  """A batch of random tokens, the same at every step. MaxText's own synthetic data works with no configuration of these trainers."""

  def __init__(self, config, *, pairs):
    random = np.random.default_rng(0)
    batch, length = config.global_batch_size_to_load, config.max_target_length
    if pairs:
      self._batch = {
        f"{name}_ids": random.integers(1, config.vocab_size, (batch, length // 2)) for name in ("prompt", "chosen", "rejected")
      }
      self._batch |= {name.replace("_ids", "_mask"): np.ones_like(ids) for name, ids in self._batch.items()}
      return
    tokens = random.integers(1, config.vocab_size, (batch, length + 1))
    self._batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    for name in ("inputs", "targets"):
      self._batch[f"{name}_position"] = np.broadcast_to(np.arange(length), (batch, length))
      self._batch[f"{name}_segmentation"] = np.ones((batch, length), np.int32)

  def __iter__(self):
    return self

  def __next__(self):
    return self._batch


def dpo(output, words, options=None, cached=True):
  """Three steps of `train_dpo` or as many as `words` say.

  Args:
    output: folder for everything it writes.
    words: added to those of a tiny run.
    options: of the plugin; None leaves it inactive.
    cached: false keeps Tunix from caching the model's graph, without which plain MaxText trains no MoE model.

  Returns:
    the trainer; how far each parameter moved, by its path.
  """
  from maxtext.input_pipeline import tokenizer
  from maxtext.trainers.post_train.dpo import train_dpo

  of_tokenizer = (tokenizer, "build_tokenizer", lambda *args: types.SimpleNamespace(pad_id=0))
  words = ["dpo.max_prompt_length=16", *words]
  return _trained(train_dpo, "dpo.yml", output, words, options, cached, pairs=True, replaced=[of_tokenizer])


def sft(output, words, options=None):
  """As `dpo`, for `train_sft`."""
  from maxtext.trainers.post_train.sft import train_sft

  return _trained(train_sft, "sft.yml", output, words, options)


def _trained(entry, yaml, output, words, options, cached=True, *, pairs=False, replaced=()):
  from maxtext.configs import pyconfig
  from maxtext.trainers.post_train import hooks

  import maxtext_moe_te

  data = (hooks, "create_data_iterator", lambda config, mesh: (_Batches(config, pairs=pairs), None))
  base, *rest = helpers.tiny_run(output, [*SGD, *words])
  active = contextlib.nullcontext() if options is None else maxtext_moe_te.activate(options=options)
  with active, _replaced([data, *replaced]):
    config = pyconfig.initialize_pydantic(["x", base.replace("base.yml", f"post_train/{yaml}"), *rest])
    trainer, mesh = entry.setup_trainer_state(config)
    before = parameters(trainer.model)
    if not cached:
      trainer.train = functools.partial(trainer.train, cache_nnx_graph=False)
    entry.train_model(config, trainer, mesh)
  return trainer, {name: value - before[name] for name, value in parameters(trainer.model).items()}


@contextlib.contextmanager
def _replaced(places):
  with contextlib.ExitStack() as stack:
    for owner, name, value in places:
      stack.callback(setattr, owner, name, getattr(owner, name))
      setattr(owner, name, value)
    yield
