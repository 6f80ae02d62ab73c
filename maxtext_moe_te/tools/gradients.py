"""The gradients of a run's model, made small, with offload and without it: bit for bit the same, or offload is wrong here.

`check` starts a process of its own on this machine's devices. Heads and experts stay the model's; width, depth, vocabulary and sequence
are cut, and all devices are put on the axis fsdp. On a CPU the two programs are the same, so only a GPU's answer proves something.

What lies in host memory is read by the backward pass alone, so the first step's loss must be the same with offload and without. Where it is
not, XLA rounds the forward pass of the two programs in other places, and all gradients differ by as much as rounding makes them. With fused
attention it does that at this size (XLA 0.12.0.1 for an H200 fuses the norm and the rotation of the queries otherwise: losses 1.9e-5 apart,
gradients up to 2.4e-2), so attention is plain here, unless a tensor is offloaded that only fused attention has.
"""

import json
import math
import os
import re
import subprocess
import sys
import tempfile

from maxtext_moe_te.errors import MoeTeError, in_one_line
from maxtext_moe_te.tools import deep
from maxtext_moe_te.tools.doctor.checks import ERROR, WARNING, Finding

STEPS = 2
LAYERS = 12  # whole periods of every model's pattern, and scans longer than 1
REDUCED = dict(
  override_model_config="true", base_emb_dim=512, vocab_size=1024, max_target_length=512, per_device_batch_size=1,
  base_mlp_dim=256, base_moe_mlp_dim=256,  # equal, as MaxText wants them where every layer is an MoE layer
  use_iota_embed="true",  # a lookup's gradient adds up in no fixed order
)  # fmt: skip
PLAIN_ATTENTION = "dot_product"
OF_FUSED_ATTENTION = "context"  # a named tensor
# Without Triton's products: without autotuning XLA has no configuration for them that it calls deterministic.
DETERMINISTIC = {"xla_gpu_autotune_level": 0, "xla_gpu_exclude_nondeterministic_ops": True, "xla_gpu_enable_triton_gemm": False}
# Relative. More than bfloat16's rounding explains (above); layers read back in the wrong order are off by about 1.
ROUNDING_OF_LOSS, ROUNDING_OF_GRADIENTS = 1e-3, 0.1


def check(request: deep.Request, *, timeout_s: int = 600) -> tuple[dict | None, list[Finding]]:
  """(result, findings) on this machine's devices; the result is None where the process failed or the reduced run is refused."""
  import dataclasses

  environment = dict(os.environ, XLA_FLAGS="", DECOUPLE_GCLOUD="TRUE")
  command = [sys.executable, "-m", "maxtext_moe_te.tools.gradients"]
  source = "the reduced model on this machine"
  try:
    done = subprocess.run(
      command, input=json.dumps(dataclasses.asdict(request)), env=environment, capture_output=True, text=True, timeout=timeout_s
    )
    output, failure = done.stdout, f"ended with status {done.returncode}: {' | '.join(done.stderr.splitlines()[-3:])[-400:]}"
  except subprocess.TimeoutExpired:
    output, failure = "", f"had not ended after {timeout_s} s"
  if "RESULT" not in output:
    found = f"the gradient check of offload {failure}"
    return None, [Finding(severity=ERROR, found=found, needed="a check that ends", fix="remove moe_te.offload", source=source)]
  result = json.loads(output.split("RESULT", 1)[1])
  if "refused" in result:
    refused = result["refused"]
    refused["found"] = f"gradients with offload were not compared: {refused['found']}"
    return None, [Finding(severity=WARNING, **refused, source=source)]
  return result, findings(result, source)


def findings(result: dict, source: str) -> list[Finding]:
  """What is wrong with a result of `main`."""
  names, differ = ", ".join(result["names"]), result["differ"]
  first, first_without = result["losses"][0][0], result["losses"][1][0]
  far = lambda name: math.inf if differ[name] is None else differ[name]
  worst = sorted(differ, key=far, reverse=True)[:3]
  furthest = far(worst[0]) if worst else 0.0
  losses_close = None not in (first, first_without) and abs(first - first_without) <= ROUNDING_OF_LOSS * abs(first_without)
  make = lambda severity, found, needed, fix: Finding(severity=severity, found=found, needed=needed, fix=fix, source=source)
  found = []
  if differ and first != first_without and losses_close and furthest <= ROUNDING_OF_GRADIENTS:
    found.append(
      make(
        WARNING,
        f"XLA rounds the forward pass with offload of {names} otherwise: the first loss is {first} instead of {first_without}, gradients "
        f"are up to {furthest:.1e} apart",
        "the same forward pass, to compare gradients bit for bit",
        "watch the loss of the first steps with moe_te.offload and without it",
      )
    )
  elif differ:
    found.append(
      make(
        ERROR,
        f"offload of {names} changes gradients, by up to {furthest:.1e}: {', '.join(worst)}",
        "the same bits as without it",
        "remove moe_te.offload",
      )
    )
  if result["nothing"]:
    found.append(
      make(
        WARNING,
        f"gradients that are zero or not finite without offload too prove nothing: {', '.join(result['nothing'][:3])}",
        "gradients that can be compared",
        "look at the loss of the first steps with moe_te.offload and without it",
      )
    )
  return found


