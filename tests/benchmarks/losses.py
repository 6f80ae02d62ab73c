"""MaxText trains 20 steps of small models on the GPUs of one host: the losses of each part and mesh beside those of MaxText's own layer.

    python -m tests.benchmarks.losses --models deepseek3 --runs plain te-mesh … --out tests/benchmarks/results/losses-deepseek3-h200x2.json

All runs start together, so that their start-up overlaps; ranks share GPUs where there are more of them, and are then slow. What the
losses must be is in `tests.gpu.test_training`, which trains the same.
"""

import argparse
import concurrent.futures
import json
import pathlib
import tempfile

import numpy as np

from tests.benchmarks import end_to_end, record

STEPS = 20
MODELS = {
  "deepseek3": dict(
    model_name="deepseek3-tiny", first_num_dense_layers=1, q_lora_rank=64, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=32,
    v_head_dim=32, max_position_embeddings=256, original_max_position_embeddings=256, n_routing_groups=4, topk_routing_group=2,
    routed_bias_update_rate=0.001,
  ),
  "qwen3": dict(model_name="qwen3-30b-a3b"),
  "mixtral": dict(model_name="mixtral-8x7b"),
}  # fmt: skip
REDUCED = dict(
  attention="dot_product", base_emb_dim=256, base_mlp_dim=256, base_moe_mlp_dim=256, base_num_query_heads=8, base_num_kv_heads=8,
  head_dim=32, base_num_decoder_layers=3, num_experts=16, num_experts_per_tok=4, vocab_size=512, max_target_length=256,
  learning_rate=1e-3, warmup_steps_fraction=0.1, scan_layers="true",
)  # fmt: skip
BATCH = 8  # sequences, over all ranks
PLAIN, PLUGIN = "maxtext.trainers.pre_train.train", "maxtext_moe_te.train"
TE, NCCL_EP = {"moe_te.experts": "te"}, {"moe_te.experts": "te", "moe_te.transport": "nccl_ep"}


def mesh(expert=1, fsdp=1, **more):
  batch = BATCH // (expert * fsdp)
  return dict(ici_expert_parallelism=expert, ici_fsdp_parallelism=fsdp, per_device_batch_size=batch, **more)


ALONE = dict(skip_jax_distributed_system="true")
RUNS = {
  # name: what runs, in how many processes with how many GPUs each, words
  "plain": (PLAIN, 1, 1, mesh(**ALONE)),
  "plain-float32": (PLAIN, 1, 1, mesh(**ALONE) | dict(dtype="float32", matmul_precision="highest")),
  "te": (PLUGIN, 1, 1, mesh(**ALONE) | TE),
  "te-mesh": (PLUGIN, 2, 1, mesh(expert=2) | NCCL_EP),
  "te-mesh-chunks": (PLUGIN, 2, 1, mesh(expert=2) | NCCL_EP | {"moe_te.chunks": 4}),
  "te-mesh-exact": (PLUGIN, 2, 1, mesh(expert=2) | NCCL_EP | {"moe_te.capacity_factor": 1.0, "moe_te.on_overflow": "exact"}),
  "te-mesh-fsdp": (PLUGIN, 4, 1, mesh(expert=2, fsdp=2) | NCCL_EP),
  "te-one-process-fsdp": (PLUGIN, 1, 2, mesh(fsdp=2, **ALONE) | TE),
  "te-one-process-xla": (PLUGIN, 1, 2, mesh(expert=2, **ALONE) | TE | {"moe_te.transport": "xla"}),
  "te-one-process": (PLUGIN, 1, 2, mesh(expert=2, **ALONE) | NCCL_EP),
}
SEVERAL_GPUS = tuple(run for run, (_, ranks, gpus, _) in RUNS.items() if ranks > 2 or gpus > 1)  # the others do with one


def train(keys, folder: pathlib.Path, timeout: int = 280) -> dict[tuple[str, str], list[float] | str]:
  """(model, run) -> its losses, or what was printed if it did not end well; all of `keys` at once."""

  def one(key):
    model, run = key
    module, ranks, gpus, more = RUNS[run]
    words = end_to_end.COMMON | MODELS[model] | REDUCED | more | dict(steps=STEPS)
    outputs, rows = end_to_end.run_ranks(module, words, ranks, folder / f"{model}-{run}", timeout, share_memory=True, gpus_per_rank=gpus)
    if len(rows) < STEPS or outputs.statuses != [0] * ranks:
      return outputs.tail()
    if more.get("moe_te.on_overflow") and not any(row["moe_te/replayed"] for row in rows):
      return "no step overflowed"
    return [row["learning/loss"] for row in rows]

  with concurrent.futures.ThreadPoolExecutor(len(keys)) as pool:
    return dict(zip(keys, pool.map(one, keys)))


def main(argv=None):
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
  parser.add_argument("--runs", nargs="+", choices=RUNS, default=[run for run in RUNS if run not in SEVERAL_GPUS])
  parser.add_argument("--timeout", type=int, default=280, help="seconds for all runs")
  parser.add_argument("--out", help="JSON file for the results")
  args = parser.parse_args(argv)
  keys = [(model, run) for model in args.models for run in args.runs]
  with tempfile.TemporaryDirectory() as folder:
    losses = train(keys, pathlib.Path(folder), args.timeout)
  results = {"steps": STEPS, "runs": {run: RUNS[run] for run in args.runs}, "losses": {}, "furthest_from_plain": {}}
  for (model, run), found in losses.items():
    results["losses"].setdefault(model, {})[run] = found
    plain = losses.get((model, "plain"))
    if isinstance(found, list) and isinstance(plain, list):
      furthest = np.max(np.abs(np.subtract(found, plain)) / np.abs(plain))  # NaN stays one
      results["furthest_from_plain"].setdefault(model, {})[run] = float(f"{furthest:.2e}")
    print(model, run, json.dumps(found if isinstance(found, str) else [found[0], found[-1]]), flush=True)
  print(json.dumps(results["furthest_from_plain"]), flush=True)
  if args.out:
    record.write(args.out, results)


if __name__ == "__main__":
  main()
