"""Every place where the plugin enters MaxText, why there, and what is deliberately left alone.

Left alone: class names (MaxText compares them), classes themselves (names are bound at import), and everything defined in `train.py`
(under `python -m` it runs as `__main__`, out of reach of an attribute).
"""

import contextlib
import dataclasses
import functools
import logging
import os
import sys

from maxtext.common import metric_logger

from maxtext_moe_te import versions
from maxtext_moe_te.host import cast, configuration, expert_group, layer, metrics, overflow, parts, patching, remat
from maxtext_moe_te.host.checks import check_config
from maxtext_moe_te.host.patching import Activation, Seam
from maxtext_moe_te.moe import te_api
from maxtext_moe_te.settings import xla_flags
from maxtext_moe_te.settings.config import MoeTeOptions

log = logging.getLogger("maxtext_moe_te")
TRAIN = "maxtext.trainers.pre_train.train"


def activate(overlay=None, options: MoeTeOptions | None = None) -> Activation:
  """Puts all seams in place, or none. See `maxtext_moe_te.activate`."""
  if options is None:
    options = MoeTeOptions.from_mapping(overlay.moe_te if overlay else {}, source="overlay")
  xla_flags.check_profile_is_set(options.xla_profile, os.environ)
  if options.enabled:
    parts.check_options(options)
  host_version = versions.check_maxtext(accept_unknown=options.unknown_host)
  if not options.unknown_host:
    versions.check_jax()

  def make():
    activation = patching.apply_all(seams(overlay, options), host_version=host_version, accept_unknown=options.unknown_host)
    recorder = metric_logger.record_activation_metrics
    activation.after_undo(lambda: _unbind(recorder))
    return activation

  return patching.activate_once((overlay, options), make)


def _unbind(recorder) -> None:
  """A trainer imported while the plugin was active has bound our recorder by name; gives it MaxText's back."""
  train = sys.modules.get(TRAIN)
  if train is not None and train.record_activation_metrics is recorder:
    train.record_activation_metrics = metric_logger.record_activation_metrics


def seams(overlay, options: MoeTeOptions) -> list[Seam]:
  """The seams that these options need."""
  checks = [functools.partial(check_config, options=options)] if options.enabled else []
  checks.append(functools.partial(remat.check, options))
  needed = configuration.config_seams(overlay, options, checks=checks)
  needed.append(TRANSFORMER_ENGINE_CONTEXT)
  if options.enabled:
    old = versions.maxtext_before("0.2.5")
    needed.append(
      Seam(
        target="maxtext.layers.moe:RoutedMoE.__call__",
        replace=layer.replacing(options),
        fingerprints={
          "0.2.4": "d52c1f9697e586944d0796c295ff3d1d986111f94f130f1497b2fcc27fd0220e",
          "0.2.5": "ab9adf9faeab03ac236c37d64b31176880479daa6828ca51523aca6b8c694882",
        },
        relies_on=tuple(target for target in LAYER_RELIES_ON if not (old and target in NEW_IN_0_2_5)),
        reason="the MoE layer itself; a method, because subclasses and from-imports keep the class",
      )
    )
    if options.cast_weights != "layer":
      needed.append(_cast(options))
    needed.append(_bootstrap_0_2_4(options) if old else _bootstrap(options))
    if options.metrics or options.capacity_factor:
      recorder, train_step = _metrics(options)
      needed += [recorder, train_step]
      if TRAIN in sys.modules:  # imported before us, it has bound the recorder's name
        needed.append(dataclasses.replace(recorder, target=f"{TRAIN}:record_activation_metrics"))
    if options.capacity_factor:
      needed.append(
        Seam(
          target="maxtext.utils.train_utils:jit_train_and_eval_step",
          replace=overflow.stopping(options),
          fingerprints=dict.fromkeys(("0.2.4", "0.2.5"), "596b6934d93436e26f484fad5181e6b2fa343f2b86fdce8fbbdeff059c24f09f"),
          reason="a step that overflowed must not be followed by a checkpoint or another step",
        )
      )
  return needed


def _cast(options):
  return Seam(
    target="maxtext.models.models:Transformer.__call__",
    replace=cast.casting(options),
    fingerprints={
      "0.2.4": "d0115d17af0a57dc44a8ae75553968e8de6a30221ea8b01ebc7a83111f7eafca",
      "0.2.5": "e40acd1d82c5c19554b9a72a6b48d4b5ba5f8a6a62d5ba4b0836c583c3cd06ec",
    },
    reason="called once per pass over the model, between the parameters and the loop over layers",
  )