def differing(ours: dict, theirs: dict) -> dict[str, float | None]:
  """How far apart arrays are whose bits differ, by name.

  Args:
    ours, theirs: arrays by name. Those of `theirs` that are not finite are left out.

  Returns:
    dict: the norm of the difference over that of `theirs`, None where that is not finite.
  """
  import numpy as np

  assert ours.keys() == theirs.keys() and ours
  found = {}
  for name in ours:
    one, other = ours[name], theirs[name]
    if np.isfinite(other).all() and not np.array_equal(one.view(np.uint8), other.view(np.uint8)):
      with np.errstate(all="ignore"):
        found[name] = _finite(np.linalg.norm(np.float32(one) - np.float32(other)) / np.linalg.norm(np.float32(other)))
  return found


def _finite(value) -> float | None:
  """JSON has no NaN and no infinity."""
  return float(value) if math.isfinite(value) else None


def proving_nothing(gradients: dict) -> list[str]:
  """Names of the arrays that are zero everywhere or not finite somewhere: that two of them are equal says nothing."""
  import numpy as np

  return [name for name, array in gradients.items() if not np.isfinite(array).all() or not array.any()]


def main() -> dict:
  """The checking process: a request from standard input, its answer after the word RESULT.

  Returns:
    dict: names, what is offloaded; attention; arrays, how many a step has; losses, of each step with and without offload, None for one
      that is not finite; differ, how far apart, by step and array, see `differing`; nothing, see `proving_nothing`; host_bytes; platform.

  Raises:
    MoeTeError: what refuses the reduced run.
  """
  request = deep.Request(**json.load(sys.stdin))
  import jax
  from maxtext.configs import types

  from maxtext_moe_te.host import step as steps
  from maxtext_moe_te.settings import overlay as overlays
  from maxtext_moe_te.settings.config import MoeTeOptions

  overlay = overlays.load(request.overlay) if request.overlay else None
  options = MoeTeOptions.from_mapping(overlay.moe_te, request.overlay) if overlay else MoeTeOptions()
  options = options.replace_from(request.options, "the command line").replace_from({"xla_profile": "", "transport": "auto"}, "here")
  names = tuple(options.offload or deep.OFFLOAD)
  gpu = jax.default_backend() == "gpu"
  with tempfile.TemporaryDirectory() as folder:
    words = [*request.words, *deep.STANDING, f"base_output_directory={folder}", *(f"{key}={value}" for key, value in REDUCED.items())]
    words += [f"{key}=1" for key in types.MaxTextConfig.model_fields if re.fullmatch("(ici|dcn)_[a-z_]+_parallelism", key)]
    words += ["ici_fsdp_parallelism=-1", f"base_num_decoder_layers={request.layers or LAYERS}"]
    words += [] if gpu else ["hardware=cpu"]
    words += [] if gpu and OF_FUSED_ATTENTION in names else [f"attention={PLAIN_ATTENTION}"]
    results = []
    for offload in (names, ()):
      more = [] if offload else ["remat_policy=custom", *(f"{name}=device" for name in names)]
      of_variant = options.replace_from({"offload": list(offload)}, "here")
      step = steps.build([*words, *more], overlay=overlay, options=of_variant, keep_gradients=True)
      compiled = step.compile(DETERMINISTIC if gpu else {})
      state, losses, gradients = step.initialize(), [], {}
      for i in range(STEPS):
        with step.context():
          state, metrics = compiled(state, step.random_batch(i))
        losses.append(_finite(metrics["scalar"]["learning/loss"]))
        gradients |= {f"step {i}: {name}": array for name, array in steps.gradients(state).items()}
      results.append((losses, gradients, compiled.memory_analysis().host_temp_size_in_bytes))
  (losses, ours, host_bytes), (losses_without, theirs, _) = results
  return {
    "names": names,
    "attention": str(step.config.attention),
    "arrays": len(ours) // STEPS,
    "losses": [losses, losses_without],
    "differ": differing(ours, theirs),
    "nothing": proving_nothing(theirs),
    "host_bytes": host_bytes,
    "platform": jax.default_backend(),
  }


if __name__ == "__main__":
  try:
    with in_one_line():
      answer = main()
  except MoeTeError as error:
    answer = {"refused": error.fields}
  print("RESULT", json.dumps(answer), flush=True)
