"""Proof by numbers, where MaxText's source is not one the plugin knows: MaxText's own layer and ours, and one train step with the plugin
and without it, at reduced width in float32, with this run's routing, expert and mesh settings.

`settle` decides for a run. The numbers are taken in a process of its own on this machine's CPU (`python -m
maxtext_moe_te.host.compared`), once per host and per (texts, settings), and kept. A layer's numbers judge the places of
`known.LAYER` only; where those of `known.STEP` are unknown a train step is compared, with one microbatch and with two.
"""

import collections
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from maxtext_moe_te.errors import RefusedError, SeamError
from maxtext_moe_te.host import agreement, checks, known, reduced, rules_from_config, source
from maxtext_moe_te.settings.config import MoeTeOptions

log = logging.getLogger("maxtext_moe_te")

# Relative Frobenius error, ours against MaxText's own, both in float32. The sums run over the same products in another order: a few
# units in the last place (1.2e-7) times the square root of the number of terms. Gradients meet that twice, and pass through the router.
FORWARD_BOUND = 1e-5
GRADIENT_BOUND = 1e-4
TIMEOUT_S = 900  # a minute on two cores with nothing else to do; ranks and data loaders may leave it a tenth of one
CACHE_VARIABLE = "MAXTEXT_MOE_TE_CACHE"
ANSWER = "SELFCHECK"
_comparing = False  # in the comparing process, whose runs are the comparison
# Keys of MaxText's layer that say where, how fast or in which precision something is computed: the comparison sets them itself.
_NOT_PASSED = re.compile(
  r"(ici|dcn)_|.*(tile|tiling|buffer|quant|checkpoint|remat|debug|dtype|hardware|mesh|axis_rules|ring_of_experts|_kernel|fsdp|offload)"
  r"|model_call_mode|attention$|te_|shard|weight_gather|use_(ragged|tokamax|custom|batch|lineage)"
)


@dataclasses.dataclass(frozen=True)
class Verdict:
  """What the numbers say.

  Attributes:
    equal: whether every error is within its bound.
    errors: relative error by quantity, "layer y" or "step 2 d_decoder…"; None where it is not finite.
    worst: the quantity with the largest error over its bound, and that error.
    seconds: how long it took.
    cached: whether it was taken before.
    failure: why no numbers were got; empty if they were.
  """

  equal: bool
  errors: dict[str, float | None]
  seconds: float
  cached: bool = False
  failure: str = ""

  @property
  def worst(self) -> tuple[str, float | None]:
    if not self.errors:
      return "", None
    over = lambda name: float("inf") if self.errors[name] is None else self.errors[name] / bound(name)
    name = max(self.errors, key=over)
    return name, self.errors[name]


def bound(name: str) -> float:
  """The bound on the error of a quantity."""
  return GRADIENT_BOUND if re.search(r"(^| )d_", name) else FORWARD_BOUND


def _applies(config, options):
  return options.enabled and rules_from_config.is_replaced(config) and not _comparing


def settle(config, options: MoeTeOptions) -> str:
  """Lets a run go on whose MaxText is known, or equal by numbers.

  Args:
    config: the run's resolved MaxText configuration.
    options: the plugin's.

  Returns:
    str: the line to log; empty where all texts are known and `selfcheck` is not "always".

  Raises:
    SeamError: texts are unknown, and `selfcheck=never`.
    RefusedError: the numbers differ, or could not be got.
  """
  if not _applies(config, options):
    return ""
  unknown = known.unknown((known.LAYER, known.STEP))
  if not unknown and options.selfcheck != "always":
    return ""
  if options.selfcheck == "never":
    raise refused_unjudged(unknown)
  groups = (known.LAYER, known.STEP) if options.selfcheck == "always" else tuple(judgement.group for judgement in unknown)
  verdict = judge(request_of(config, options, groups))
  if not verdict.equal:
    raise refused(unknown, verdict)
  return sentence(unknown, verdict)


def settle_together(config, options: MoeTeOptions) -> str:
  """`settle` in every process of the run, each with the outcome of all; see there.

  Raises:
    SeamError, RefusedError: as `settle`, naming the node; or the processes import different sources of MaxText.
  """
  if not _applies(config, options):
    return ""
  digests = agreement.agree(" ".join(known.judge(group).digest for group in known.GROUPS), "MaxText's source")
  common = collections.Counter(verdict.reason for verdict in digests).most_common(1)[0][0]
  if other := next((verdict for verdict in digests if verdict.reason != common), None):
    raise RefusedError(
      found=f"process {other.process} on {other.host} imports another source of MaxText than most of the {len(digests)} processes",
      needed="the same in all of them",
      fix=f"install on {other.host} what the others have",
    )
  lines = []
  wait_s = TIMEOUT_S + agreement.TIMEOUT_S  # for a process that starts its comparison when others have the verdict
  error = agreement.together(lambda: lines.append(settle(config, options)), "MaxText's source, by numbers", timeout_s=wait_s)
  if error is not None:
    raise error
  return lines[0]


