"""A user's train step, compiled for GPUs that need not be there: where offloaded bytes go, which collectives overlap.

`compile_step` starts a process of its own: the descriptions of GPUs, the stand-in for the driver and XLA's dumps are nothing that
a process with a future should have. Depth costs no compilation where layers are scanned, so the model is taken whole; unscanned
ones are cut to `UNSCANNED_LAYERS`.
"""

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

from maxtext_moe_te.errors import MoeTeError, OptionError, RefusedError, in_one_line
from maxtext_moe_te.moe import te_api
from maxtext_moe_te.settings import xla_flags
from maxtext_moe_te.tools import described, streams
from maxtext_moe_te.tools.doctor import rows
from maxtext_moe_te.tools.doctor.checks import ERROR, NOTE, WARNING, Finding

OFFLOAD = ("query_proj", "value_proj")
PROFILES = ("multistream-domain", "multistream-aggressive")
UNSCANNED_LAYERS = 4
HOST_BYTES_TOLERANCE = 0.01
# What a compilation must not ask of a run: data, checkpoints, other processes. Last words win.
STANDING = (
  "run_name=deep", "enable_checkpointing=false", "dataset_type=synthetic", "skip_jax_distributed_system=true", "log_config=false",
  "enable_tensorboard=false", "enable_goodput_recording=false", "monitor_goodput=false",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """What to compile.

  Args:
    words: MaxText's arguments, the run's YAML first.
    overlay: as after overlay=, or "".
    options: the plugin's options.
    gpu: a part of XLA's description of a GPU, such as H200.
    topology: NVLink domains x processes per domain x GPUs per process.
    profiles: named sets of XLA flags to compare.
    layers: of the reduced model of `tools.gradients`; 0 for its own choice.
    stand_ins: what is compiled in place of what Transformer Engine would do, and why, see `without_engine`.
  """

  words: tuple[str, ...]
  overlay: str = ""
  options: dict = dataclasses.field(default_factory=dict)
  gpu: str = "H200"
  topology: str = "1x8x1"
  profiles: tuple[str, ...] = PROFILES
  layers: int = 0
  stand_ins: str = ""


def without_engine(request: Request, config: dict, options: dict) -> Request:
  """The request with something else in place of the parts that the Transformer Engine here cannot be compiled with.

  Args:
    request: as the user has it.
    config: MaxText's resolved keys.
    options: all of the plugin's, those of the overlay among them.
  """
  engine, ranks = te_api.find(), config.get("axis_sizes", {}).get("expert", 1)
  recipe = "mxfp8" if options["recipe"] == "mxfp8" else "experts"
  ours = options["enabled"] and config.get("num_experts", 1) > 1
  by_itself, quantization = ("auto",) if config else (), str(config.get("quantization") or "")
  rows = (  # part, whose key, key, values that mean the part, what stands in
    (recipe, "moe_te.", "experts", ("te", *by_itself), "ragged_dot"),
    ("mxfp8", "moe_te.", "recipe", ("mxfp8",), "bf16"),
    ("router", "moe_te.", "router", ("te",), "jax"),
    ("nccl_ep", "moe_te.", "transport", ("nccl_ep", *by_itself) if ranks > 1 else (), "xla"),
    ("described", "", "attention", ("cudnn_flash_te",), "cudnn_flash_jax"),
    ("described", "", "quantization", (quantization,) if quantization.startswith("te_") else (), ""),
  )
  options_instead, words, why = {}, [], ""
  for part, prefix, key, values, instead in rows:
    value = options[key] if prefix else config.get(key)
    against = _against(engine, part) if value in values and (ours or not prefix) else ""
    if against:
      why = why or against
      words.append(f"{prefix}{key}={instead}")
      options_instead |= {key: instead} if prefix else {}
  plain = tuple(word for word in words if not word.startswith("moe_te."))
  return dataclasses.replace(
    request,
    words=(*request.words, *plain),
    options={**request.options, **options_instead},
    stand_ins=f"{', '.join(words)} [{why}]" if words else "",
  )


def _against(engine, part):
  if engine is None:
    return "Transformer Engine is not installed"
  problem = engine.problem("described") or engine.problem(part)
  if not problem and part == "nccl_ep" and not engine.borrows:
    problem = "makes its communicators at once, which takes GPUs"
  return problem and f"transformer-engine {engine.version} {problem}"


def compile_step(request: Request, *, timeout_s: int = 1800) -> dict:
  """Compiles the step without offload, with it, and with each profile besides.

  Returns:
    dict: gpu, devices, layers, names, asked (whether the run itself offloads them), stand_ins, expected_host_bytes, and variants: name to
      what `_figures` gives. Where the run offloads nothing and `OFFLOAD` is refused, names is empty and no_offload says why.

  Raises:
    MoeTeError: what refuses the run, or this machine.
    RuntimeError: the process failed otherwise; its last words.
  """
  if not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", request.topology):
    raise OptionError(
      found=f"the topology {request.topology!r}", needed="NVLink domains x processes x GPUs per process", fix="write for example 1x8x1"
    )
  described.target(request.gpu)
  with tempfile.TemporaryDirectory() as folder:
    environment = described.environment(pathlib.Path(folder))
    command = [sys.executable, "-m", "maxtext_moe_te.tools.deep", folder]
    try:
      done = subprocess.run(
        command, input=json.dumps(dataclasses.asdict(request)), env=environment, capture_output=True, text=True, timeout=timeout_s
      )
    except subprocess.TimeoutExpired as error:
      raise RefusedError(
        found=f"the compilation had not ended after {timeout_s} s", needed="a smaller one", fix="give --topology fewer devices"
      ) from error
    answer = pathlib.Path(folder) / "answer.json"
    if not answer.exists():
      last = [line for line in done.stderr.splitlines() if line.strip()][-8:]
      raise RuntimeError(f"the compiling process ended with status {done.returncode}: " + " | ".join(last)[-1500:])
    result = json.loads(answer.read_text())
  if "refused" in result:
    raise RefusedError(**result["refused"])
  return result


def main(folder: str) -> int:
  """The compiling process: reads a request from standard input, writes folder/answer.json."""
  request = Request(**json.load(sys.stdin))
  try:
    answer = _compile(request, pathlib.Path(folder))
  except MoeTeError as error:
    answer = {"refused": error.fields}
  (pathlib.Path(folder) / "answer.json").write_text(json.dumps(answer))
  return 0


def _compile(request, folder):
  devices, _ = described.devices(request.gpu, request.topology)
  if engine := described.engine():
    described.pretend_fused_attention()
    if engine.borrows:
      described.pretend_expert_parallel()
  from maxtext_moe_te.host import receive
  from maxtext_moe_te.host import step as steps
  from maxtext_moe_te.settings import overlay as overlays
  from maxtext_moe_te.settings.config import MoeTeOptions

  overlay = overlays.load(request.overlay) if request.overlay else None
  pool = rows.fraction({**os.environ, **(overlay.env if overlay else {})})
  receive.assume_memory(int(pool * described.memory_bytes(described.target(request.gpu))))
  options = MoeTeOptions.from_mapping(overlay.moe_te, request.overlay) if overlay else MoeTeOptions()
  options = options.replace_from(request.options, "the command line")
  own_profile, options = ",".join(options.xla_profile), options.replace_from({"xla_profile": ""}, "here")
  given = dict(word.split("=", 1) for word in request.words if "=" in word)
  words = [*request.words, *STANDING, f"base_output_directory={folder}"]
  if not given.get("hardware", "").startswith("gpu"):
    words.append("hardware=gpu")
  build = lambda words, options: steps.build(
    words, overlay=overlay, options=options, devices=devices, domains=int(request.topology.split("x")[0])
  )

  step = build(words, options)
  if not step.config.scan_layers and step.config.num_decoder_layers > UNSCANNED_LAYERS:
    words.append(f"base_num_decoder_layers={UNSCANNED_LAYERS}")
    step = build(words, options)
  names, why_not = tuple(step.config.tensors_to_offload or ()), ""
  asked = bool(names)
  if not asked:
    try:
      step, names = build(words, options.replace_from({"offload": list(OFFLOAD)}, "here")), OFFLOAD
    except MoeTeError as error:
      why_not = error.found
  flags = {} if overlay is None else dict(overlay.xla_flags)
  flags |= {**described.COMPILER_OPTIONS, "xla_dump_hlo_as_text": True}
  variants = {"offload" if names else "device": (step, {})}
  if names:
    on_device = ["remat_policy=custom", *(f"{name}=device" for name in names)]
    variants = {"device": (build([*words, *on_device], options.replace_from({"offload": ""}, "here")), {}), **variants}
  # The run's own profile too, where profiles are compared at all.
  profiles = dict.fromkeys((own_profile, *request.profiles) if request.profiles and own_profile else request.profiles)
  variants |= {name: (step, xla_flags.profile(name)) for name in profiles}
  answer = {
    "gpu": devices[0].device_kind,
    "devices": len(devices),
    "mesh": {axis: size for axis, size in step.mesh.shape.items() if size > 1},
    "layers": step.config.num_decoder_layers,
    "attention": str(step.config.attention),
    "names": names,
    "asked": asked,
    "stand_ins": request.stand_ins,
    "no_offload": why_not,
    "expected_host_bytes": step.bytes_of(names),
    "device_memory_bytes": described.memory_bytes(described.target(request.gpu)),
    "variants": {},
  }
  for name, (step, more) in variants.items():
    dump = folder / name
    compiled = step.compile(flags | more | {"xla_dump_to": str(dump)})
    answer["variants"][name] = _figures(compiled, dump)
    print(name, "compiled", file=sys.stderr, flush=True)
  return answer


def _figures(compiled, dump):
  """Bytes of one program, and its streams.

  `remat_instructions` are operations that XLA repeats to save memory; it counts host memory as device memory there.
  """
  memory, text = compiled.memory_analysis(), compiled.as_text()
  calls = re.findall(r'custom_call_target="(te_\w+)"', text)
  return {
    "host_bytes": memory.host_temp_size_in_bytes,
    "device_temporary_bytes": memory.temp_size_in_bytes,
    "device_argument_bytes": memory.argument_size_in_bytes,
    "device_peak_bytes": memory.peak_memory_in_bytes,
    "remat_instructions": len(re.findall(r"^\s+%?\S+\.remat\S* = ", text, re.M)),
    "transformer_engine_calls": {name: calls.count(name) for name in sorted(set(calls))},
    "streams": dataclasses.asdict(streams.report(dump)),
  }


def findings(result: dict) -> list[Finding]:
  """What of the result would hurt a run."""
  source = f"compiled for {result['devices']} {result['gpu']}"
  make = lambda severity, found, needed, fix: Finding(severity=severity, found=found, needed=needed, fix=fix, source=source)
  run, expected = "offload" if result["names"] else "device", result["expected_host_bytes"]
  offload = result["variants"][run]
  found, mib = [], 2**20
  if stand_ins := result.get("stand_ins"):
    found.append(
      make(
        NOTE,
        f"compiled with {stand_ins}, which is not the run itself: its memory, its collectives and their overlap are others",
        "the Transformer Engine that the run will have; no GPU is needed",
        "pip install 'maxtext-moe-te[gpu]' in the environment that compiles",
      )
    )
  if not result["names"]:
    fix = "set moe_te.offload to tensors of this model, if memory is short"
    found.append(make(NOTE, f"no offload was compiled: {result['no_offload']}", "nothing", fix))
  elif not expected or abs(offload["host_bytes"] / expected - 1) > HOST_BYTES_TOLERANCE:
    found.append(
      make(
        ERROR if result["asked"] else WARNING,
        f"offload of {', '.join(result['names'])} puts {offload['host_bytes'] / mib:,.1f} MiB into host memory and {expected / mib:,.1f} "
        "MiB were expected",
        "every layer's tensors there",
        "look for a scan of length 1, whose tensors XLA keeps on the device, and for a tensor that the backward pass does not read, "
        "such as moe_mlpwo",
      )
    )
  if offload["remat_instructions"]:
    found.append(
      make(
        WARNING,
        f"XLA repeats {offload['remat_instructions']} operations to save memory, counting host memory as device memory",
        "none, where the step fits without them",
        "add xla_disable_hlo_passes: rematerialization to the overlay's xla_flags",
      )
    )
  for name, figures in result["variants"].items():
    # The pool is taken at start; what is beside it belongs to NCCL, NCCL EP and CUDA graphs.
    if figures["device_peak_bytes"] > result["device_memory_bytes"]:
      found.append(
        make(
          ERROR if name == run else WARNING,
          f"the step needs {figures['device_peak_bytes'] / 2**30:,.1f} GiB ({name}) and the GPU has "
          f"{result['device_memory_bytes'] / 2**30:,.1f}",
          "a step that fits",
          "use more GPUs, a smaller per_device_batch_size, or more recomputation",
        )
      )
    if figures["streams"]["hazards"] and name not in ("device", "offload"):
      left, right = figures["streams"]["hazards"][0]
      found.append(
        make(
          WARNING,
          f"{name}: {len(figures['streams']['hazards'])} pairs of collectives on the same GPUs may run at once, "
          f"such as {left} beside {right}",
          "pairs that share at most one device: NCCL may deadlock on others",
          f"leave {name} out, or try it for a thousand steps first",
        )
      )
    several_streams = name not in ("device", "offload") and xla_flags.is_multi_stream(xla_flags.profile(name))
    if several_streams and not figures["streams"]["overlapped"]:
      found.append(
        make(
          NOTE,
          f"{name} overlaps no pair of collectives on different streams; {figures['streams']['eligible']} pairs could",
          "pairs next to each other in the schedule, on mesh axes that cross",
          f"leave {name} out: it gains nothing here",
        )
      )
  return found


def text(result: dict) -> str:
  """The result for a terminal."""
  variants, expected, mib = result["variants"], result["expected_host_bytes"], 2**20
  mesh = " x ".join(f"{axis} {size}" for axis, size in result["mesh"].items()) or "one device"
  lines = [
    f"compiled for {result['devices']} {result['gpu']}, {mesh}, {result['layers']} layers, attention={result['attention']}",
  ]
  if result.get("stand_ins"):
    lines.append(f"with stand-ins for Transformer Engine: {result['stand_ins']}")
  if result["names"]:
    device, offload = variants["device"], variants["offload"]
    saved = device["device_temporary_bytes"] - offload["device_temporary_bytes"]
    lines.append(
      f"offload of {', '.join(result['names'])}: {offload['host_bytes'] / mib:,.1f} MiB in host memory of each GPU's process, "
      f"{expected / mib:,.1f} MiB expected ({ratio(offload['host_bytes'], expected)}); device memory {saved / mib:+,.1f} MiB saved"
    )
  for name, figures in variants.items():
    overlap = figures["streams"]
    lines.append(
      f"{name:24s} {overlap['collectives']} collectives, {overlap['in_domain']} in the NVLink domain; {overlap['eligible']} pairs may "
      f"overlap, {len(overlap['overlapped'])} do on different streams, {len(overlap['hazards'])} of them share more than one device"
      + (f"; {overlap['expert_calls']} NCCL EP calls on communication streams" if overlap["expert_calls"] else "")
    )
    lines += [f"{'':24s}   {left} beside {right}" for left, right in overlap["hazards"]]
  return "\n".join(lines)


def ratio(found: int, expected: int) -> str:
  """found / expected in percent."""
  return f"{100 * found / expected:.2f} %" if expected else "nothing expected"


if __name__ == "__main__":
  with in_one_line():
    sys.exit(main(*sys.argv[1:]))
