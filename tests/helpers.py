"""Inputs, error metrics and MaxText layers for the tests. Imports jax; imports MaxText only inside functions that need it."""

import importlib
import json
import os
from unittest import mock

import jax.numpy as jnp
import numpy as np

from tests import tolerances

# Adam with an epsilon above what a gradient's elements are, so that its updates follow them as sgd's do. For what sgd has not: moments.
ADAM = ["opt_type=adamw", "adam_eps=0.1", "learning_rate=0.003"]
FILE_OF_ERRORS = "MOE_TE_RECORD_ERRORS"  # the variable that the option --record-errors sets


def relative_error(actual, expected) -> float:
  """Relative Frobenius error, computed in float64; NaN if either has one."""
  actual, expected = (np.asarray(a, np.float64) for a in (actual, expected))
  return float(np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), 1e-30))


def within(name: str, error: float, bound: float) -> bool:
  """Whether an error keeps its bound. With `--record-errors FILE`, how much of the bound it takes is a line of FILE."""
  if FILE_OF_ERRORS in os.environ:
    share = error / bound if bound else float("inf" if error else 0)
    with open(os.environ[FILE_OF_ERRORS], "a") as file:
      file.write(json.dumps({"test": os.environ.get("PYTEST_CURRENT_TEST", ""), "name": name, "share": float(share)}) + "\n")
  return bool(error <= bound)


def assert_close(actual: dict, expected: dict, *, forward: float, gradient: float, forward_names=("y", "load_balance_loss", "bias_update")):
  """Holds two results of `run_layer` together and names every entry that differs."""
  assert actual.keys() == expected.keys()
  errors = {name: relative_error(actual[name], expected[name]) for name in expected}
  bounds = {name: forward if name in forward_names else gradient for name in expected}
  bad = {name: f"{errors[name]:.2e} > {bounds[name]:.0e}" for name in errors if not within(name, errors[name], bounds[name])}
  assert not bad, f"relative errors over their bound: {bad}"


def maxtext_config(model_name: str, **overrides):
  """A reduced configuration of a MaxText model, float32, for 8 experts top 2 unless overridden."""
  from maxtext.configs import pyconfig

  reduced = dict(
    override_model_config=True,
    model_name=model_name,
    run_name="test",
    base_output_directory="unused",
    enable_checkpointing=False,
    hardware="cpu",
    skip_jax_distributed_system=True,
    log_config=False,
    dtype="float32",
    weight_dtype="float32",
    matmul_precision="highest",
    base_emb_dim=64,
    base_mlp_dim=48,
    base_moe_mlp_dim=48,
    num_experts=8,
    num_experts_per_tok=2,
    vocab_size=128,
    max_target_length=32,
    per_device_batch_size=1,
    megablox=False,
    sparse_matmul=True,
    load_balance_loss_weight=0.01,
  )
  base = pyconfig.__file__.replace("pyconfig.py", "base.yml")
  return pyconfig.initialize(["test", base], **{**reduced, **overrides})


def _of_one_layer(name):
  """A function of `host.one_layer`, which imports MaxText, looked up when it is called."""

  def call(*args, **kwargs):
    from maxtext_moe_te.host import one_layer

    return getattr(one_layer, name)(*args, **kwargs)

  return call


mesh_of, routed_moe, run_layer, layer_inputs, our_call = map(_of_one_layer, ("mesh_of", "routed_moe", "run", "inputs", "our_call"))


def parameters(module):
  """(name, variable) of every floating parameter of a module."""
  from flax import nnx

  for path, leaf in nnx.to_flat_state(nnx.state(module)):
    if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating):
      variable = module
      for name in path:
        variable = getattr(variable, name)
      yield ".".join(map(str, path)), variable


def tiny_run(output, words) -> list[str]:
  """MaxText's arguments for a tiny run on synthetic data, `words` winning; the run's YAML is the first."""
  from maxtext.configs import pyconfig

  tiny = dict(
    run_name="test",
    base_output_directory=output,
    metrics_file=output / "metrics.jsonl",
    enable_checkpointing=False,
    hardware="cpu",
    skip_jax_distributed_system=True,
    log_config=False,
    enable_tensorboard=False,
    dataset_type="synthetic",
    dtype="float32",
    weight_dtype="float32",
    matmul_precision="highest",
    base_emb_dim=64,
    base_mlp_dim=48,
    base_moe_mlp_dim=48,
    base_num_query_heads=4,
    base_num_kv_heads=4,
    head_dim=16,
    base_num_decoder_layers=3,
    num_experts=8,
    num_experts_per_tok=2,
    vocab_size=256,
    max_target_length=32,
    per_device_batch_size=1,
    steps=3,
    # Adam would turn the rounding of vanishing gradients into whole updates: after a few steps, equal computations differ.
    opt_type="sgd",
    learning_rate=0.03,
    warmup_steps_fraction=0.0,
    attention="dot_product",
    megablox=False,
    sparse_matmul=True,
    override_model_config=True,
  )
  base = pyconfig.__file__.replace("pyconfig.py", "base.yml")
  given = dict(word.split("=", 1) for word in words)
  return [base, *(f"{key}={value}" for key, value in {**tiny, **given}.items())]