def sentence(unknown: list[known.Judgement], verdict: Verdict) -> str:
  """A verdict of equality, in one line."""
  name, error = verdict.worst
  what = (
    f"of MaxText {source.version()}: {changes(unknown)} not known to the plugin" if unknown else f"of MaxText {source.version()}: known"
  )
  return f"self-check {what}; equal by numbers (largest relative error {error:.1e}, {name}; {_when(verdict)})"


def changes(unknown: list[known.Judgement]) -> str:
  """The names of the changed places."""
  return ", ".join(judgement.names for judgement in unknown)


def _when(verdict):
  return f"{verdict.seconds:.0f} s" + (", kept from an earlier run" if verdict.cached else "")


def refused_unjudged(unknown: list[known.Judgement]) -> SeamError:
  """What `selfcheck=never` says of unknown texts."""
  return SeamError(
    found=f"MaxText {source.version()} in {source.root()} is not known to the plugin: {_diff(unknown)}",
    needed="a text that was proven equal, or a comparison by numbers",
    fix="set moe_te.selfcheck=auto",
  )


def refused(unknown: list[known.Judgement], verdict: Verdict) -> RefusedError:
  """What is said where MaxText computes something else than the plugin, or nothing could be compared."""
  where = f"in MaxText {source.version()} ({source.root()})"
  changed = f"; changed against {unknown[0].nearest}: {_diff(unknown)}" if unknown else ""
  if verdict.failure:
    found = f"the plugin could not be compared with MaxText's own layer {where}: {verdict.failure}{changed}"
  else:
    name, error = verdict.worst
    amount = "not finite" if error is None else f"off by {error:.1e} (bound {bound(name):.0e})"
    found = f"the plugin computes something else than MaxText's own layer {where}: {name} is {amount}{changed}"
  return RefusedError(
    found=found,
    needed="a MaxText whose MoE layer computes what the plugin's does",
    fix="set moe_te.enabled=false to run MaxText's own layer, or undo that change",
  )


def _diff(unknown):
  return "; ".join(change.diff() for judgement in unknown for change in judgement.changed)


def request_of(config, options: MoeTeOptions, groups: tuple[str, ...]) -> dict:
  """What is compared for a run: a plain dict, equal for runs that need the same comparison.

  Args:
    config: the resolved MaxText configuration.
    options: the plugin's.
    groups: of `known.GROUPS`.
  """
  fields = known_fields()
  passed = _routing_settings(config, fields)
  mesh = {axis: 2 for axis, size in checks.axis_sizes(config).items() if size > 1}
  return {
    "groups": list(groups),
    "layer": passed | reduced.of_layer(config, fields),
    "model": passed | reduced.of_model(config, fields),
    "block": rules_from_config.block_name(config),
    "mesh": mesh,
    "options": {"cast_weights": options.cast_weights},
  }


def known_fields() -> frozenset[str]:
  """The keys of MaxText's configuration."""
  from maxtext.configs import types

  return frozenset(types.MaxTextConfig.model_fields)


def _routing_settings(config, fields):
  """The values of the run for the keys that MaxText's MoE layer reads, as words."""
  text = "\n".join(function.text for function in map(source.function, known.GROUPS[known.LAYER]) if function)
  read = set(re.findall(r"\b(?:config|cfg)\.(\w+)", text)) | set(re.findall(r"getattr\((?:self\.)?config, \"(\w+)\"", text))
  read |= {"model_name", "routed_bias", "routed_score_func", "num_experts", "num_experts_per_tok", "mlp_bias", "load_balance_loss_weight"}
  words = {}
  for key in sorted(read & fields):
    value = getattr(config, key, None)
    value = getattr(value, "value", value)
    derived = f"base_{key}" in fields
    if not derived and not _NOT_PASSED.match(key) and isinstance(value, bool | int | float | str):
      words[key] = str(value).lower() if isinstance(value, bool) else str(value) or "''"
  activations = getattr(config, "mlp_activations", None)
  return words | ({"mlp_activations": json.dumps(list(activations))} if activations else {})


