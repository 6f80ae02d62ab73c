"""The NCCL EP group is made wherever MaxText makes a model, for the largest batch that its trainer will call it with. No GPU is here:
the mesh is said to be one of GPUs, and what would make the group is a record of what it was asked for."""

import contextlib
import types

import pytest

from maxtext_moe_te.errors import RefusedError
from maxtext_moe_te.settings.config import MoeTeOptions
from tests import helpers

pytestmark = pytest.mark.host

WORDS = ["model_name=mixtral-8x7b", "dtype=bfloat16", "ici_expert_parallelism=2", "ici_fsdp_parallelism=1", "ici_data_parallelism=4"]
SPLIT, LENGTH = 8, 32


class Made(Exception):
  """The model would be made now."""


@pytest.fixture
def groups(monkeypatch):
  """What NCCL EP groups were asked for; models are not made."""
  from maxtext.utils import model_creation_utils

  from maxtext_moe_te.host import expert_group
  from maxtext_moe_te.moe import te_runtime
  from maxtext_moe_te.moe.transport import nccl_ep

  def stop(*args, **kwargs):
    raise Made

  asked = []
  monkeypatch.setattr(model_creation_utils, "create_nnx_abstract_model", stop)
  monkeypatch.setattr(expert_group, "_platform", lambda mesh: "gpu")
  monkeypatch.setattr(expert_group.te_api, "installed", lambda: types.SimpleNamespace(require=lambda part: None))
  monkeypatch.setattr(te_runtime, "prepare_nccl_ep", lambda: None)
  monkeypatch.setattr(nccl_ep, "check_local_devices", lambda: None)
  monkeypatch.setattr(nccl_ep.Bootstrap, "capacity", 0)
  monkeypatch.setattr(nccl_ep, "bootstrap", lambda group, mesh, axis: asked.append((group, axis)))
  return asked


def resolved(output, yaml, words, **keywords):
  from maxtext.configs import pyconfig

  base, *rest = helpers.tiny_run(output, [*WORDS, *words])
  return pyconfig.initialize_pydantic(["x", base.replace("base.yml", yaml), *rest], **keywords)


@contextlib.contextmanager
def active(**options):
  import maxtext_moe_te

  with maxtext_moe_te.activate(options=MoeTeOptions(**options)):
    yield


