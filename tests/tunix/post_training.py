"""MaxText's post-training entry points on Tunix, tiny and on synthetic data, so that what they computed can be compared."""

import contextlib
import functools
import importlib
import sys
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
    self._left = config.steps  # distillation ends with its data
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
    if not self._left:
      raise StopIteration
    self._left -= 1
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


def distilled(output, words, options=None, cached=True):
  """As `dpo`, for `train_distill`: how far each parameter of the student moved."""
  import optax
  from maxtext.configs import pyconfig
  from maxtext.input_pipeline import input_pipeline_interface, tokenizer
  from maxtext.trainers.post_train.distillation import distillation_utils, train_distill
  from tunix.sft import peft_trainer

  found = {}
  train = peft_trainer.PeftTrainer.train

  def recorded(self, data, *args, **kwargs):
    before = parameters(self.model.student_model)
    train(self, data, *args, **({} if cached else {"cache_nnx_graph": False}), **kwargs)
    found["trainer"] = self
    found["moved"] = {name: value - before[name] for name, value in parameters(self.model.student_model).items()}

  replaced = [
    (tokenizer, "build_tokenizer", lambda *args, **kwargs: types.SimpleNamespace(pad_id=0)),
    (input_pipeline_interface, "create_data_iterator", lambda config, mesh: (_Batches(config, pairs=False), None)),
    (train_distill, "get_distillation_optimizer", lambda *args: optax.sgd(1.0)),
    (peft_trainer.PeftTrainer, "train", recorded),
    (distillation_utils.MaxTextCheckpointManager, "_checkpointer", None),  # which a newer Tunix has
  ]
  argv = ["x", *helpers.tiny_run(output, [*SGD, *words])]
  with _active(options), _replaced(replaced):
    student = pyconfig.initialize(argv)
    train_distill.train_distill(student, pyconfig.initialize(argv, init_weights_seed=1))
  return found["trainer"], found["moved"]


def rl(output, words, options=None, cached=True):
  """As `dpo`, for the models and the trainer of `train_rl`. Its sampler is not vLLM: it answers with random tokens."""
  import optax
  from flax import nnx
  from maxtext.configs import types as maxtext_types
  from maxtext.utils import model_creation_utils
  from tunix.rl.rollout import base_rollout
  from tunix.sft import peft_trainer

  class Answers(base_rollout.BaseRollout):
    def __init__(self, rollout_actor, maxtext_config, **kwargs):
      del kwargs
      self._model, self._config, self._random = rollout_actor, maxtext_config, np.random.default_rng(0)

    def generate(self, prompts, rollout_config, **kwargs):
      tokens = lambda length: self._random.integers(1, self._config.vocab_size, (len(prompts), length))
      answers = tokens(rollout_config.max_tokens_to_generate)
      return base_rollout.RolloutOutput([str(a.sum()) for a in answers], [], list(answers), tokens(rollout_config.max_prompt_length), None)

    def get_per_token_logps(self, *args, **kwargs):
      raise NotImplementedError

    def update_params(self, *args, **kwargs):
      pass

    pad_id = lambda self: 0
    eos_id = lambda self: 0
    model = lambda self: self._model

  train_rl = _train_rl(Answers)
  train = peft_trainer.PeftTrainer.train
  uncached = lambda self, data, *args, **kwargs: train(self, data, *args, **{**kwargs, "cache_nnx_graph": False})
  replaced = [
    (train_rl.utils_rl, "get_optimizer", lambda config: optax.sgd(1.0)),
    (train_rl, "build_reward_fns", lambda *args: [lambda prompts, completions, **kwargs: [float(text[-1]) for text in completions]]),
    (peft_trainer.PeftTrainer, "train", train if cached else uncached),
  ]
  words = [
    *words, "batch_size=4", "num_batches=3", "train_micro_batch_size=4", "rl.num_generations=4", "max_prefill_predict_length=16",
    "num_test_batches=0", "eval_interval=1000", "convert_checkpoint_if_possible=false", "use_pathways=false", "remat_policy=full",
    "dtype=float32",
  ]  # fmt: skip
  base, *rest = helpers.tiny_run(output, words)
  rest = [word for word in rest if word.split("=")[0] not in ("metrics_file", "steps", "warmup_steps_fraction", "enable_tensorboard")]
  with _active(options), _replaced(replaced):
    argv = ["x", base.replace("base.yml", "post_train/rl.yml"), *rest]
    config, of_sampler, devices, sampler_devices = model_creation_utils.setup_configs_and_devices(argv, config_class=maxtext_types.RLConfig)
    reference, of_reference, actor, of_actor, of_rollout = model_creation_utils.create_models_and_meshes(
      config, of_sampler, devices, sampler_devices, tokenizer_pad_id=0
    )
    before = parameters(actor)
    meshes = (actor, of_actor, reference, of_reference, of_rollout)
    _, trainer, *_ = train_rl.create_rl_components(config, of_sampler, sampler_devices, *meshes, _Tokenizer())
    trainer.train([{"prompts": [f"{i}" for i in range(4)]} for _ in range(3)])
    assert not cached or not nnx.state(actor, nnx.Intermediate)
  return trainer.rl_cluster.actor_trainer, {name: value - before[name] for name, value in parameters(actor).items()}


