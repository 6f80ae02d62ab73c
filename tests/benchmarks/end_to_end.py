"""MaxText end to end on GPUs: the plugin against MaxText's own paths, each in a process of its own, one after the other.

    python -m tests.benchmarks.end_to_end --run qwen3-6-layers --out tests/benchmarks/results/end-to-end-qwen3-h200.json

TFLOP/s/device and tokens/s are MaxText's own count; the median of the steps after warm-up. Peak memory is XLA's own peak of device 0.
A run that fails is recorded with its last line of output.
"""

import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

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
EXPERT2 = dict(ici_expert_parallelism=2, ici_fsdp_parallelism=1)
SAVED = ["decoder_layer_input", "query_proj", "key_proj", "value_proj", "context", "out_proj"]
RUNS = {
    "qwen3-6-layers": dict(
        ranks=1,
        words=ONE_GPU
        | dict(model_name="qwen3-30b-a3b", base_num_decoder_layers=6, per_device_batch_size=4, remat_policy="full"),
    ),
    "deepseek3-4-layers": dict(
        ranks=2,
        words=EXPERT2
        | dict(
            model_name="deepseek3-671b",
            base_num_decoder_layers=4,
            first_num_dense_layers=1,
            num_experts=32,
            per_device_batch_size=2,
            remat_policy="full",
            n_routing_groups=-1,
            topk_routing_group=-1,
        ),
    ),
}
VARIANTS = {
    "tokamax": ("maxtext.trainers.pre_train.train", dict(use_tokamax_gmm="true")),
    "te": ("maxtext_moe_te.train", {}),
    "te-prefused": ("maxtext_moe_te.train", dict(prefuse_moe_weights="true")),
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


def run(name: str, variant: str, steps: int, timeout: int, profile: bool, extra: list[str]) -> dict:
  """Runs one variant and returns its figures."""
  module, more = VARIANTS[variant]
  spec = RUNS[name]
  base = pathlib.Path(_maxtext_folder()) / "configs" / "base.yml"
  with tempfile.TemporaryDirectory() as folder:
    metrics = pathlib.Path(folder) / "metrics.jsonl"
    words = COMMON | spec["words"] | more | dict(steps=steps, base_output_directory=folder, metrics_file=metrics)
    if profile:
      words |= dict(profiler="xplane", skip_first_n_steps_for_profiler=steps - 3, profiler_steps=2)
    words = [str(base), *(f"{key}={value}" for key, value in words.items()), *extra]
    command = [sys.executable, "-m", "tests.benchmarks.peak", module, *words]
    outputs = _run_ranks(command, spec["ranks"], timeout)
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    traced = kernels.of_trace(folder, steps=2) if profile and list(pathlib.Path(folder).rglob("perfetto*")) else None
  told = [word for word in words[1:] if not word.startswith(("metrics_file=", "base_output_directory="))]
  result = {"module": module, "words": told} | ({"kernels": traced} if traced else {})
  peak = re.findall(r"PEAK_BYTES (\d+)", outputs[0])
  if any("killed after" in output for output in outputs):
    result["did_not_exit"] = [output[-1500:] for output in outputs]
  if len(rows) < steps:
    lines = [line for line in outputs[0].splitlines() if line.strip() and "frozen" not in line]
    return result | {"error": " | ".join(lines[-3:])[-700:], "steps_done": len(rows)}
  timed = rows[steps // 3 :]
  median = lambda key: statistics.median(row[key] for row in timed)
  return result | {
      "tflops_per_device": round(median("perf/per_device_tflops_per_sec"), 1),
      "tokens_per_s_per_device": round(median("perf/per_device_tokens_per_sec")),
      "step_ms": round(1e3 * median("perf/step_time_seconds"), 1),
      "peak_gib": round(int(peak[-1]) / 2**30, 2) if peak else None,
      "losses": [round(row["learning/loss"], 5) for row in rows],
  }


def _run_ranks(command, ranks, timeout):
  environment = dict(os.environ)
  processes = []
  for rank in range(ranks):
    if ranks > 1:
      environment |= dict(
          JAX_COORDINATOR_IP="127.0.0.1",
          JAX_COORDINATOR_PORT="34781",
          NNODES=str(ranks),
          NODE_RANK=str(rank),
          SLURM_STEP_GPUS=str(rank),  # MaxText reads the rank's device from here
      )
    processes.append(
        subprocess.Popen(command, env=dict(environment), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    )
  outputs = []
  for process in processes:
    try:
      outputs.append(process.communicate(timeout=timeout)[0])
    except subprocess.TimeoutExpired:
      process.kill()
      outputs.append(process.communicate()[0] + f"\nkilled after {timeout} s")
  return outputs


def _maxtext_folder():
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
  parser.add_argument("words", nargs="*", help="further key=value words for every variant")
  args = parser.parse_args(argv)
  results = {"run": args.run, "variants": {}}
  for variant in args.variants:
    figures = run(args.run, variant, args.steps, args.timeout, args.profile, args.words)
    results["variants"][variant] = figures
    print(variant, json.dumps({k: v for k, v in figures.items() if k != "words"}), flush=True)
  if args.out:
    record.write(args.out, results)


if __name__ == "__main__":
  main()
