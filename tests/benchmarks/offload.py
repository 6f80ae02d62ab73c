"""Q and V in host memory against Q and V on the device, on one GPU: same gradients bit for bit, less device memory, what it costs.

    python -m tests.benchmarks.offload --out tests/benchmarks/results/offload-qwen3-h200.json

Qwen3-30B-A3B at its own depth and widths with two experts and a small vocabulary, MaxText's own train step, random tokens. The
optimizer's state is extended by the gradients of the step, which are compared on the host after each of `--steps` steps; the first
variant runs them twice, so that a difference between variants cannot be mistaken for one between runs. Both variants are compiled
alike: without autotuning (which would choose by time) and with deterministic kernels.
"""

import argparse
import json
import pathlib
import statistics
import sys
import tempfile
import time

import jax

from maxtext_moe_te.host import step as steps
from maxtext_moe_te.settings.config import MoeTeOptions
from maxtext_moe_te.tools import gradients
from tests.benchmarks import end_to_end, record

WORDS = (
  end_to_end.COMMON
  | end_to_end.ONE_GPU
  | dict(
    model_name="qwen3-30b-a3b",
    num_experts=2,
    num_experts_per_tok=2,
    vocab_size=8192,
    weight_dtype="float32",
    use_iota_embed="true",  # its gradient is a product; that of a lookup adds up in no fixed order
    run_name="offload",
  )
)
NAMES = ("query_proj", "value_proj")
MEMORY_TOLERANCE = 0.05


def words_of(args, variant: str, folder: str) -> list[str]:
  """MaxText's arguments. Without offload the same tensors are kept on the device, so that both compute the same."""
  words = WORDS | dict(
    base_num_decoder_layers=args.layers, per_device_batch_size=args.batch, attention=args.attention, base_output_directory=folder
  )
  if variant == "device":
    words |= dict(remat_policy="custom", **dict.fromkeys(NAMES, "device"))
  base = pathlib.Path(end_to_end.maxtext_folder()) / "configs" / "base.yml"
  return [str(base), *(f"{key}={value}" for key, value in words.items()), *args.words]


def run(variant: str, args, reference: list[dict] | None) -> tuple[dict, list[dict]]:
  """(figures of one variant, the gradients to hold others against); `reference` are those of the other variant, None at first."""
  options = MoeTeOptions(offload=NAMES if variant == "offload" else (), experts=args.experts)
  with tempfile.TemporaryDirectory() as folder:
    step = steps.build(words_of(args, variant, folder), options=options, keep_gradients=True)
  start = time.perf_counter()
  compiled = step.compile((gradients.DETERMINISTIC if args.deterministic else {}) | {"xla_gpu_autotune_level": args.autotune_level})
  figures = {"compile_s": round(time.perf_counter() - start, 1)} | memory_of(compiled)
  figures["expected_host_bytes"] = step.bytes_of(NAMES)
  if reference is None:
    reference = []
    figures["losses"], _ = trained(variant, args, step, compiled, lambda i, found: reference.append(found) or [])
    figures["gradient_arrays"] = len(reference[0])
  wrong = lambda i, found: [*gradients.differing(found, reference[i]), *gradients.proving_nothing(reference[i])]
  compare = lambda i, found: [f"step {i}: {name}" for name in wrong(i, found)]
  losses, figures["gradients_that_differ"] = trained(variant, args, step, compiled, compare)
  figures.setdefault("losses", losses)
  figures["step_ms"] = timed(args, step, compiled)
  figures["allocator_peak_bytes"] = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
  return figures, reference


def trained(variant, args, step, compiled, after) -> tuple[list[float], list[str]]:
  """(losses, what `after` found) of `--steps` steps from MaxText's own initial state."""
  state, losses, found = step.initialize(), [], []
  for i in range(args.steps):
    with step.context():
      state, metrics = compiled(state, step.random_batch(i))
    losses.append(float(metrics["scalar"]["learning/loss"]))
    found += after(i, steps.gradients(state))
    print(variant, "step", i, "loss", losses[-1], flush=True)
  return losses, found


