"""`maxtext-moe-te doctor`: what of this machine and of this job will fail, be wrong or be slow, before it starts.

Facts are gathered once (`facts`), judged by small functions (`checks`), and shown as text or JSON. Nothing is changed. On GPUs three
short probes run in processes of their own (`probes`), so that an abort is a finding.
"""

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from maxtext_moe_te import __version__
from maxtext_moe_te.errors import MoeTeError, OptionError, VersionError
from maxtext_moe_te.host import source
from maxtext_moe_te.settings import overlay as overlays
from maxtext_moe_te.settings import words as our_words
from maxtext_moe_te.settings import xla_flags
from maxtext_moe_te.settings.config import MoeTeOptions
from maxtext_moe_te.settings.variable import VARIABLE
from maxtext_moe_te.tools import files
from maxtext_moe_te.tools.doctor import checks, facts, rows
from maxtext_moe_te.tools.doctor.checks import ERROR, Finding

RESOLVE_TIMEOUT_S = 1080  # 180 for MaxText, 900 for a comparison by numbers
RANKS_TIMEOUT_S = 120


def main(words: list[str]) -> int:
  """Runs the doctor; see `--help`.

  Returns:
    int: 1 if anything found is an error, else 0.

  Raises:
    MoeTeError: the words themselves are wrong.
  """
  args, rest = _parser().parse_known_args(words)
  unknown = [word for word in rest if word.startswith("-")]
  if unknown:
    raise OptionError(
      found=f"the word {unknown[0]!r}", needed="an option of doctor, or what MaxText takes", fix="see maxtext-moe-te doctor --help"
    )
  if (args.gpu or args.topology) and not (args.deep or args.verify_offload):
    raise OptionError(found="--gpu or --topology alone", needed="--deep, which compiles for them", fix="add --deep, or remove them")
  if args.ranks and not 0 <= args.rank < args.rank_count:
    raise OptionError(
      found=f"--rank {args.rank} of --rank-count {args.rank_count}", needed="a number from 0 to the ranks less one", fix="correct --rank"
    )
  start = time.monotonic()
  machine = saved_machine(args.machine) if args.machine else facts.gather()
  job, resolved = read_job(rest, machine, args)
  names = xla_flags.installed_names() if job.xla_flags.strip() and not args.machine else None
  findings = checks.examine(machine, job, names=names)
  report = {
    "version": __version__,
    "machine": dataclasses.asdict(machine),
    "machine_digest": facts.digest(machine),
    "job": dataclasses.asdict(job),
  }
  if args.image:
    findings = [finding for finding in findings if finding.severity != checks.NOTE]
  if args.ranks:
    findings += gather_ranks(Path(args.ranks), machine, rank=args.rank, count=args.rank_count)
  here = facts.seen(machine, job.variables)
  if here.gpus and not args.machine and not args.image and args.probes:
    from maxtext_moe_te.tools.doctor import probes

    report["probes"], found = probes.run(here, job)
    findings += found
  if (args.deep or args.verify_offload) and not job.refused:
    from maxtext_moe_te.tools import deep, gradients

    request = _request(resolved, job, args, here)
    report["deep"], found = _deep(deep.without_engine(request, job.config, job.options))
    findings += found
    # Gradients can be compared on a GPU even where nothing can be compiled for described ones.
    moved = list(report["deep"]["names"] if report["deep"] else job.options.get("offload") or deep.OFFLOAD)
    if args.verify_offload and here.gpus and moved:
      report["gradients"], found = gradients.check(dataclasses.replace(request, options={**request.options, "offload": moved}))
      findings += found
  report["findings"] = [dataclasses.asdict(finding) for finding in findings]
  report["seconds"] = round(time.monotonic() - start, 1)
  print(json.dumps(report, indent=2) if args.json else text(report, findings))
  return 1 if any(finding.severity == ERROR for finding in findings) else 0


