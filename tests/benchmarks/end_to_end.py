"""MaxText end to end on GPUs: the plugin against MaxText's own paths, each in a process of its own, one after the other.

    python -m tests.benchmarks.end_to_end --run qwen3-6-layers --out tests/benchmarks/results/end-to-end-qwen3-h200.json

TFLOP/s/device and tokens/s are MaxText's own count; the median of the steps after warm-up. Peak memory is XLA's own peak of device 0.
A run that fails is recorded with its last line of output.
"""

import argparse
import contextlib
import dataclasses
import glob
import json
import os
import pathlib
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time

from tests.benchmarks import kernels, record

COMMON = dict(
  run_name="bench",
  enable_checkpointing="false",
  dataset_type="synthetic",
  dtype="bfloat16",
  hardware="gpu",
  attention="cudnn_flash_te",
  packing="false",
  log_config="false",
  enable_tensorboard="false",
  override_model_config="true",
  vocab_size=32000,
  max_target_length=4096,
  megablox="false",
  sparse_matmul="true",
  tokenizer_type="sentencepiece",
)
ONE_GPU = dict(skip_jax_distributed_system="true", ici_fsdp_parallelism=1)
SAVED = ["decoder_layer_input", "query_proj", "key_proj", "value_proj", "context", "out_proj"]
RUNS = {
  "qwen3-6-layers": dict(
    ranks=1,
    words=ONE_GPU | dict(model_name="qwen3-30b-a3b", base_num_decoder_layers=6, per_device_batch_size=4, remat_policy="full"),
  ),
  # The expert axis grows and each GPU keeps its 16 experts and its tokens.
  **{
    f"deepseek3-4-layers{'' if ranks == 2 else f'-{ranks}'}": dict(
      ranks=ranks,
      words=(ONE_GPU if ranks == 1 else dict(ici_expert_parallelism=ranks, ici_fsdp_parallelism=1))
      | dict(
        model_name="deepseek3-671b",
        base_num_decoder_layers=4,
        first_num_dense_layers=1,
        num_experts=16 * ranks,
        per_device_batch_size=2,
        remat_policy="full",
        n_routing_groups=-1,
        topk_routing_group=-1,
      ),
    )
    for ranks in (1, 2, 4, 8)
  },
  "qwen3-6-layers-fsdp-2": dict(
    ranks=2,
    words=dict(
      ici_fsdp_parallelism=2,
      model_name="qwen3-30b-a3b",
      base_num_decoder_layers=6,
      per_device_batch_size=4,
      remat_policy="full",
    ),
  ),
}
TUNED = dict(
  prefuse_moe_weights="true",
  param_scan_axis=0,
  remat_policy="custom",
  **dict.fromkeys([*SAVED, "moe_mlpwi_0", "moe_mlpwi_1"], "device"),
  moe_x_sorted="remat",
  moe_mlpwo="remat",
)
VARIANTS = {
  "tokamax": ("maxtext.trainers.pre_train.train", dict(use_tokamax_gmm="true")),
  "te": ("maxtext_moe_te.train", {}),
  # What a user with memory to spare sets: weights stored as they are computed with, and nothing recomputed but the sorted rows.
  "te-tuned": ("maxtext_moe_te.train", TUNED),
  "tokamax-tuned": ("maxtext.trainers.pre_train.train", TUNED | dict(use_tokamax_gmm="true")),
  # What a finite capacity's second program costs where no step overflows: the select, the flag and the loop that reads it.
  "te-tuned-exact": ("maxtext_moe_te.train", TUNED | {"moe_te.capacity_factor": 2.0, "moe_te.on_overflow": "exact"}),
  # With few layers, each of them can be compiled for itself: nothing is stacked.
  "te-tuned-unrolled": ("maxtext_moe_te.train", TUNED | dict(scan_layers="false")),
  "tokamax-tuned-unrolled": ("maxtext.trainers.pre_train.train", TUNED | dict(use_tokamax_gmm="true", scan_layers="false")),
  "te-cast-once": ("maxtext_moe_te.train", {"moe_te.cast_weights": "step"}),
  **{
    f"te-{profile}": ("maxtext_moe_te.train", {"moe_te.xla_profile": profile})
    for profile in ("multistream-domain", "multistream-aggressive")
  },
  "te-named-remat": ("maxtext_moe_te.train", dict(remat_policy="custom", **dict.fromkeys(SAVED, "device"))),
  "te-no-experts-remat": (
    "maxtext_moe_te.train",
    dict(
      remat_policy="custom",
      **dict.fromkeys([*SAVED, "moe_x_sorted", "moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo"], "device"),
    ),
  ),
  "te_moe_block": (
    "maxtext.trainers.pre_train.train",
    dict(te_moe_block="true", prefuse_moe_weights="true", te_gmm_quantization="te_no_quant", quantization="te_no_quant"),
  ),
}


