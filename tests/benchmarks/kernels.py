"""Where the time goes, by kernel: reads the Perfetto trace that `jax.profiler.trace(…, create_perfetto_trace=True)` leaves."""

import collections
import gzip
import json
import pathlib
import re

# First match wins. Where a result file has "grouped product" instead, that class held all of cuBLAS's products.
CLASSES = (
  ("expert product", r"ptrGroup|grouped"),
  ("attention", r"cudnn|flash|fmha"),
  ("product", r"nvjet|cublasLt|gemm|sm90_xmma|sm100"),
  ("expert parallel", r"nccl_ep|ncclEp|dispatch|combine_kernel"),
  ("collective", r"nccl|AllReduce|AllGather|ReduceScatter|AllToAll|all_reduce_kernel"),
  ("sort", r"[Rr]adix|cub::|sort"),
  ("top-k", r"topk|TopK"),
  ("copy", r"[Mm]emcpy|[Mm]emset|copy"),
  ("fusion", r"fusion|loop_|input_|wrapped|transpose|concatenate|scatter|gather|select|convert|reduce"),
)
COMMUNICATION = ("expert parallel", "collective")
NEITHER = ("copy",)  # may wait for communication, computes nothing


def class_of(name: str) -> str:
  """The class of a kernel."""
  return next((label for label, pattern in CLASSES if re.search(pattern, name)), "other")


def overlap_of(intervals: list[tuple[float, float, bool]]) -> dict[str, float]:
  """How long one GPU was in which state.

  Args:
    intervals: of each kernel, begin, end, whether it communicates.

  Returns:
    dict: busy (any of them runs), communicating, exposed (it communicates and computes nothing), concurrent (two or more
      communicate), in the unit of `intervals`.
  """
  points = sorted([(begin, 1, talks) for begin, _, talks in intervals] + [(end, -1, talks) for _, end, talks in intervals])
  total, running, last = dict.fromkeys(("busy", "communicating", "exposed", "concurrent"), 0.0), {True: 0, False: 0}, 0.0
  for at, change, talks in points:
    length, talking, computing = at - last, running[True], running[False]
    total["busy"] += length if talking or computing else 0
    total["communicating"] += length if talking else 0
    total["exposed"] += length if talking and not computing else 0
    total["concurrent"] += length if talking > 1 else 0
    running[talks] += change
    last = at
  return total


def of_trace(folder, *, steps: int) -> dict:
  """Milliseconds per step by kernel class and for the 25 longest kernels; how communication overlaps; copies to the host and launches of
  CUDA graphs per step. With several GPUs in the trace, the sum over them.

  Args:
    folder: what was given to `jax.profiler.trace`.
    steps: how many steps the trace covers.
  """
  path = sorted(pathlib.Path(folder).rglob("perfetto_trace.json.gz"))[-1]
  events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
  names = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
  threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
  time, count = collections.Counter(), collections.Counter()
  copies, graphs = collections.Counter(), 0
  intervals = collections.defaultdict(list)
  for event in events:
    if event.get("ph") == "X" and "GraphLaunch" in event["name"]:
      graphs += 1 / steps
    if event.get("ph") == "X" and "MemcpyD2H" in event["name"]:
      details = event.get("args", {})
      copies[str(details.get("memcpy_details", details))] += 1 / steps
    on_gpu = "GPU" in names.get(event.get("pid"), "") and "Stream" in threads.get((event.get("pid"), event.get("tid")), "")
    if event.get("ph") == "X" and on_gpu:
      time[event["name"]] += event["dur"] / 1e3 / steps
      count[event["name"]] += 1 / steps
      if class_of(event["name"]) not in NEITHER:
        intervals[event["pid"]].append((event["ts"], event["ts"] + event["dur"], class_of(event["name"]) in COMMUNICATION))
  classes = collections.Counter()
  for name, ms in time.items():
    classes[class_of(name)] += ms
  overlap = collections.Counter()
  for of_one in intervals.values():
    overlap.update({what: us / 1e3 / steps for what, us in overlap_of(of_one).items()})
  return {
    "copies_to_host": dict(copies.most_common(8)),
    "graph_launches": round(graphs, 1),
    "overlap_ms": {what: round(ms, 3) for what, ms in overlap.items()},
    "by_class_ms": {label: round(ms, 3) for label, ms in classes.most_common()},
    "longest": [{"kernel": name[:120], "ms": round(ms, 3), "launches": round(count[name], 1)} for name, ms in time.most_common(25)],
  }