def _parser():
  parser = argparse.ArgumentParser(
    prog="maxtext-moe-te doctor",
    usage="maxtext-moe-te doctor [OPTIONS] [base.yml ARGS]",
    description="What will fail, be wrong or be slow, before it starts.",
    epilog="ARGS: what MaxText takes, and among it overlay=NAME|PATH[,…] and moe_te.OPTION=VALUE. Without them only the machine is judged.",
    allow_abbrev=False,
  )
  parser.add_argument("--json", action="store_true", help="everything as JSON, fit to be posted")
  parser.add_argument("--nodes", type=count, default=_environment_int("NNODES", "SLURM_NNODES") or 1, help="default: the job's, or 1")
  parser.add_argument("--gpus-per-node", type=count, help="default: this machine's")
  parser.add_argument("--nvlink-domain", type=count, default=0, help="GPUs of one NVLink domain; default: a node's")
  parser.add_argument("--processes-per-node", type=count, default=0, help="default: one for each GPU")
  parser.add_argument("--image", action="store_true", help="for a container being built, without a GPU: only what can be known there")
  parser.add_argument("--machine", metavar="FILE", help="judge the machine of a report saved with --json, not this one")
  parser.add_argument("--no-probes", dest="probes", action="store_false", help="run nothing on the GPUs")
  parser.add_argument("--deep", action="store_true", help="compile the step and look where bytes and collectives are; minutes")
  parser.add_argument("--verify-offload", action="store_true", help="--deep for offload alone, and on a GPU a gradient check")
  parser.add_argument("--gpu", default="", help="--deep: compile for this GPU, such as H200 or GB200; default: this machine's, or H200")
  parser.add_argument("--topology", default="", help="--deep: NVLink domains x processes x GPUs each, such as 2x8x1; default: the job's")
  ranks = parser.add_argument_group("across the processes of a job")
  ranks.add_argument("--ranks", metavar="FOLDER", help="a shared folder, new for each run, in which every rank leaves its facts")
  ranks.add_argument("--rank", type=int, default=_environment_int("NODE_RANK", "SLURM_PROCID") or 0, help="default: the job system's, or 0")
  ranks.add_argument(
    "--rank-count", type=count, default=_environment_int("NNODES", "SLURM_NTASKS") or 1, help="default: the job system's, or 1"
  )
  return parser


def count(text: str) -> int:
  """A number of things, for argparse."""
  number = int(text)
  if number < 1:
    raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
  return number


count.__name__ = "int"  # as argparse names it


def _environment_int(*names):
  return next((int(os.environ[name]) for name in names if re.fullmatch(r"[0-9]+", os.environ.get(name, ""))), None)


def saved_machine(file: str) -> facts.Machine:
  """The machine of a report, or of its key `machine` alone.

  Raises:
    OptionError: the file cannot be read, or is something else.
  """
  try:
    data = json.loads(Path(file).read_text(encoding="utf-8"))
    return facts.machine_from(data.get("machine", data))
  except (OSError, ValueError, TypeError, AttributeError) as error:  # the latter three: no JSON, or of another shape
    raise OptionError(
      found=f"--machine {file}: {error}", needed="a report of this version's doctor --json", fix="correct the path, or make it anew"
    ) from error


def read_job(words: list[str], machine: facts.Machine, args) -> tuple[facts.Job, dict]:
  """The job that the words describe, and what they are made of: words, overlay, options."""
  asked = our_words.read(words, os.environ.get(VARIABLE))
  rest, spec, options = asked.words, asked.spec, asked.options
  environment = dict(os.environ) if not args.machine else dict(machine.variables)
  if spec or options.xla_profile:
    overlays.apply_environment(asked.overlay, environment, options.xla_profile)
  gpus_per_node = args.gpus_per_node or len(facts.seen(machine, environment).gpus) or 1
  job = facts.Job(
    nodes=args.nodes,
    gpus_per_node=gpus_per_node,
    nvlink_domain=args.nvlink_domain,
    processes_per_node=args.processes_per_node,
    options=options.as_dict(),
    xla_flags=environment.get("XLA_FLAGS", ""),
    variables={name: value for name, value in environment.items() if name.startswith(facts.VARIABLES)},
  )
  resolved = {"words": rest, "overlay": spec or "", "options": asked.given}
  if not rest and not spec:
    return job, resolved
  try:
    base = source.root() / "configs" / "base.yml"
  except VersionError as error:
    return dataclasses.replace(job, refused=error.fields), resolved
  if not rest or not rest[0].endswith(".yml"):
    rest = resolved["words"] = [str(base), *rest]
  answer = ask_maxtext(rest, spec or "", asked.overlay, options, job, rows.pool_of(facts.seen(machine, environment), job))
  config, compared = answer["config"], answer.get("selfcheck", "")
  offloaded = offloaded_bytes(config, job)
  return dataclasses.replace(job, config=config, refused=answer["refused"], selfcheck=compared, offloaded_bytes=offloaded), resolved


