"""One record type for every measured number: the conditions travel with it."""

import datetime
import importlib.metadata
import json
import os
import pathlib
import shlex
import statistics
import subprocess
import sys
import time

PACKAGES = ("jax", "jaxlib", "transformer-engine", "maxtext", "tokamax", "maxtext-moe-te")
LIBRARIES = ("cublaslt_version", "nccl_version")


def conditions() -> dict:
  """GPU, versions of packages and of the libraries that are really loaded, flags, date and command."""
  import jax

  from maxtext_moe_te.moe import te_runtime

  libraries = {}
  for name in LIBRARIES:
    try:
      libraries[name.removesuffix("_version")] = getattr(te_runtime, name)()
    except Exception as error:  # a missing library is a condition too
      libraries[name.removesuffix("_version")] = str(error)
  device = jax.devices()[0]
  return {
    "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    "command": shlex.join(["python", *sys.orig_argv[1:]]),
    "device": device.device_kind,
    "devices": jax.device_count(),
    "compute_capability": getattr(device, "compute_capability", None),
    "driver": _driver(),
    "packages": {name: _version(name) for name in PACKAGES},
    "libraries": libraries,
    "xla_flags": os.environ.get("XLA_FLAGS", ""),
  }


def _version(name):
  try:
    return importlib.metadata.version(name)
  except importlib.metadata.PackageNotFoundError:
    return None


def _driver():
  try:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[0]
  except (OSError, subprocess.CalledProcessError):
    return None


def time_ms(call, *arguments, warmup: int = 3, repeats: int = 20) -> dict:
  """Milliseconds of `call(*arguments)`, host clock around block_until_ready: minimum, median, maximum."""
  import jax

  for _ in range(warmup):
    jax.block_until_ready(call(*arguments))
  samples = []
  for _ in range(repeats):
    start = time.perf_counter()
    jax.block_until_ready(call(*arguments))
    samples.append(1e3 * (time.perf_counter() - start))
  return {
    "min_ms": round(min(samples), 3),
    "median_ms": round(statistics.median(samples), 3),
    "max_ms": round(max(samples), 3),
    "repeats": repeats,
  }


def write(path, results: dict) -> None:
  """Writes results with the conditions beside them."""
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps({"conditions": conditions(), **results}, indent=2) + "\n")
