"""`maxtext-moe-te capacity`: what a rank may receive under each capacity factor and number of parts, in GiB, and what a run takes."""

import argparse
import json

from maxtext_moe_te.errors import OptionError, RefusedError
from maxtext_moe_te.moe import capacity
from maxtext_moe_te.tools.doctor import count, facts, read_job, rows, saved_machine

FACTORS = (0.0, 1.25, 1.5, 2.0, 4.0)  # 0 holds whatever the routing


def main(words: list[str]) -> int:
  """Prints the table; see `--help`.

  Returns:
    int: the exit status.

  Raises:
    MoeTeError: the words are wrong, or MaxText refuses them.
  """
  args, rest = _parser().parse_known_args(words)
  unknown = [word for word in rest if word.startswith("-")]
  if unknown or not rest:
    raise OptionError(
      found=f"the word {unknown[0]!r}" if unknown else "no job",
      needed="options of capacity, and what MaxText takes",
      fix="write for example maxtext-moe-te capacity overlay=deepseek3-671b-te-h200 --nodes 16 --gpus-per-node 8",
    )
  machine = saved_machine(args.machine) if args.machine else facts.gather()
  job, _ = read_job(rest, machine, args)
  if job.refused:
    raise RefusedError(**job.refused)
  if job.config["num_experts"] < 2:
    raise OptionError(found=f"{job.config['model_name']}, which has no experts", needed="an MoE model", fix="write another model_name")
  report = described(job, _memory(args, machine))
  print(json.dumps(report, indent=2) if args.json else text(report))
  return 0


def _parser():
  parser = argparse.ArgumentParser(
    prog="maxtext-moe-te capacity",
    usage="maxtext-moe-te capacity [OPTIONS] [base.yml] ARGS",
    description="Rows that a rank may receive, and the memory they take, for each moe_te.capacity_factor and moe_te.chunks.",
    epilog="ARGS: what MaxText takes, and among it overlay=NAME|PATH[,…] and moe_te.OPTION=VALUE.",
    allow_abbrev=False,
  )
  parser.add_argument("--json", action="store_true", help="as JSON")
  parser.add_argument("--nodes", type=count, default=1, help="default: 1")
  parser.add_argument("--gpus-per-node", type=count, help="default: this machine's")
  parser.add_argument("--gpu", default="", help="a GPU that is not here, such as H200 or GB200; default: this machine's")
  parser.add_argument("--memory", type=float, metavar="GIB", help="of such a GPU")
  parser.add_argument("--machine", metavar="FILE", help="the machine of a report saved with doctor --json")
  parser.set_defaults(nvlink_domain=0, processes_per_node=0)
  return parser


def _memory(args, machine) -> int | None:
  """Bytes of the GPU that is asked for."""
  if args.memory:
    return int(args.memory * capacity.GIB)
  if args.gpu:
    from maxtext_moe_te.tools import described as gpus

    return gpus.memory_bytes(gpus.target(args.gpu))
  return machine.gpus[0].memory_bytes if machine.gpus else None


def described(job: facts.Job, memory: int | None) -> dict:
  """The table.

  Args:
    job: resolved.
    memory: bytes of a GPU; None where nobody knows.

  Returns:
    dict: model, axis_sizes, tokens_per_rank, pool_bytes, state_bytes and room_bytes (None without `memory`), takes (capacity_factor,
    chunks, why), and rows: one dict for each factor and number of parts, with their rows, bytes and whether they fit.
  """
  received, pool, state = rows.received(job), rows.pool_bytes(job, memory), rows.least_state_bytes(job)
  room = None if pool is None else capacity.room(pool, state)
  choice = rows.chosen(job, pool)
  factors = sorted({*FACTORS, choice.capacity_factor})
  table = [
    {
      "capacity_factor": factor,
      "chunks": chunks,
      "rows": received.rows(factor, chunks),
      "buffer_bytes": received.buffer_bytes(factor, chunks),
      "group_bytes": received.group_bytes(factor, chunks),
      "handle_bytes": received.handle_bytes(factor, chunks),
      "fits": None if room is None else received.total_bytes(factor, chunks) <= room,
    }
    for factor in (factors if received.ranks > 1 else (0.0,))
    for chunks in (capacity.CHUNKS if factor == 0 else (1,))
    if received.tokens % chunks == 0
  ]
  return {
    "model": job.config["model_name"],
    "axis_sizes": {axis: size for axis, size in job.config["axis_sizes"].items() if size > 1},
    "tokens_per_rank": received.tokens,
    "pool_bytes": pool,
    "state_bytes": state,
    "room_bytes": room,
    "takes": {"capacity_factor": choice.capacity_factor, "chunks": choice.chunks, "why": choice.why},
    "rows": table,
  }


def text(report: dict) -> str:
  """The table for a terminal."""
  gib = lambda size: f"{size / capacity.GIB:.1f}"
  mesh = " x ".join(f"{axis} {size}" for axis, size in report["axis_sizes"].items()) or "one device"
  lines = [f"{report['model']} on {mesh}: {report['tokens_per_rank']:,} tokens a rank"]
  if report["room_bytes"] is None:
    lines.append("memory: not known; give --gpu or --memory")
  else:
    lines.append(
      f"GiB: {gib(report['pool_bytes'])} in XLA's pool, at least {gib(report['state_bytes'])} of it weights and optimizer; rows may take "
      f"{gib(report['room_bytes'])}, half of what is left"
    )
  table = [("capacity_factor", "chunks", "rows", "buffers GiB", "NCCL EP GiB", "handles GiB", "fits")]
  for row in report["rows"]:
    sizes = [gib(row[name]) for name in ("buffer_bytes", "group_bytes", "handle_bytes")]
    fits = {None: "-", True: "yes", False: "no"}[row["fits"]]
    factor = f"{row['capacity_factor']:g}" if row["capacity_factor"] else "0, any routing"
    table.append((factor, str(row["chunks"]), f"{row['rows']:,}", *sizes, fits))
  widths = [max(map(len, column)) for column in zip(*table)]
  lines += ["  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in table]
  takes = report["takes"]
  why = f": {takes['why']}" if takes["why"] else ""
  return "\n".join([*lines, f"the run takes moe_te.capacity_factor={takes['capacity_factor']:g} moe_te.chunks={takes['chunks']}{why}"])
