"""What a rank of a job receives, and the memory that is for it: `moe.capacity` for the facts of a job."""

from collections.abc import Callable, Mapping

from maxtext_moe_te.moe import capacity
from maxtext_moe_te.settings import xla_flags
from maxtext_moe_te.settings.config import AUTO
from maxtext_moe_te.tools.doctor.facts import Job, Machine

JAX_FRACTION = 0.75  # of a GPU's memory that XLA's pool takes, JAX's default


def fraction(variables: Mapping[str, str]) -> float:
  """The part of a GPU's memory that XLA's pool takes in a process with these environment variables."""
  for name in xla_flags.MEMORY_FRACTIONS:
    if variables.get(name):
      try:
        return float(variables[name]) or JAX_FRACTION
      except ValueError:
        return JAX_FRACTION
  return JAX_FRACTION


def pool_bytes(job: Job, memory: int | None) -> int | None:
  """Bytes of XLA's pool on a GPU of so much memory; None where that is not known."""
  return int(fraction(job.variables) * memory) if memory else None


def pool_of(machine: Machine, job: Job) -> int | None:
  """The same on a machine's GPUs."""
  return pool_bytes(job, machine.gpus[0].memory_bytes if machine.gpus else None)


def received(job: Job) -> capacity.Received:
  """See `capacity.received_by`."""
  return capacity.received_by(job.config, _axis_sizes(job))


def least_state_bytes(job: Job) -> int:
  """See `capacity.least_state_bytes`."""
  return capacity.least_state_bytes(job.config, _axis_sizes(job))


def chosen(job: Job, pool: int | None) -> capacity.Choice:
  """The capacity factor and parts that a run takes on GPUs whose pool has so many bytes."""
  factor, chunks = (None if (value := job.options.get(name, AUTO)) == AUTO else value for name in ("capacity_factor", "chunks"))
  return capacity.decided(
    job.config,
    _axis_sizes(job),
    capacity_factor=factor,
    chunks=chunks,
    memory=pool,
    finite=job.options.get("on_overflow", "exact") == "exact",
  )


def more_chunks(of_job: capacity.Received, chunks: int, enough: Callable[[int], bool]) -> str:
  """ ", or moe_te.chunks=N" with the fewest, more than `chunks`, for which `enough` holds; nothing where it holds for none."""
  more = (c for c in capacity.CHUNKS if c > chunks and of_job.tokens % c == 0 and enough(c))
  found = next(more, None)
  return f", or moe_te.chunks={found}" if found else ""


def _axis_sizes(job):
  return job.config.get("axis_sizes") or {}