def ask_maxtext(words: list[str], spec: str, overlay: overlays.Overlay, options: MoeTeOptions, job: facts.Job, pool: int | None) -> dict:
  """What MaxText makes of the words, in a process of its own: {"config", "refused"}, and "selfcheck" if it came to that."""
  request = {"words": words, "overlay": spec, "options": options.as_dict(), "domains": 1, "per_domain": job.gpus, "pool": pool}
  environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "DECOUPLE_GCLOUD": "TRUE", VARIABLE: ""}
  command = [sys.executable, "-m", "maxtext_moe_te.tools.doctor.resolve"]
  given = {**overlay.maxtext, **dict(word.split("=", 1) for word in words if "=" in word)}
  if any(name.startswith("dcn_") and str(value) not in ("1", "-1") for name, value in given.items()):
    request |= {"domains": max(job.gpus // job.domain, 1), "per_domain": job.domain}
  try:
    done = subprocess.run(command, input=json.dumps(request), env=environment, capture_output=True, text=True, timeout=RESOLVE_TIMEOUT_S)
  except subprocess.TimeoutExpired:
    return _not_asked(f"had not answered after {RESOLVE_TIMEOUT_S} s", "try `maxtext-moe-te config show`")
  if "ANSWER" in done.stdout:
    return json.loads(done.stdout.split("ANSWER", 1)[1])
  last = " | ".join(line for line in done.stderr.splitlines()[-3:])[-600:]
  return _not_asked(f"could not be asked: {last}", "install what it names")


def _not_asked(what, fix):
  return {"config": {}, "refused": {"found": f"MaxText {what}", "needed": "a MaxText that imports", "fix": fix}}


def offloaded_bytes(config: dict, job: facts.Job) -> int:
  """Host memory per GPU of offloaded queries, keys and values, bf16 or float32; other tensors are left to --deep."""
  if not config.get("tensors_to_offload"):
    return 0
  width = 4 if config.get("dtype") == "float32" else 2
  latent = config.get("attention_type") == "mla"
  heads, kv_heads = config["num_query_heads"], config["num_kv_heads"]
  of_query = heads * (config["qk_nope_head_dim"] + config["qk_rope_head_dim"]) if latent else heads * config["head_dim"]
  of_value = heads * config["v_head_dim"] if latent else kv_heads * config["head_dim"]
  elements = {"query_proj": of_query, "key_proj": of_query if latent else of_value, "value_proj": of_value}
  per_token = sum(elements.get(name, 0) for name in config["tensors_to_offload"])
  tokens = config["micro_batch_size_to_train_on"] * config["max_target_length"]
  return tokens * per_token * width * config["num_decoder_layers"] // job.gpus


def gather_ranks(folder: Path, machine: facts.Machine, *, rank: int, count: int) -> list[Finding]:
  """Leaves this rank's facts in a shared folder, waits for the others', and says who differs."""
  own = folder / f"rank-{rank}.json"
  try:
    folder.mkdir(parents=True, exist_ok=True)
    if own.exists():
      raise OptionError(found=f"{own} is of an earlier run", needed="a folder of its own for each run", fix="give another --ranks")
    files.replace(own, json.dumps(dataclasses.asdict(machine)).encode())
  except OSError as error:
    found = f"{own} cannot be written: {error.strerror}"
    raise OptionError(found=found, needed="a shared folder", fix="give another --ranks") from error
  deadline = time.monotonic() + RANKS_TIMEOUT_S
  while len(found := sorted(folder.glob("rank-*.json"))) < count and time.monotonic() < deadline:
    time.sleep(0.2)
  machines = {path.stem.replace("-", " "): facts.machine_from(json.loads(path.read_text())) for path in found}
  missing = [f"rank {i}" for i in range(count) if f"rank {i}" not in machines]
  findings = checks.compare(machines)
  if missing:
    findings.append(
      Finding(
        severity=ERROR,
        found=f"{', '.join(missing)} of {count} left nothing in {folder} within {RANKS_TIMEOUT_S} s",
        needed="all ranks, and a folder they share",
        fix="look at the machines of those ranks",
        source="the doctor",
      )
    )
  return findings


def _deep(request):
  """(result or None, findings) of a compiled step."""
  from maxtext_moe_te.tools import deep

  try:
    result = deep.compile_step(request)
  except (MoeTeError, RuntimeError) as error:
    fields = (error.found, error.needed, error.fix) if isinstance(error, MoeTeError) else (str(error), "a step that compiles", "see above")
    return None, [Finding(severity=ERROR, found=fields[0], needed=fields[1], fix=fields[2], source=f"compiled for {request.gpu}")]
  return result, deep.findings(result)


def _request(resolved, job, args, machine):
  from maxtext_moe_te.tools import deep

  if not resolved["words"]:
    raise OptionError(
      found="--deep without a job", needed="what MaxText takes", fix="add the words of the run, for example overlay=qwen3-30b-a3b-te-h200"
    )
  here = re.search(r"\b[A-Z]+[0-9]+\b", machine.gpus[0].name) if machine.gpus else None  # H100 of NVIDIA H100 80GB HBM3
  domains = max(job.gpus // job.domain, 1)
  return deep.Request(
    words=tuple(resolved["words"]),
    overlay=resolved["overlay"],
    options=resolved["options"],
    gpu=args.gpu or (here[0] if here else "H200"),
    topology=args.topology or f"{domains}x{job.gpus // domains}x1",
    profiles=() if args.verify_offload and not args.deep else deep.PROFILES,
  )


def _metadata(machine, name):
  """What the metadata say of MaxText, where its source says another version."""
  said = machine["maxtext"].get("metadata") if name == "maxtext" else None
  return f" (metadata: {said})" if said not in (None, machine["packages"][name]) else ""


def text(report: dict, findings: list[Finding]) -> str:
  """The report for a terminal."""
  machine, job = report["machine"], report["job"]
  told = [
    f"{name} {machine['packages'][name]}{_metadata(machine, name)}"
    for name in ("maxtext", "jax", "jaxlib", "transformer-engine")
    if name in machine["packages"]
  ]
  gpus = machine["gpus"]
  lines = [
    f"python {machine['python']}, {', '.join(told) or 'nothing installed'}",
    f"{len(gpus)} x {gpus[0]['name']} ({gpus[0]['capability']}), driver {machine['driver']}" if gpus else "no GPU",
    f"machine {report['machine_digest']} (equal on all machines of a job)",
  ]
  if job["config"]:
    sizes = " x ".join(f"{axis} {size}" for axis, size in job["config"].get("axis_sizes", {}).items() if size > 1)
    lines.append(f"job: {job['config'].get('model_name')} on {job['nodes']} x {job['gpus_per_node']} GPUs, {sizes or 'one device'}")
  for name, probe in report.get("probes", {}).items():
    lines.append(f"probe {name}: {probe}")
  if report.get("deep"):
    from maxtext_moe_te.tools import deep

    lines.append(deep.text(report["deep"]))
  if report.get("gradients"):
    checked = report["gradients"]
    lines.append(
      f"gradients of the reduced model, attention={checked['attention']}: {len(checked['differ'])} of {len(checked['losses'][0])} steps x "
      f"{checked['arrays']} arrays differ with offload"
    )
  lines += [f"{finding.severity}: {finding}" for finding in findings]
  counts = {severity: sum(finding.severity == severity for finding in findings) for severity in ("error", "warning", "note")}
  lines.append(
    ", ".join(f"{count} {severity}{'s' if count != 1 else ''}" for severity, count in counts.items()) + f", {report['seconds']} s"
  )
  return "\n".join(lines)