def run(name: str, variant: str, steps: int, timeout: int, profile: bool, extra: list[str], keep: str | None = None) -> dict:
  """Runs one variant and returns its figures; what MaxText wrote stays in keep/variant."""
  module, more = VARIANTS[variant]
  spec = RUNS[name]
  words = COMMON | spec["words"] | more | dict(steps=steps) | dict(word.split("=", 1) for word in extra)
  if profile:
    os.environ["JAX_LOG_COMPILES"] = "1"
    words |= dict(profiler="xplane", skip_first_n_steps_for_profiler=steps - 3, profiler_steps=2)
  with contextlib.nullcontext(os.path.join(keep, variant)) if keep else tempfile.TemporaryDirectory() as folder:
    outputs, rows = run_ranks(module, words, spec["ranks"], pathlib.Path(folder), timeout)
    traced = kernels.of_trace(folder, steps=2) if profile and list(pathlib.Path(folder).rglob("perfetto*")) else None
  result = {"module": module, "words": [f"{key}={value}" for key, value in words.items()]}
  result |= {"exit_statuses": outputs.statuses} | ({"kernels": traced} if traced else {})
  if outputs.hung:
    result["did_not_exit"] = outputs.tail()
  if len(rows) < steps:
    return result | {"error": outputs.tail(700), "steps_done": len(rows)}
  if profile:
    _, _, late = outputs.texts[0].partition("completed step: 2,")
    result["compilations_after_step_2"] = re.findall(r"Finished XLA compilation of (\S+)", late)
  peak = re.findall(r"PEAK_BYTES (\d+)", outputs.texts[0])
  timed = rows[steps // 3 :]
  median = lambda key: statistics.median(row[key] for row in timed)
  return result | {
    "tflops_per_device": round(median("perf/per_device_tflops_per_sec"), 1),
    "tokens_per_s_per_device": round(median("perf/per_device_tokens_per_sec")),
    "step_ms": round(1e3 * median("perf/step_time_seconds"), 1),
    "peak_gib": round(int(peak[-1]) / 2**30, 2) if peak else None,
    "losses": [round(row["learning/loss"], 5) for row in rows],
  }


@dataclasses.dataclass(frozen=True)
class Outputs:
  """What the ranks of a run printed.

  Attributes:
    texts: of each rank.
    statuses: exit status of each rank, None for one that was killed because it did not end in time.
  """

  texts: list[str]
  statuses: list[int | None]

  @property
  def hung(self) -> bool:
    return None in self.statuses

  def tail(self, length: int = 1500) -> str:
    """The end of what was printed by the first rank that failed, or by rank 0."""
    failed = next((rank for rank, status in enumerate(self.statuses) if status != 0), 0)
    lines = [line for line in self.texts[failed].splitlines() if line.strip() and "frozen" not in line]
    return f"rank {failed}, exit status {self.statuses[failed]}: " + " | ".join(lines)[-length:]


def run_ranks(module: str, words: dict, ranks: int, folder: pathlib.Path, timeout: int, share_memory: bool = False, gpus_per_rank: int = 1):
  """Runs MaxText in one process per rank on this host.

  Args:
    module: what to run.
    words: its key=value arguments, but for where it writes.
    ranks: how many processes; where there are fewer GPUs they share them.
    folder: for what the runs write.
    timeout: seconds, after which all are killed.
    share_memory: let other runs use the same GPUs.
    gpus_per_rank: of a single process.

  Returns:
    (Outputs, rank 0's metrics by step)
  """
  shown = os.environ.get("CUDA_VISIBLE_DEVICES")
  gpus = shown.split(",") if shown else [str(index) for index in range(len(glob.glob("/dev/nvidia[0-9]*")))]
  base = pathlib.Path(maxtext_folder()) / "configs" / "base.yml"
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
  processes, logs = [], []
  for rank in range(ranks):
    environment = dict(os.environ)
    if share_memory:
      environment |= dict(XLA_PYTHON_CLIENT_PREALLOCATE="false")
    if ranks == 1:
      environment |= dict(CUDA_VISIBLE_DEVICES=",".join(gpus[:gpus_per_rank]))
    else:
      environment.pop("CUDA_VISIBLE_DEVICES", None)  # MaxText would take all of them in each rank
      environment |= dict(
        JAX_COORDINATOR_IP="127.0.0.1",
        JAX_COORDINATOR_PORT=str(port),
        NNODES=str(ranks),
        NODE_RANK=str(rank),
        SLURM_STEP_GPUS=gpus[rank % len(gpus)] if gpus else "0",  # MaxText reads the rank's device from here
      )
      if len(gpus) < ranks:
        environment |= dict(NCCL_MULTI_RANK_GPU_ENABLE="1")
    output = folder / str(rank)
    output.mkdir(parents=True)
    own = dict(base_output_directory=output, metrics_file=output / "metrics.jsonl")  # each rank writes its own
    command = [sys.executable, "-m", "tests.benchmarks.peak", module, str(base), *(f"{k}={v}" for k, v in (words | own).items())]
    logs.append(output / "log")
    with open(logs[-1], "w") as log:
      processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
  statuses, end = [], time.monotonic() + timeout
  for process in processes:
    try:
      statuses.append(process.wait(max(0.0, end - time.monotonic())))
    except subprocess.TimeoutExpired:
      process.kill()
      process.wait()
      statuses.append(None)
  metrics = folder / "0" / "metrics.jsonl"
  texts = [log.read_text(errors="replace") for log in logs]
  return Outputs(texts, statuses), [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []


def maxtext_folder():
  import importlib.util

  return importlib.util.find_spec("maxtext").submodule_search_locations[0]


def main(argv=None):
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--run", choices=RUNS, required=True)
  parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=["tokamax", "te", "te-named-remat"])
  parser.add_argument("--steps", type=int, default=15)
  parser.add_argument("--timeout", type=int, default=200, help="seconds for one variant")
  parser.add_argument("--out", help="JSON file for the results")
  parser.add_argument("--profile", action="store_true", help="profile two late steps of each variant (slows them)")
  parser.add_argument("--keep", metavar="FOLDER", help="a new folder, in which logs, metrics and profiles stay")
  parser.add_argument("words", nargs="*", help="further key=value words for every variant")
  args = parser.parse_args(argv)
  if args.keep and os.path.exists(args.keep):
    parser.error(f"--keep {args.keep} exists; needed: a new folder")
  results = {"run": args.run, "variants": {}}
  for variant in args.variants:
    figures = run(args.run, variant, args.steps, args.timeout, args.profile, args.words, args.keep)
    results["variants"][variant] = figures
    print(variant, json.dumps({k: v for k, v in figures.items() if k != "words"}), flush=True)
  if args.out:
    record.write(args.out, results)


if __name__ == "__main__":
  main()
