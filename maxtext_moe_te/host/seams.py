"""Every place where the plugin enters MaxText, why there, and what is deliberately left alone.

Left alone: class names (MaxText compares them), classes themselves (names are bound at import), and everything defined in `train.py`
(under `python -m` it runs as `__main__`, out of reach of an attribute).
"""

import contextlib
import dataclasses
import functools
import inspect
import logging
import os
import sys

from maxtext.common import metric_logger

from maxtext_moe_te import versions
from maxtext_moe_te.errors import SeamError
from maxtext_moe_te.host import (
  advice,
  cast,
  expert_group,
  features,
  known,
  layer,
  lora,
  metrics,
  overflow,
  padding,
  parts,
  patching,
  remat,
  replay,
  restored,
  saving,
  selfcheck,
  source,
  watchdog,
  without_effect,
)
from maxtext_moe_te.host.checks import check_config
from maxtext_moe_te.host.configuration.seam import config_seams
from maxtext_moe_te.host.patching import Activation, Seam
from maxtext_moe_te.moe import te_api
from maxtext_moe_te.settings import xla_flags
from maxtext_moe_te.settings.config import AUTO, MoeTeOptions

log = logging.getLogger("maxtext_moe_te")
TRAIN = "maxtext.trainers.pre_train.train"


def activate(overlay=None, options: MoeTeOptions | None = None) -> Activation:
  """Puts all seams in place, or none. See `maxtext_moe_te.activate`."""
  if options is None:
    options = MoeTeOptions.from_mapping(overlay.moe_te if overlay else {}, source="overlay")
  xla_flags.check_profile_is_set(options.xla_profile, os.environ)
  if options.enabled:
    parts.check_options(options)
    if options.selfcheck == "never" and (unknown := known.unknown((known.LAYER, known.STEP))):
      raise selfcheck.refused_unjudged(unknown)
  versions.check_jax()

  def make():
    if options.enabled:
      _check_nothing_replaced()
    activation = patching.apply_all(seams(overlay, options), check=_check_is_maxtexts_own)
    recorder = metric_logger.record_activation_metrics
    activation.after_undo(lambda: _unbind(recorder))
    return activation

  return patching.activate_once((overlay, options), make)


def _check_nothing_replaced() -> None:
  """Of what the layer and the step are judged by, every function must be the one that stands in MaxText's files.

  Raises:
    SeamError: somebody has put another one in its place.
  """
  for target in (*known.GROUPS[known.LAYER], *known.GROUPS[known.STEP]):
    module, _, path = target.partition(":")
    *parents, name = path.split(".")
    owner = functools.reduce(lambda owner, parent: getattr(owner, parent, None), parents, sys.modules.get(module))
    if name in vars(owner or object):
      _check_is_maxtexts_own(target, vars(owner)[name])


def _check_is_maxtexts_own(seam, original) -> None:
  """What is judged is the text in MaxText's files, so the function in its place must be the one that stands there.

  Args:
    seam: one, or its target.
    original: what is there.

  Raises:
    SeamError: somebody has put another one in its place.
  """
  target = seam if isinstance(seam, str) else seam.target
  function = inspect.unwrap(getattr(original, "__func__", original))
  code = getattr(function, "__code__", None)
  # A name that a `from … import` has bound is judged where it comes from.
  text = source.function(target) or source.function(f"{function.__module__}:{function.__qualname__}")
  place = lambda path, line: (os.path.realpath(path), line)
  if code and text and place(code.co_filename, code.co_firstlineno) == place(text.path, text.lines[0].number):
    return
  raise SeamError(
    found=f"{target} is {code or original!r}, not the function of that name in MaxText's file",
    needed="MaxText's own, by which the plugin is judged",
    fix="activate the plugin before anything else replaces that function",
  )


def _unbind(recorder) -> None:
  """A trainer imported while the plugin was active has bound our recorder by name; gives it MaxText's back."""
  train = sys.modules.get(TRAIN)
  if train is not None and train.record_activation_metrics is recorder:
    train.record_activation_metrics = metric_logger.record_activation_metrics


