"""MaxText's entry points, by name, and what each has under the plugin: one table, which a test holds to MaxText's folders."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from maxtext_moe_te.errors import RefusedError

if TYPE_CHECKING:  # --help reads this table, and no options
  from maxtext_moe_te.settings.config import MoeTeOptions

TRAIN = "maxtext.trainers.pre_train.train"


@dataclass(frozen=True, kw_only=True)
class Entry:
  """One module that is run.

  Args:
    layer: whether it runs, or compiles, the MoE layer that the plugin replaces; without, the rest means nothing.
    metrics: whether it reports the load of experts.
    capacity: whether its steps are checked for overflow, so that a finite moe_te.capacity_factor is accepted.
    group: whether an NCCL EP group is made.
    unproven: what no test of this project has run with it, and why.
    refused: why it is refused, or "".
    note: what is said at its start, or "".
  """

  layer: bool = True
  metrics: bool = False
  capacity: bool = False
  group: bool = False
  unproven: str = ""
  refused: str = ""
  note: str = ""


_STEP = dict(metrics=True, capacity=True)
_TUNIX = dict(group=True, unproven="GPUs")
_NO_LAYER = Entry(layer=False)
_ENGINE = Entry(group=True, unproven="the module itself, which needs JetStream; its engine prefills and decodes in a test")
_OF_MAXTEXT = "it quantizes the weights of MaxText's own MoE layer, by running that layer"
_COMPILES = (
  "it makes no NCCL EP group: on an expert axis it compiles XLA's collectives, whose time and memory are not the run's; "
  "`maxtext-moe-te doctor --deep` compiles the run's step"
)


def _in(folder: str, entry: Entry, *names: str) -> dict[str, Entry]:
  return {f"maxtext.{folder}.{name}": entry for name in names}


ENTRIES = {
  TRAIN: Entry(**_STEP, group=True),
  "maxtext.trainers.pre_train.train_compile": Entry(**_STEP, note=_COMPILES),
  "maxtext.trainers.post_train.sft.train_sft": Entry(**_TUNIX),
  "maxtext.trainers.post_train.sft.train_sft_native": Entry(**_STEP, group=True),
  "maxtext.trainers.post_train.dpo.train_dpo": Entry(**_TUNIX),
  "maxtext.trainers.post_train.rl.train_rl": Entry(
    group=True,
    unproven="the module itself and its sampler, which need vLLM for TPUs; its models and trainer run in a test with Tunix's sampler",
  ),
  "maxtext.trainers.post_train.distillation.train_distill": Entry(
    group=True, unproven="a released Tunix: MaxText 0.2.5 needs a newer one than 0.1.7; a test supplies what that lacks"
  ),
  **_in(
    "trainers.post_train.distillation", Entry(group=True, unproven="the module: it needs array_record files"), "save_top_k_teacher_logits"
  ),
  **_in("trainers.post_train.distillation", _NO_LAYER, "verify_saved_logits"),
  **_in("trainers.tokenizer", _NO_LAYER, "train_tokenizer"),
  "maxtext.training_engine.maxtext_engine_compile": Entry(
    unproven="the module, which needs an unreleased Tunix; the engine itself runs in a test with what Tunix lacks", note=_COMPILES
  ),
  **_in(
    "inference", _ENGINE, "decode", "decode_multi", "scripts.decode_multi", "inference_microbenchmark", "inference_microbenchmark_sweep",
    "maxengine.maxengine_server", "mlperf.offline_mode", "mlperf.microbenchmarks.benchmark_chunked_prefill",
  ),
  "maxtext.inference.vllm_decode": Entry(layer=False, unproven="vLLM, whose MoE layer it runs"),
  **_in(
    "inference.mlperf", _NO_LAYER, "evaluate-accuracy", "evaluate-accuracy-fast", "matmul.matmul_dtypes", "matmul.matmul_sharding",
    "trillium.select_xla_flags",
  ),
  **_in(
    "checkpoint_conversion", _NO_LAYER, "compare_hf_ckpt", "inspect_checkpoint", "reshard_checkpoint", "to_huggingface", "to_maxtext",
  ),
  **_in(
    "checkpoint_conversion.standalone_scripts", _NO_LAYER, "convert_deepseek_family_ckpt", "convert_deepseek_family_unscanned_ckpt",
    "convert_gemma2_chkpt", "convert_gemma3_chkpt", "convert_gemma_chkpt", "convert_gpt3_ckpt_from_paxml", "convert_gpt_oss_ckpt",
    "convert_gpt_oss_unscanned_ckpt", "convert_qwen3_moe", "convert_qwen3_next_scanned", "convert_qwen3_next_unscanned",
    "deepseek_dequantize", "dequantize_mxfp4", "llama4_ckpt_unscanned", "llama_ckpt_conversion_inference_only",
    "llama_mistral_mixtral_orbax_to_hf", "llama_or_mistral_ckpt",
  ),
  **_in("checkpoint_conversion", Entry(refused=_OF_MAXTEXT), "load_and_quantize_checkpoint"),
  **_in("utils", Entry(refused=_OF_MAXTEXT), "layerwise_quantization"),
  **_in("utils", Entry(**_STEP, note=_COMPILES), "estimator"),
  **_in(
    "utils", _NO_LAYER, "generate_param_only_checkpoint", "get_flops", "mmap_index_builder", "muon_utils", "standalone_checkpointer",
    "standalone_dataloader",
  ),
}  # fmt: skip
KNOWN_MODULES = tuple(ENTRIES)


def has_train_loop(module: str) -> bool:
  """Whether a module trains with MaxText's own loop, which reports each step."""
  return module in ENTRIES and ENTRIES[module].metrics and not ENTRIES[module].note


def lines_at_start(module: str, options: "MoeTeOptions") -> list[str]:
  """What a user of a module is told before it starts.

  Args:
    module: its full name; of one that is not in the table nothing is known.
    options: the plugin's.

  Raises:
    RefusedError: the module does not run under the plugin, or not with these options.
  """
  entry = ENTRIES.get(module)
  if entry is None or not options.enabled or not (entry.layer or entry.refused):
    return []
  if entry.refused:
    raise RefusedError(
      found=f"{module} under the plugin: {entry.refused}",
      needed="MaxText's own layer",
      fix="write moe_te.enabled=false",
    )
  if options.transport == "nccl_ep" and not entry.group:
    raise RefusedError(
      found=f"moe_te.transport=nccl_ep with {module}, which makes no NCCL EP group",
      needed="an entry point that runs what it traces",
      fix="set moe_te.transport=auto",
    )
  lines = [f"{module.rpartition('.')[2]}: {entry.note}"] if entry.note and options.transport == "auto" else []
  if options.metrics and not entry.metrics:
    lines.append(f"no MoE metrics: {module.rpartition('.')[2]} has no train step that takes them")
  return lines
