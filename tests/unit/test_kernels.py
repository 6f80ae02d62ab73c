"""What benchmarks read from a profile, on a made-up one."""

import gzip
import json

import pytest

from tests.benchmarks import kernels


@pytest.mark.parametrize(
  ("intervals", "expected"),
  [
    ([], (0, 0, 0, 0)),
    ([(0, 4, False), (6, 8, False)], (6, 0, 0, 0)),
    ([(0, 4, True), (2, 6, False)], (6, 4, 2, 0)),
    ([(0, 4, True), (1, 3, True), (2, 10, False)], (10, 4, 2, 2)),
    ([(0, 4, True), (4, 8, True)], (8, 8, 8, 0)),  # one after the other is not side by side
  ],
)
def test_overlap(intervals, expected):
  assert tuple(kernels.overlap_of(intervals).values()) == expected


def test_a_trace(tmp_path):
  process = [{"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}} for pid, name in ((1, "/device:GPU:0"), (9, "host"))]
  streams = [
    {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
    for pid, tid, name in ((1, 1, "Stream #1"), (1, 2, "Stream #2"), (9, 1, "python"))
  ]
  kernel = lambda name, start, length, tid=1, pid=1: {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": start, "dur": length}
  events = [
    kernel("nvjet_sm90", 0, 4000), kernel("ncclDevKernel_AllGather", 2000, 4000, tid=2), kernel("cudaGraphLaunch", 0, 1, pid=9),
    kernel("loop_fusion", 8000, 1000), kernel("cudnn_sdpa_sm100", 9000, 1000), kernel("python frame", 0, 90000, pid=9),
    kernel("nvjet_sm90_h_ptrGroup_TNT", 10000, 3000), kernel("gemm_fusion_dot_1", 13000, 1000),
  ]  # fmt: skip
  (tmp_path / "perfetto_trace.json.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": process + streams + events}).encode()))
  found = kernels.of_trace(tmp_path, steps=2)
  assert found["by_class_ms"] == {"product": 2.5, "collective": 2.0, "expert product": 1.5, "fusion": 0.5, "attention": 0.5}
  assert found["overlap_ms"] == {"busy": 6.0, "communicating": 2.0, "exposed": 1.0, "concurrent": 0.0}
  assert found["graph_launches"] == 0.5 and found["longest"][0] == {"kernel": "nvjet_sm90", "ms": 2.0, "launches": 0.5}
