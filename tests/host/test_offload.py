"""`moe_te.offload`: what it adds to a configuration, what it refuses, and that its table of names is what the models name."""

import pytest

from maxtext_moe_te.errors import MoeTeError, VersionError
from maxtext_moe_te.settings.config import OFFLOADABLE, MoeTeOptions
from tests import helpers
from tests.host.test_every_block import BLOCKS

pytestmark = pytest.mark.host

QV = MoeTeOptions(offload=("query_proj", "value_proj"))
SCANNED = {**BLOCKS, "mla-without-q-lora": [*BLOCKS["deepseek"], "q_lora_rank=0"], "fused-qkv": [*BLOCKS["mixtral"], "fused_qkv=true"]}


def built(folder, words, options=QV, **kwargs):
  from maxtext_moe_te.host import step

  return step.build(helpers.tiny_run(folder, words), options=options, **kwargs)


def refused(folder, *words, options=QV):
  with pytest.raises(MoeTeError) as caught:
    built(folder, [*BLOCKS["mixtral"], *words], options)
  return str(caught.value)


@pytest.mark.parametrize("case", SCANNED)
def test_names_are_those_that_the_model_names(tmp_path, case):
  from maxtext_moe_te.host import remat

  step = built(tmp_path, SCANNED[case], MoeTeOptions())
  traced = {name for name in step.named_bytes if name in OFFLOADABLE}
  if case in ("qwen3_next", "qwen3_5"):
    traced -= {"query_proj", "key_proj", "value_proj", "attention_out", "out_proj"}  # kept on the device: qwen3.py, _scan_global_layer
  assert remat.produced_names(step.config) == traced


def test_the_list_of_names_is_maxtexts(tmp_path):
  offloaded = [f"{name}=offload" for name in OFFLOADABLE]
  config = built(tmp_path, [*BLOCKS["mixtral"], "remat_policy=custom", *offloaded], MoeTeOptions()).config
  assert set(config.tensors_to_offload) == set(OFFLOADABLE)


def test_policy_becomes_custom_with_the_names(tmp_path):
  config = built(tmp_path, BLOCKS["mixtral"]).config
  assert (config.remat_policy, config.tensors_to_offload) == ("custom", ["query_proj", "value_proj"])
  assert config.tensors_on_device == ["decoder_layer_input"]


def test_each_name_is_moved_to_the_host(tmp_path):
  def moves(words, options):
    step = built(tmp_path, [*BLOCKS["mixtral"], *words], options)
    with step.context():
      text = step._jitted.trace(step.state, step.batch).lower(lowering_platforms=("cuda",)).as_text()
    return text.count('_xla_buffer_placement = "pinned_host"')

  assert moves([], QV) == 2
  assert moves(["remat_policy=custom", "query_proj=device", "value_proj=device"], MoeTeOptions()) == 0


def test_bytes_of_a_name(tmp_path):
  step = built(tmp_path, [*BLOCKS["mixtral"], "base_num_kv_heads=2"])
  named = step.named_bytes
  tokens, layers, devices = 8 * 32, 2, 8
  assert named["query_proj"] == tokens * 4 * 16 * 4 * layers // devices
  assert named["value_proj"] == tokens * 2 * 16 * 4 * layers // devices
  assert step.bytes_of(("mlpwi_0", "moe_mlpwi_0")) == named["mlpwi_0"] == named["moe_mlpwi_0"], "one tensor with two names"
  assert step.bytes_of(("query_proj", "value_proj")) == named["query_proj"] + named["value_proj"]
  rows = tokens // devices * 2
  assert named["moe_x_sorted"] == rows * 64 * 4 * layers, "shapes in the MoE layer are a device's own"


@pytest.mark.parametrize(
  ("words", "options", "text"),
  [
    (
      ["query_proj=device"], QV,
      "query_proj=device on the command line and moe_te.offload with query_proj; needed: one place for each tensor. Fix: remove one of "
      "the two.",
    ),
    (
      ["remat_policy=minimal"], QV,
      "moe_te.offload=query_proj,value_proj with remat_policy=minimal on the command line, which says itself what is kept; needed: "
      "remat_policy=full or custom. Fix: set remat_policy=custom, and NAME=device for each tensor to be kept on the device.",
    ),
    (
      ["remat_policy=full"], QV,
      "moe_te.offload=query_proj,value_proj with remat_policy=full on the command line, under which nothing is kept; needed: "
      "remat_policy=custom. Fix: remove remat_policy=full: every tensor that is not named is recomputed anyway.",
    ),
    (
      [], MoeTeOptions(offload=("mla_q",)),
      "moe_te.offload with mla_q, a tensor that this model does not have (decoder_block=mixtral, attention_type=global); needed: names "
      "among attention_out, decoder_layer_input, key_proj,",
    ),
    (
      [], MoeTeOptions(offload=("context",)),
      "moe_te.offload with context, a tensor that this model does not have (attention=dot_product names none)",
    ),
    (
      [], MoeTeOptions(offload=("mlpwi_1",)), "moe_te.offload with mlpwi_1, a tensor that this model does not have",
    ),
    (
      ["base_num_decoder_layers=1"], QV,
      "moe_te.offload with scanned layers of which no scan is longer than 1: XLA then keeps the tensors on the device; needed: a scan of "
      "at least 2 layers. Fix: set scan_layers=false, or base_num_decoder_layers to more.",
    ),
  ],
)  # fmt: skip
def test_refusals(tmp_path, words, options, text):
  assert text in refused(tmp_path, *words, options=options)


@pytest.mark.parametrize("version", ["0.10.2", "0.11.0"])
def test_compilers_with_wrong_gradients(version):
  from maxtext_moe_te.host import remat

  with pytest.raises(VersionError) as caught:
    remat.check_compiler(scan=True, versions={"jaxlib": "0.12.0.1", "jax-cuda13-pjrt": version})
  assert str(caught.value) == (
    f"moe_te.offload with jax-cuda13-pjrt {version} and scanned layers: its gradients are wrong, without an error; needed: 0.11.1 or "
    "newer (https://github.com/openxla/xla/pull/46308). Fix: pip install 'jax[cuda13]>=0.12', or set scan_layers=false."
  )
  remat.check_compiler(scan=False, versions={"jaxlib": version})
  remat.check_compiler(scan=True, versions={"jaxlib": "0.11.1", "jax-cuda13-pjrt": None})
