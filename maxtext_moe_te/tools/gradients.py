"""The gradients of a run's model, made small, with offload and without it: bit for bit the same, or offload is wrong here.

`check` starts a process of its own on this machine's devices. Heads and experts stay the model's; width, depth, vocabulary and sequence
are cut, and all devices are put on the axis fsdp. On a CPU the two programs are the same, so only a GPU's answer proves something.

What lies in host memory is read by the backward pass alone. So the first step's loss must be the same without offload: where it is not,
XLA rounds the forward pass of the two programs in other places, and comparing bits says nothing. With fused attention it does that at this
size (XLA 0.12.0.1 for an H200 then fuses the norm and the rotation of the queries otherwise), so attention is plain here.
"""

import json
import os
import re
import subprocess
import sys
import tempfile

from maxtext_moe_te.errors import MoeTeError
from maxtext_moe_te.tools import deep
from maxtext_moe_te.tools.doctor.checks import ERROR, WARNING, Finding

STEPS = 2
LAYERS = 12  # whole periods of every model's pattern, and scans longer than 1
REDUCED = dict(
  override_model_config="true", base_emb_dim=512, base_mlp_dim=256, base_moe_mlp_dim=256, vocab_size=1024, max_target_length=512,
  per_device_batch_size=1, attention="dot_product", use_iota_embed="true",  # a lookup's gradient adds up in no fixed order
)  # fmt: skip
# Without Triton's products: without autotuning XLA has no configuration for them that it calls deterministic.
DETERMINISTIC = {"xla_gpu_autotune_level": 0, "xla_gpu_exclude_nondeterministic_ops": True, "xla_gpu_enable_triton_gemm": False}


def check(request: deep.Request, *, timeout_s: int = 600) -> tuple[dict | None, list[Finding]]:
  """(result, findings) on this machine's devices; the result is None where the process failed."""
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
    return None, [Finding(severity=ERROR, **result["refused"], source=source)]
  return result, findings(result, source)


def findings(result: dict, source: str) -> list[Finding]:
  """What is wrong with a result of `main`."""
  names = ", ".join(result["names"])
  with_offload, without = result["first_losses"]
  if with_offload != without:
    return [
      Finding(
        severity=WARNING,
        found=f"the first loss is {with_offload} with offload of {names} and {without} without: XLA rounds the forward pass otherwise",
        needed="the same forward pass, to compare gradients bit for bit",
        fix="watch the loss of the first steps with moe_te.offload and without it",
        source=source,
      )
    ]
  if not result["differ"]:
    return []
  return [
    Finding(
      severity=ERROR,
      found=f"offload of {names} changes gradients: {', '.join(result['differ'][:3])}",
      needed="the same bits as without it",
      fix="remove moe_te.offload",
      source=source,
    )
  ]


def differing(ours: dict, theirs: dict) -> list[str]:
  """Names of the arrays whose bits differ. One of zeros, or with a NaN, would prove nothing: it is named too, and why."""
  import numpy as np

  assert ours.keys() == theirs.keys() and ours
  found = []
  for name in ours:
    if not np.isfinite(ours[name]).all():
      found.append(f"{name} (not finite)")
    elif ours[name].shape != theirs[name].shape or not np.array_equal(ours[name].view(np.uint8), theirs[name].view(np.uint8)):
      found.append(name)
    elif not ours[name].any():
      found.append(f"{name} (all zero)")
  return found


def main() -> dict:
  """The checking process: a request from standard input, {names, arrays, first_losses, differ, host_bytes, platform} after the
  word RESULT.

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
    results, first_losses = [], []
    for offload in (names, ()):
      more = [] if offload else ["remat_policy=custom", *(f"{name}=device" for name in names)]
      of_variant = options.replace_from({"offload": list(offload)}, "here")
      step = steps.build([*words, *more], overlay=overlay, options=of_variant, keep_gradients=True)
      compiled = step.compile(DETERMINISTIC if gpu else {})
      state, gradients = step.initialize(), []
      for i in range(STEPS):
        with step.context():
          state, metrics = compiled(state, step.random_batch(i))
        gradients.append(steps.gradients(state))
        first_losses += [float(metrics["scalar"]["learning/loss"])] if i == 0 else []
      results.append((gradients, compiled.memory_analysis().host_temp_size_in_bytes))
  (ours, host_bytes), (theirs, _) = results
  differ = [f"step {i}: {name}" for i in range(STEPS) for name in differing(ours[i], theirs[i])]
  found = {"names": names, "arrays": len(ours[0]), "first_losses": first_losses, "differ": differ}
  return found | {"host_bytes": host_bytes, "platform": jax.default_backend()}


if __name__ == "__main__":
  try:
    answer = main()
  except MoeTeError as error:
    answer = {"refused": {"found": error.found, "needed": error.needed, "fix": error.fix}}
  print("RESULT", json.dumps(answer), flush=True)