def engine(output, words, options=None, *, own_loss=True):
  """How far each parameter moves in two updates of two microbatches of the training engine, which needs what no released Tunix has."""
  import flax.struct
  import tunix.sft.utils
  from maxtext.configs import pyconfig
  from maxtext.trainers.pre_train import train

  @flax.struct.dataclass
  class WeightedMetric:
    unreduced_sum: jax.Array
    denominator: jax.Array
    eps: float = 1e-8
    min_denom: float = 1.0

    def compute(self):
      return self.unreduced_sum / self.denominator

  @flax.struct.dataclass
  class LossOutput:
    primary_loss: WeightedMetric
    aux_metrics: dict

  payloads = {"TrainerPayload": dict, "RLTrainerPayload": dict}
  stand_ins = {"tunix.experimental": {}, "tunix.experimental.common": {}, "tunix.experimental.common.datatypes": payloads}
  with _replaced([(tunix.sft.utils, "WeightedMetric", WeightedMetric), (tunix.sft.utils, "LossOutput", LossOutput)]):
    maxtext_engine = _imported("maxtext.training_engine.maxtext_engine", stand_ins)
  kinds = maxtext_engine.abstract_engine  # those of the first import

  with _active(options):
    config = pyconfig.initialize(["x", *helpers.tiny_run(output, [*SGD, *words])])
    trainer = maxtext_engine.MaxTextTrainingEngine(config)

    def loss(model, **data):
      aux = train.loss_fn(model, config, data, None, None)[1]
      return kinds.LossOutput(kinds.WeightedMetric(aux["xent_sum"], aux["total_weights"]), {})

    if own_loss:
      trainer.with_loss_fn(loss, has_aux=True).with_gen_model_input_fn(lambda batch: batch)
    before, batch = parameters(trainer.model), next(_Batches(config, pairs=False))
    trainer.compile(batch)
    for _ in range(2):
      trainer.fwd_bwd(batch)
      trainer.fwd_bwd(batch)
      trainer.update()
    trainer.close()
    return {name: value - before[name] for name, value in parameters(trainer.model).items()}


class _Tokenizer:
  pad_id = eos_id = bos_id = lambda self: 0
  encode = lambda self, text, **kwargs: [1]
  decode = lambda self, tokens, **kwargs: ""


def _train_rl(sampler):
  """The module `train_rl`, with stand-ins for what it imports and only vLLM, data sets and answers to problems need."""
  stand_ins = {
    "datasets": {},
    "math_verify": {"parse": None},
    "math_verify.parser": {"ExprExtractionConfig": None, "LatexExtractionConfig": None},
    "maxtext.trainers.post_train.rl.math_verify_pool": {"math_verify_pool": None, "verify_math_worker": None},
    "maxtext.integration.vllm.maxtext_vllm_adapter": {"register": lambda: None},
    "maxtext.integration.vllm.maxtext_vllm_rollout": {"MaxTextVllmRollout": sampler},
  }
  module = _imported("maxtext.trainers.post_train.rl.train_rl", stand_ins)
  module.MaxTextVllmRollout = sampler
  return module


def _imported(name, stand_ins):
  """A module, imported with stand-ins for other modules, each with its values."""
  for other, values in stand_ins.items():
    sys.modules[other] = types.ModuleType(other)
    vars(sys.modules[other]).update(values)
  try:
    return importlib.import_module(name)
  finally:
    for other in stand_ins:
      del sys.modules[other]


def _active(options):
  import maxtext_moe_te

  return contextlib.nullcontext() if options is None else maxtext_moe_te.activate(options=options)


def _trained(entry, yaml, output, words, options, cached=True, *, pairs=False, replaced=()):
  from maxtext.configs import pyconfig
  from maxtext.trainers.post_train import hooks

  data = (hooks, "create_data_iterator", lambda config, mesh: (_Batches(config, pairs=pairs), None))
  base, *rest = helpers.tiny_run(output, [*SGD, *words])
  with _active(options), _replaced([data, *replaced]):
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
      stack.callback(*((setattr, owner, name, getattr(owner, name)) if hasattr(owner, name) else (delattr, owner, name)))
      setattr(owner, name, value)
    yield