def train(output, words, *, overlay=None, options=None, module="pre_train.train") -> list[dict]:
  """Runs one of MaxText's trainers in this process and returns its metrics, one dict per step.

  Args:
    output: folder for everything it writes.
    words: key=value words added to a tiny run on synthetic data.
    overlay: an `Overlay`, or None.
    options: a `MoeTeOptions` to activate the plugin with; None leaves it inactive.
    module: the trainer, among `maxtext.trainers`.
  """
  import maxtext_moe_te

  trainer = importlib.import_module(f"maxtext.trainers.{module}")
  metrics = output / "metrics.jsonl"
  argv = ["train", *tiny_run(output, words)]
  metrics.unlink(missing_ok=True)
  if options is None:
    trainer.main(argv)
  else:
    with maxtext_moe_te.activate(overlay=overlay, options=options) as activation:
      trainer.main(argv)
    layer_calls = activation.calls["maxtext.layers.moe:RoutedMoE.__call__"]
    assert layer_calls > 0 or not options.enabled, "the plugin's layer was never called"
  return [json.loads(line) for line in metrics.read_text().splitlines()]


def train_keeping_gradients(output, words, **more) -> tuple[list[dict], dict]:
  """(what `train` returns, gradients of the last step by parameter); the optimizer's state holds them, clipped."""
  from maxtext.optimizers import optimizers
  from maxtext.trainers.pre_train import train as trainer

  from maxtext_moe_te.host import step

  make_optimizer, loop, gradients = optimizers.get_optimizer, trainer.train_loop, {}

  def train_loop(*args, **kwargs):
    gradients.update(step.gradients(loop(*args, **kwargs)))

  with (
    mock.patch.object(optimizers, "get_optimizer", lambda *args, **kwargs: step.keeping_gradients(make_optimizer(*args, **kwargs))),
    mock.patch.object(trainer, "train_loop", train_loop),
  ):
    return train(output, words, **more), gradients


def assert_same_losses(ours: list[dict], plain: list[dict], *, moved: float = 0.01, bound: float = tolerances.TRAINING_LOSS):
  """Holds the losses of two runs together, step by step.

  Args:
    ours, plain: what `train` returned.
    moved: how much the loss must have fallen; of a model that did not move, equal losses would show nothing.
    bound: relative difference, of each step.
  """
  ours, plain = ([step["learning/loss"] for step in metrics] for metrics in (ours, plain))
  errors = [abs(one - other) / abs(other) for one, other in zip(ours, plain, strict=True)]
  assert within("loss", max(errors), bound), f"losses {ours}, wanted {plain}: apart by {max(errors):.1e}"
  assert plain[-1] < plain[0] - moved, f"the model did not move: {plain}"


def assert_same_training(ours, plain, **more):
  """Holds two results of `train_keeping_gradients` together: losses as `assert_same_losses`, and every gradient of the last step."""
  assert_same_losses(ours[0], plain[0], **more)
  assert_same_gradients(ours[1], plain[1])


def assert_same_gradients(ours: dict, plain: dict, bound: float = tolerances.FLOAT32_GRADIENT):
  """Holds gradients of a whole model together, by parameter; see `tolerances.VANISHING_GRADIENT`."""
  assert ours.keys() == plain.keys() and plain
  norms = {name: np.linalg.norm(np.float64(gradient)) for name, gradient in plain.items()}
  least = tolerances.VANISHING_GRADIENT * np.linalg.norm(list(norms.values()))
  errors = {name: np.linalg.norm(np.float64(ours[name]) - np.float64(plain[name])) / max(norm, least) for name, norm in norms.items()}
  bad = {name: f"{error:.1e}" for name, error in errors.items() if not within(name, error, bound)}
  assert not bad, f"relative errors of gradients over {bound:.0e}: {bad}"