def seams(overlay, options: MoeTeOptions) -> list[Seam]:
  """The seams that these options need."""
  checks = [functools.partial(check_config, options=options), _name_without_effect] if options.enabled else []
  checks.append(functools.partial(_check_source, options))
  needed = config_seams(overlay, options, checks=checks, own_checks=[functools.partial(remat.check, options)])
  needed.append(TRANSFORMER_ENGINE_CONTEXT)
  if options.enabled:
    needed.append(
      Seam(
        target="maxtext.layers.moe:RoutedMoE.__call__",
        replace=layer.replacing(options),
        passes=("self", "inputs", "gate_inputs", "out_sharding"),
        reason="the MoE layer itself; a method, because subclasses and from-imports keep the class",
      )
    )
    if options.padding == "skip":
      needed += padding.seams()
    if options.cast_weights != "layer":
      needed.append(
        Seam(
          target="maxtext.models.models:Transformer.__call__",
          replace=cast.casting(options),
          passes=("self",),
          reason="called once per pass over the model, between the parameters and the loop over layers",
        )
      )
    needed += [_group(options), _group_of_models(options), LORA]
    # What auto takes is known only with the mesh; it takes a capacity that a step may exceed only where the step then runs again.
    may_overflow = options.capacity_factor != 0 and (options.capacity_factor != AUTO or options.on_overflow == "exact")
    if options.metrics or may_overflow:
      recorder, train_step = _metrics(options)
      needed += [recorder, train_step]
      if TRAIN in sys.modules:  # imported before us, it has bound the recorder's name
        needed.append(dataclasses.replace(recorder, target=f"{TRAIN}:record_activation_metrics"))
    if options.metrics:
      needed.append(
        Seam(
          target="maxtext.common.metric_logger:MetricLogger.write_metrics",
          replace=advice.advising(options),
          passes=("self", "metrics", "step"),
          reason="a step's metrics, when it has ended",
        )
      )
    if may_overflow:
      needed += _exact(options) if options.on_overflow == "exact" else [_ending(options)]
  for seam in ALWAYS:
    needed = _joined(needed, seam)
  return needed


ALWAYS = (
  Seam(
    target="maxtext.common.metric_logger:MetricLogger.buffer_and_write_metrics",
    replace=watchdog.beating,
    passes=("self", "metrics", "step"),
    reason="called after each step: a rank that hangs is ended",
  ),
  Seam(
    target="maxtext.common.checkpointing:save_checkpoint",
    replace=saving.remembering,
    passes=("checkpoint_manager",),
    reason="what it still writes when the process fails is waited for",
  ),
)


def _joined(seams, added):
  """The seams with one more, around the one that has its target already, if there is one."""
  there = next((seam for seam in seams if seam.target == added.target), None)
  if there is None:
    return [*seams, added]
  both = dataclasses.replace(
    there, replace=lambda original: added.replace(there.replace(original)), reason=f"{there.reason}; {added.reason}"
  )
  return [both if seam is there else seam for seam in seams]


def _ending(options):
  return Seam(
    target="maxtext.utils.train_utils:jit_train_and_eval_step",
    replace=overflow.stopping(options),
    passes=("config",),
    reason="a step that overflowed must not be followed by a checkpoint or another step, or is to be counted",
  )


def _exact(options):
  """A step that overflowed runs again, before anybody sees its state or its metrics."""
  return [
    Seam(
      target="maxtext.utils.train_utils:jit_train_step",
      replace=replay.replaying(options),
      passes=("config", "model", "state_mesh_shardings", "data_sharding", "train_step", "params_shardings"),
      reason="the compiled train step is made here: two programs take its place",
    ),
    Seam(
      target="maxtext.utils.train_utils:jit_eval_step",
      replace=replay.evaluating,
      passes=("config", "model", "state_mesh_shardings", "data_sharding", "eval_step"),
      complete=True,
      reason="evaluation must hold whatever the routing, and see no step that is still to run again",
    ),
    Seam(
      target="maxtext.common.checkpointing:save_checkpoint",
      replace=replay.settling,
      reason="a checkpoint must not have a state that lacks the update of a step that overflowed",
    ),
    Seam(
      target="maxtext.common.checkpointing:maybe_save_checkpoint",
      replace=replay.settling_last,
      passes=("checkpoint_manager", "state", "config", "data_iterator", "step"),
      complete=True,
      reason="at the end it asks the state for its step",
    ),
    Seam(
      target="maxtext.common.metric_logger:MetricLogger.buffer_and_write_metrics",
      replace=replay.settling_where_written_at_once,
      passes=("self", "metrics", "step", "step_time_delta", "is_training"),
      complete=True,
      reason="metrics that are written at once must be those of the step that counts",
    ),
    Seam(
      target="maxtext.common.metric_logger:MetricLogger.flush_metrics_and_cleanup",
      replace=replay.settling,
      reason="the last step's update and metrics, at the end of the loop",
    ),
  ]