def _bootstrap(options):
  return Seam(
    target="maxtext.utils.max_utils:maybe_bootstrap_te_moe",
    replace=expert_group.bootstrapping(options),
    fingerprints={"0.2.5": "3ab54efbc82fb1363f7e6f8356fb06987c6002c2964315fa3c08edd89dbef963"},
    reason="called once, before the model is traced: the only moment at which an NCCL EP group can be made",
  )


def _bootstrap_0_2_4(options):
  return Seam(
    target="maxtext.utils.maxtext_utils:setup_training_state",
    replace=expert_group.bootstrapping_before_state(options),
    fingerprints={"0.2.4": "f27272dd58916d0c67967f9c2aad137c5c1bc6760528642feea610c186d44b31"},
    reason="0.2.4 knows no NCCL EP; this call comes where 0.2.5 makes the group",
  )


# What our rules restate: if MaxText changes one of these, its models may compute something else.
_MOE = "maxtext.layers.moe"
LAYER_RELIES_ON = (
  f"{_MOE}:RoutedMoE.get_topk",
  f"{_MOE}:RoutedMoE.deepseek_routing",
  f"{_MOE}:RoutedMoE.deepseek_scale_weights",
  f"{_MOE}:RoutedMoE.expert_group_mask",
  f"{_MOE}:RoutedMoE.apply_ffn_activation",
  f"{_MOE}:RoutedMoE.load_balance_loss",
  f"{_MOE}:RoutedMoE.megatron_seq_aux_loss",
  f"{_MOE}:RoutedMoE.should_update_load_balance",
  f"{_MOE}:RoutedMoE.permute",
  f"{_MOE}:RoutedMoE.unpermute",
  f"{_MOE}:GateLogit.__call__",
)
NEW_IN_0_2_5 = (f"{_MOE}:RoutedMoE.megatron_seq_aux_loss",)


def honest_context(original):
  """`max_utils.transformer_engine_context` without its `except Exception: yield`.

  That clause also catches what the training loop inside the context raises, yields a second time, and so turns every error of a
  GPU run into "generator didn't stop after throw()".
  """
  del original

  @contextlib.contextmanager
  def transformer_engine_context():
    engine = te_api.find()
    if engine is not None and engine.incomplete:
      log.info("Transformer Engine not used: the one in %s %s", engine.package.folder, engine.incomplete)
      yield
      return
    try:
      from transformer_engine.jax.sharding import MeshResource, global_shard_guard
    except ImportError:
      yield
      return
    resource = MeshResource(
      dp_resource="data",
      tp_resource="tensor",
      tpsp_resource="tensor_sequence",
      fsdp_resource="fsdp",
      pp_resource=None,
      cp_resource="context",
      ep_resource="expert",
    )
    with global_shard_guard(resource):
      yield

  return transformer_engine_context


TRANSFORMER_ENGINE_CONTEXT = Seam(
  target="maxtext.utils.max_utils:transformer_engine_context",
  replace=honest_context,
  fingerprints={
    "0.2.4": "719405a659ea395ab655038d009fa2e3d4aecedc87bc8b3b1bad78aba11e084c",
    "0.2.5": "b4adb6c9c54d8e19c9ada8a04ec2c7d63cc37893e1364eafe1a63200d57eb0ac",
    "0.2.5 patched": "39da9665ab67a3b9583c98fd0b2234803dded5eff7d6a95472de80e5eee6e255",
  },
  reason="errors of the run surface as they are",
)


def _metrics(options: MoeTeOptions) -> list[Seam]:
  return [
    Seam(
      target="maxtext.common.metric_logger:record_activation_metrics",
      replace=metrics.recording,
      fingerprints=dict.fromkeys(("0.2.4", "0.2.5"), "7395fa5520b26feb53e8eb033d8a361d24e6cbae5832272853ad8418f73117d9"),
      reason="the one place where train_step hands over what the layers recorded",
    ),
    Seam(
      target="maxtext.utils.maxtext_utils:get_functional_train_with_signature",
      replace=metrics.always_recording(options),
      fingerprints={
        "0.2.4": "95c6ac283048a946e81a8af4d8ed53dd5513ff5fab52dfa213f7c0f0877a5c15",
        "0.2.5": "2cd634fd97b5715b86b77fe16ffcb46a06c4c5880aec67b717c62ea388ecd631",
      },
      reason="train_step hands it over only under record_internal_nn_metrics",
    ),
  ]