def judge(request: dict) -> Verdict:
  """The verdict on a request: the one kept, or a new one, taken by the first process of this host that asks."""
  key = _key(request)
  folder = cache_folder()
  with _lock(folder, key):
    kept = _read(folder, key)
    if kept:
      return dataclasses.replace(kept, cached=True)
    log.info("MaxText's source is not known to the plugin: comparing its layer with the plugin's by numbers, up to a minute")
    verdict = _run(request)
    if not verdict.failure:
      _write(folder, key, verdict)
  return verdict


def kept(request: dict) -> Verdict | None:
  """The verdict on a request, if it was taken before."""
  found = _read(cache_folder(), _key(request))
  return dataclasses.replace(found, cached=True) if found else None


def _key(request):
  import flax
  import jax

  state = {
    "request": request,
    "texts": {group: known.judge(group).digest for group in known.GROUPS},
    "plugin": _own_digest(),
    "versions": [jax.__version__, flax.__version__, sys.version],
  }
  return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()[:32]


def _own_digest():
  """Of the plugin's own layer: a changed plugin is compared anew."""
  folder = Path(__file__).parents[1]
  files = sorted([*folder.glob("host/*.py"), *folder.glob("moe/**/*.py")])
  return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def cache_folder() -> Path | None:
  """Where verdicts are kept; None where nothing can be written."""
  home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
  for folder in (
    os.environ.get(CACHE_VARIABLE),
    os.path.join(home, "maxtext-moe-te"),
    os.path.join(tempfile.gettempdir(), "maxtext-moe-te"),
  ):
    try:
      if folder:
        path = Path(folder) / "selfcheck"
        path.mkdir(parents=True, exist_ok=True)
        if os.access(path, os.W_OK):
          return path
    except OSError:
      continue
  return None


@contextlib.contextmanager
def _lock(folder, key) -> Iterator[None]:
  if folder is None:
    yield
    return
  with open(folder / f"{key}.{os.uname().nodename}.lock", "w") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    yield


def _read(folder, key):
  try:
    return Verdict(**json.loads((folder / f"{key}.json").read_text()))
  except (AttributeError, TypeError, OSError, ValueError):
    return None


def _write(folder, key, verdict):
  if folder is None:
    return
  with contextlib.suppress(OSError):
    written = folder / f"{key}.{os.getpid()}"
    written.write_text(json.dumps(dataclasses.asdict(verdict)))
    written.replace(folder / f"{key}.json")


def _run(request):
  """Asks a process of its own, which sees no GPU and no other rank."""
  devices = 2 ** len(request["mesh"])
  kept = {key: value for key, value in os.environ.items() if not _FOREIGN.match(key)}
  environment = kept | {
    "JAX_PLATFORMS": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "DECOUPLE_GCLOUD": os.environ.get("DECOUPLE_GCLOUD", "TRUE"),
    "XLA_FLAGS": f"--xla_force_host_platform_device_count={max(devices, 1)}",
    # What this process imports, and no other copy.
    "PYTHONPATH": os.pathsep.join([str(source.root().parent), str(Path(__file__).parents[2]), *filter(None, sys.path)]),
  }
  start = time.monotonic()
  command = [sys.executable, "-m", "maxtext_moe_te.host.compared"]
  try:
    done = subprocess.run(command, input=json.dumps(request), env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
  except subprocess.TimeoutExpired:
    return Verdict(False, {}, TIMEOUT_S, failure=f"the comparison had not ended after {TIMEOUT_S} s")
  seconds = round(time.monotonic() - start, 1)
  if ANSWER not in done.stdout:
    last = " | ".join(done.stderr.strip().splitlines()[-2:])[-300:]
    return Verdict(False, {}, seconds, failure=f"the comparing process ended with status {done.returncode} ({last})")
  answer = json.loads(done.stdout.rsplit(ANSWER, 1)[1])
  if "failure" in answer:
    return Verdict(False, {}, seconds, failure=answer["failure"])
  errors = answer["errors"]
  equal = bool(errors) and all(error is not None and error <= bound(name) for name, error in errors.items())
  return Verdict(equal, errors, seconds)


@contextlib.contextmanager
def comparing() -> Iterator[None]:
  """In which runs are not compared again."""
  global _comparing
  _comparing = True
  try:
    yield
  finally:
    _comparing = False


# Variables by which a job's process finds its part of it.
_FOREIGN = re.compile(r"XLA_|JAX_|NCCL_|SLURM_|OMPI_|PMI|M_|MAXTEXT_MOE_TE_|MOE_TE_|LIBTPU|TPU_|NODE_RANK|RANK|WORLD_SIZE|MASTER_")