def _name_without_effect(config):
  if line := without_effect.line(config):
    parts.log_once(line)


def _check_source(options, config):
  """Last of the checks, because it may take a minute."""
  if line := selfcheck.settle_together(config, options):
    parts.log_once(line)


def _group(options):
  if features.of_host().te_moe_block:
    return Seam(
      target="maxtext.utils.max_utils:maybe_bootstrap_te_moe",
      replace=expert_group.bootstrapping(options),
      passes=("config", "mesh", "shaped_batch"),
      complete=True,
      reason="called once, before the model is traced: the only moment at which an NCCL EP group can be made",
    )
  return Seam(
    target="maxtext.utils.maxtext_utils:setup_training_state",
    replace=expert_group.bootstrapping_before_state(options),
    passes=("data_iterator", "config", "mesh"),
    reason="this MaxText knows no NCCL EP; this call comes where others make the group",
  )


def _group_of_models(options):
  return Seam(
    target="maxtext.utils.model_creation_utils:from_pretrained",
    replace=lambda original: expert_group.bootstrapping_models(options)(restored.completing(original)),
    passes=("config", "mesh", "devices", "model_mode"),
    reason="all post-training, the training engine and decoding make their models here, before they trace them, and lose router biases",
  )


LORA = Seam(
  target="maxtext.utils.lora_utils:apply_lora_to_model",
  replace=lora.checking,
  passes=("model", "mesh", "mt_config"),
  reason="a path that names expert weights would adapt nothing there, without a word",
)


def honest_context(original):
  """`max_utils.transformer_engine_context`, which catches what the training loop inside it raises, without being told of that.

  It yields a second time then, and so turns every error of a GPU run into "generator didn't stop after throw()". Older ones do not name
  the expert axis; here it always is.
  """

  @contextlib.contextmanager
  def transformer_engine_context():
    engine = te_api.find()
    if engine is not None and engine.incomplete:
      log.info("Transformer Engine not used: the one in %s %s", engine.package.folder, engine.incomplete)
      yield
      return
    entered = original()
    entered.__enter__()
    try:
      with _expert_axis_named():
        yield
    finally:
      entered.__exit__(None, None, None)

  return transformer_engine_context


def _expert_axis_named():
  try:
    from transformer_engine.jax.sharding import global_mesh_resource, global_shard_guard

    resource = global_mesh_resource()
  except (ImportError, AssertionError):  # no Transformer Engine, or nothing set
    return contextlib.nullcontext()
  if getattr(resource, "ep_resource", "") is not None:
    return contextlib.nullcontext()
  return global_shard_guard(dataclasses.replace(resource, ep_resource="expert"))


TRANSFORMER_ENGINE_CONTEXT = Seam(
  target="maxtext.utils.max_utils:transformer_engine_context",
  replace=honest_context,
  reason="errors of the run surface as they are",
)


def _metrics(options: MoeTeOptions) -> list[Seam]:
  return [
    Seam(
      target="maxtext.common.metric_logger:record_activation_metrics",
      replace=metrics.recording,
      passes=("output_metrics", "intermediate_outputs", "config"),
      complete=True,
      reason="the one place where train_step hands over what the layers recorded",
    ),
    Seam(
      target="maxtext.utils.maxtext_utils:get_functional_train_with_signature",
      replace=metrics.always_recording(options),
      passes=("train_step", "data_sharding", "state_mesh_shardings", "model", "config", "params_shardings"),
      complete=True,
      reason="train_step hands it over only under record_internal_nn_metrics",
    ),
  ]