# The YAML, the words, how the entry gets its model, and the sequences in a call of it.
ENTRIES = {
  "train_sft": ("post_train/sft.yml", ["gradient_accumulation_steps=2", "eval_interval=-1"], {}, 8),
  "train_sft, a larger evaluation": ("post_train/sft.yml", ["eval_per_device_batch_size=3", "eval_interval=2"], {}, 24),
  "train_dpo": ("post_train/dpo.yml", ["packing=false", "eval_interval=-1"], {}, 2 * 8),
  # Its pipeline does not split the batch for Tunix.
  "train_dpo, accumulated": ("post_train/dpo.yml", ["packing=false", "gradient_accumulation_steps=2", "eval_interval=-1"], {}, 2 * 16),
  "train_distill": ("base.yml", [], {"mesh": True}, 8),
  "training_engine": ("base.yml", [], {"model_mode": "train", "rng_key": None}, 8),
  "decode": ("base.yml", ["per_device_batch_size=2"], {"mesh": True, "model_mode": "autoregressive"}, None),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_group_for_each_entry(tmp_path, groups, entry):
  from maxtext.utils import maxtext_utils, model_creation_utils

  yaml, words, keywords, sequences = ENTRIES[entry]
  with active():
    config = resolved(tmp_path, yaml, words)
    if "mesh" in keywords:
      keywords = {**keywords, "mesh": maxtext_utils.get_mesh_from_config(config)}
    with pytest.raises(Made):
      model_creation_utils.from_pretrained(config, **keywords)
  ((group, axis),) = groups
  tokens = sequences * LENGTH if sequences else 16  # decoding: one token of each sequence
  assert (axis, group.ranks, group.num_experts, group.experts_per_token, group.width) == ("expert", 2, 8, 2, 64)
  assert group.max_tokens_per_rank == tokens // SPLIT


def test_a_group_for_the_answers_of_reinforcement_learning():
  from maxtext_moe_te.host import expert_group

  config = types.SimpleNamespace(rl=types.SimpleNamespace(num_generations=4), micro_batch_size_to_train_on=2, max_target_length=LENGTH)
  assert expert_group.largest_call(config, "train") == (8, LENGTH)


def test_pre_training_makes_one_as_before(tmp_path, groups):
  from maxtext.utils import max_utils, maxtext_utils

  with active():
    config = resolved(tmp_path, "base.yml", ["gradient_accumulation_steps=2"])
    max_utils.maybe_bootstrap_te_moe(config, maxtext_utils.get_mesh_from_config(config), None)
  ((group, _),) = groups
  assert group.max_tokens_per_rank == 8 * LENGTH // SPLIT


def test_none_for_one_rank_or_a_model_of_vllm(tmp_path, groups):
  from maxtext_moe_te.host import expert_group

  config = helpers.maxtext_config("mixtral-8x7b")
  expert_group.bootstrap(MoeTeOptions(), config, helpers.mesh_of(config, 1))
  with active():
    config = resolved(tmp_path, "base.yml", [])
  vllm = types.SimpleNamespace(num_experts=8, attention="vllm_rpa", enable_diloco=False, compiled_trainstep_file="")
  expert_group.bootstrap(MoeTeOptions(), vllm, helpers.mesh_of(config, 8))
  assert not groups


def test_asked_for_where_there_can_be_none_it_is_refused_before_the_model_is_made(tmp_path, groups, monkeypatch):
  from maxtext.utils import model_creation_utils

  from maxtext_moe_te.host import expert_group

  config = resolved(tmp_path, "base.yml", [])
  options = MoeTeOptions(transport="nccl_ep")
  from_pretrained = expert_group.bootstrapping_models(options)(model_creation_utils.from_pretrained)
  with pytest.raises(
    RefusedError, match="nccl_ep for decoding, whose prefill has a batch of 1 that no axis splits; needed: a trainer, on N"
  ):
    from_pretrained(config, model_mode="autoregressive")
  with pytest.raises(RefusedError, match="NCCL EP on 2 of 8 devices; needed: a mesh of all devices of the run"):
    some = helpers.maxtext_config("mixtral-8x7b", ici_expert_parallelism=2, ici_fsdp_parallelism=1)
    expert_group.bootstrap(options, config, helpers.mesh_of(some, 2))
  monkeypatch.setattr(expert_group, "_platform", lambda mesh: "cpu")
  with pytest.raises(RefusedError, match=r"moe_te\.transport=nccl_ep on CPUs; needed: a trainer, on NVIDIA GPUs"):
    from_pretrained(config)
  assert not groups


def test_a_process_has_one_group(monkeypatch):
  """Distillation makes two models: where their layers differ, one of them moves its rows with XLA's collectives."""
  import jax.numpy as jnp

  from maxtext_moe_te.host import parts, rules_from_config
  from maxtext_moe_te.moe.block import Layout
  from maxtext_moe_te.moe.transport import nccl_ep

  group = nccl_ep.Bootstrap(num_experts=8, experts_per_token=2, ranks=2, max_tokens_per_rank=64, width=64)
  monkeypatch.setattr(nccl_ep, "_bootstrapped", group)
  nccl_ep.check_none_but(nccl_ep.Bootstrap(num_experts=8, experts_per_token=2, ranks=2, max_tokens_per_rank=32, width=64))
  for other in (dict(num_experts=16), dict(max_tokens_per_rank=128)):
    with pytest.raises(RefusedError, match="one shape of MoE layer per process"):
      nccl_ep.check_none_but(nccl_ep.Bootstrap(**{**vars(group), **other}))
  config = helpers.maxtext_config("mixtral-8x7b", ici_expert_parallelism=2, ici_fsdp_parallelism=1)
  layout = Layout(mesh=helpers.mesh_of(config, 2), batch=("expert",), expert=("expert",))
  options, spec = MoeTeOptions(capacity_factor=0, chunks=1), rules_from_config.layer_spec(config)
  chosen = lambda width: parts.choose(options, layout, spec, (8, 32, width), 64, jnp.float32).transport.name
  assert chosen(64) == "nccl_ep" and chosen(128) == "xla"
