"""Which collectives of a compiled step may overlap, and which do, on different streams.

Reads XLA's own texts: the optimized program for replica groups, the thunk sequence for streams and order. "Overlap" means that one
is started between start and end of the other; it is the order of issue, not measured time. Imports nothing heavy.
"""

import dataclasses
import itertools
import pathlib
import re

COLLECTIVES = "all-gather|all-reduce|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
  """One collective of the program.

  Args:
    name: its instruction, such as all-gather.53.
    computation: the computation it stands in: the entry or a loop's body.
    groups: the devices that take part together.
    in_domain: XLA has assigned it to the NVLink domain.
  """

  name: str
  computation: str
  groups: frozenset[frozenset[int]]
  in_domain: bool

  def shared_devices(self, other: "Collective") -> int:
    """The most devices that a group of one has in common with a group of the other; at most 1 is safe to overlap."""
    return max((len(a & b) for a in self.groups for b in other.groups), default=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
  """Overlap in one program.

  Args:
    collectives: how many there are.
    in_domain: how many of them XLA assigned to the NVLink domain.
    eligible: pairs in the same computation that share at most one device.
    overlapped: pairs open at the same time on different communication streams.
    hazards: those among them that share more devices, which XLA's guard does not see across a loop's boundary or in a custom call.
    expert_calls: NCCL EP calls on a communication stream.
  """

  collectives: int
  in_domain: int
  eligible: int
  overlapped: list[tuple[str, str]]
  hazards: list[tuple[str, str]]
  expert_calls: int


def report(folder: pathlib.Path) -> Report:
  """What XLA dumped of one step into `folder`.

  Raises:
    FileNotFoundError: no such dump.
  """
  program = collectives(_newest(folder, "*train_step*gpu_after_optimizations.txt").read_text())
  sequence = _newest(folder, "*train_step*thunk_sequence.txt").read_text()
  metadata = _newest(folder, "*train_step*thunk_metadata.txt").read_text()
  names = {int(number): name for name, number in re.findall(r'profile_annotation: "([^"]*)"\s*thunk_id: (\d+)', metadata)}
  pairs, expert_calls = open_together(sequence, names)
  known = {collective.name: collective for collective in program}
  overlapped, hazards = [], []
  for left, right in pairs:
    overlapped.append((left, right))
    a, b = known.get(left), known.get(right)
    if a is None or b is None or a.shared_devices(b) > 1:  # a call into NCCL EP names no groups: its ranks are everywhere
      hazards.append((left, right))
  return Report(
    collectives=len(program),
    in_domain=sum(collective.in_domain for collective in program),
    eligible=sum(a.computation == b.computation and a.shared_devices(b) <= 1 for a, b in itertools.combinations(program, 2)),
    overlapped=overlapped,
    hazards=hazards,
    expert_calls=expert_calls,
  )


def _newest(folder, pattern):
  found = sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime)
  if not found:
    raise FileNotFoundError(f"no {pattern} in {folder}")
  return found[-1]


def collectives(program: str) -> list[Collective]:
  """The collectives of an optimized program's text; those between one device and itself are left out."""
  found, computation, callers = [], "", {}
  for line in program.splitlines():
    if line.endswith("{") and not line.startswith(" "):
      computation = line.split(" ")[1 if line.startswith("ENTRY") else 0].lstrip("%")
    if "async-start(" in line:  # an asynchronous collective stands in a computation of its own
      callers[re.search(r"calls=%?([\w.-]+)", line)[1]] = computation
    match = re.match(rf"\s+(?:ROOT )?%?(\S+) = .*? (?:{COLLECTIVES})(?:-start)?\(", line)
    if match:
      groups = replica_groups(line)
      if any(len(group) > 1 for group in groups):
        found.append(
          Collective(
            name=match[1],
            computation=computation,
            groups=groups,
            in_domain="SCALE_UP" in line,
          )
        )
  return [dataclasses.replace(one, computation=callers.get(one.computation, one.computation)) for one in found]


def replica_groups(line: str) -> frozenset[frozenset[int]]:
  """The groups of one collective, in any of the four forms in which XLA prints them."""
  mesh = re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", line)
  if mesh:
    axes = [(name, int(size)) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh[1])]
    over = re.findall(r"'([^']+)'", mesh[2])
    return _groups_over([size for _, size in axes], [i for i, (name, _) in enumerate(axes) if name in over])
  iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
  if iota:
    shape, dims = _ints(iota[1]), _ints(iota[2])
    order = _ints(iota[3]) if iota[3] else list(range(len(dims)))
    devices = [_flat(index, dims) for index in _permuted(dims, order)]
    return frozenset(frozenset(devices[i : i + shape[-1]]) for i in range(0, len(devices), shape[-1]))
  lists = re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}", line)
  groups = [frozenset(_ints(group)) for group in re.findall(r"\{([\d,]+)\}", lists[1])] if lists else []
  if "source_target_pairs" in line:  # who sends to whom, in one operation of all of them
    groups = [frozenset().union(*groups)]
  return frozenset(groups)


def _ints(text):
  return [int(number) for number in text.split(",")]


def _permuted(dims, order):
  """Indices of an iota of `dims`, read in the order of its transpose."""
  for permuted in itertools.product(*(range(dims[axis]) for axis in order)):
    index = [0] * len(dims)
    for axis, place in zip(order, permuted):
      index[axis] = place
    yield index


def _flat(index, dims):
  flat = 0
  for place, size in zip(index, dims):
    flat = flat * size + place
  return flat


def _groups_over(dims, axes):
  groups = {}
  for index in itertools.product(*map(range, dims)):
    key = tuple(place for axis, place in enumerate(index) if axis not in axes)
    groups.setdefault(key, set()).add(_flat(index, dims))
  return frozenset(frozenset(group) for group in groups.values())


def open_together(sequence: str, names: dict[int, str]) -> tuple[list[tuple[str, str]], int]:
  """(pairs of names open at the same time on different communication streams, number of NCCL EP calls), in order of issue.

  Args:
    sequence: the text of a thunk sequence.
    names: instruction names by thunk id.
  """
  started, running, pairs, expert_calls = None, {}, [], 0
  for line in sequence.splitlines():
    match = re.match(r"(\s*)(\d+): (k\w+)\s+(.*)", line)
    if not match:
      continue
    indent, number, kind, rest = len(match[1]), int(match[2]), match[3], match[4]
    if kind == "kAsyncStart":
      stream = re.search(r"stream=communication_stream\[(\d+)\], async_id=(\d+)", rest)
      started = (stream[1], stream[2], indent) if stream else None
    elif kind == "kAsyncDone":
      running.pop(re.search(r"async_id=(\d+)", rest)[1], None)
      started = None
    elif started and indent <= started[2]:
      started = None
    elif started and (kind in _COLLECTIVE_THUNKS or "te_ep" in names.get(number, "")):  # others only prepare its operands
      name = names.get(number, f"{kind} {number}")
      expert_calls += kind not in _COLLECTIVE_THUNKS
      pairs += [(other, name) for stream, other in running.values() if stream != started[0]]
      running[started[1]] = (started[0], name)
      started = None
  return pairs, expert_calls


_COLLECTIVE_THUNKS = (
  "kAllGather", "kReduceScatter", "kAllReduce", "kAllToAll", "kRaggedAllToAll", "kCollectivePermute", "kCollectiveKernel",
)  # fmt: skip