def timed(args, step, compiled) -> dict:
  """Milliseconds of a step."""
  state, times_ms, batch = step.initialize(), [], step.random_batch(0)
  for _ in range(2 + args.timed_steps):
    start = time.perf_counter()
    with step.context():
      state, _ = compiled(state, batch)
    jax.block_until_ready(state)
    times_ms.append(1e3 * (time.perf_counter() - start))
  times_ms = times_ms[2:]
  return dict(min=round(min(times_ms), 2), median=round(statistics.median(times_ms), 2), max=round(max(times_ms), 2), steps=len(times_ms))


def memory_of(compiled) -> dict:
  """Bytes that the compiled program needs: temporaries on the device, its peak there, temporaries in host memory."""
  memory = compiled.memory_analysis()
  return {
    "device_temporary_bytes": memory.temp_size_in_bytes,
    "device_peak_bytes": memory.peak_memory_in_bytes,
    "host_bytes": memory.host_temp_size_in_bytes,
  }


def verdict(results: dict) -> list[str]:
  """What is not as it must be."""
  offload, device = results["variants"]["offload"], results["variants"]["device"]
  expected = offload["expected_host_bytes"]
  wrong = []
  if offload["gradients_that_differ"]:
    wrong.append(f"the step does not repeat itself: {offload['gradients_that_differ'][:3]}")
  if device["gradients_that_differ"]:
    wrong.append(f"gradients differ: {device['gradients_that_differ'][:3]}")
  if device["host_bytes"] or abs(offload["host_bytes"] / expected - 1) > 0.01:
    wrong.append(f"host bytes {offload['host_bytes']} with and {device['host_bytes']} without offload, expected {expected} and 0")
  if abs(results["device_bytes_saved"] / expected - 1) > MEMORY_TOLERANCE:
    wrong.append(f"device memory fell by {results['device_bytes_saved']} bytes, expected {expected}")
  return wrong


def main(argv=None) -> int:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--attention", default="cudnn_flash_jax")
  parser.add_argument("--experts", default="auto", help="moe_te.experts")
  parser.add_argument("--layers", type=int, default=48)
  parser.add_argument("--batch", type=int, default=8, help="sequences; few tokens, and the optimizer's temporaries are the peak")
  parser.add_argument("--steps", type=int, default=5, help="steps whose gradients are compared")
  parser.add_argument("--timed-steps", type=int, default=6)
  parser.add_argument("--autotune-level", type=int, default=0)
  parser.add_argument("--deterministic", action=argparse.BooleanOptionalAction, default=True)
  parser.add_argument("--out", help="JSON file for the results")
  parser.add_argument("words", nargs="*", help="further key=value words for both variants")
  args = parser.parse_args(argv)
  # Offload first: the allocator's peak never falls.
  results, reference = {"names": NAMES, "words": words_of(args, "offload", "")[1:], "variants": {}}, None
  for variant in ("offload", "device"):
    results["variants"][variant], reference = run(variant, args, reference)
    print(variant, json.dumps(results["variants"][variant]), flush=True)
  offload, device = results["variants"]["offload"], results["variants"]["device"]
  results["device_bytes_saved"] = device["device_temporary_bytes"] - offload["device_temporary_bytes"]
  results["saved_over_expected"] = round(results["device_bytes_saved"] / offload["expected_host_bytes"], 4)
  results["step_time_with_over_without"] = round(offload["step_ms"]["median"] / device["step_ms"]["median"], 4)
  results["wrong"] = verdict(results)
  if args.out:
    record.write(args.out, results)
  for line in results["wrong"]:
    print("WRONG:", line)
  return 1 if results["wrong"] else 0


if __name__ == "__main__":
  sys.exit(main())
