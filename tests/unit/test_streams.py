"""What XLA's texts say about collectives: groups in all four forms, pairs that may overlap, pairs that do."""

import textwrap

import pytest

from maxtext_moe_te.tools import streams

MESH = "mesh['data'=2,'stage'=1,'fsdp'=4]"
OUTER, INNER = frozenset({frozenset({i, i + 4}) for i in range(4)}), frozenset({frozenset(range(4)), frozenset(range(4, 8))})


@pytest.mark.parametrize(
  ("text", "groups"),
  [
    (f"replica_groups={MESH} {{'fsdp'}}, use", INNER),
    (f"replica_groups={MESH} {{'data'}}, use", OUTER),
    (f"replica_groups={MESH} {{'data','fsdp'}}, use", {frozenset(range(8))}),
    ("replica_groups=[2,4]<=[8], use", INNER),
    ("replica_groups=[4,2]<=[2,4]T(1,0), use", OUTER),
    ("replica_groups={{0,4},{1,5},{2,6},{3,7}}, use", OUTER),
    ("source_target_pairs={{0,1},{1,2}}, use", {frozenset({0, 1, 2})}),
  ],
)
def test_replica_groups(text, groups):
  assert streams.replica_groups(f"  %x = f32[8]{{0}} all-gather(%y), {text}") == frozenset(groups)


PROGRAM = textwrap.dedent(
  f"""\
  HloModule jit_train_step, is_scheduled=true

  %async_computation.1 (p: bf16[2,8]) -> bf16[8,8] {{
    ROOT %all-gather.1 = (bf16[8,8]{{1,0}}, s8[8]{{0}}) all-gather(%p), replica_groups={MESH} {{'fsdp'}}
  }}

  %body (p: (bf16[2,8])) -> (bf16[2,8]) {{
    %all-gather-start = ((bf16[2,8]), bf16[8,8]) async-start(%x), calls=%async_computation.1
    %all-reduce.1 = f32[4]{{0}} all-reduce(%z), replica_groups={MESH} {{'data'}}, x="SCALE_UP_FABRIC"
    %all-reduce.2 = f32[] all-reduce(%z), replica_groups={MESH} {{'stage'}}
  }}

  ENTRY %main (p: f32[]) -> f32[] {{
    %reduce-scatter-start.1 = ((f32[8]), f32[2]) reduce-scatter-start(%q), replica_groups=[2,4]<=[8]
  }}
  """
)
SEQUENCE = """\
000: kAsyncStart [x] stream=communication_stream[0], async_id=0
    001: kReduceScatter [source | sink] kReduceScatter
002: kWhile
    003: kAsyncStart [x] stream=communication_stream[{stream}], async_id=3
        004: kKernel [x] prepares
        005: kAllGather [x] kAllGather
    006: kGemm [x]
    007: kAsyncDone [x] async_id=3
    008: kAsyncStart [x] stream=communication_stream[1], async_id=8
        009: kCustomCall [x] te
    010: kAsyncDone [x] async_id=8
    011: kAsyncStart [x] stream=computation_stream[1], async_id=11
        012: kGemm [x]
013: kAsyncDone [x] async_id=0
014: kAsyncStart [x] stream=communication_stream[1], async_id=14
    015: kAllReduce [source | sink] kAllReduce
"""
NAMES = {1: "reduce-scatter-start.1", 4: "loop_fusion", 5: "all-gather.1", 9: "te_ep_dispatch_ffi.1", 15: "all-reduce.1"}


@pytest.fixture
def dump(tmp_path):
  def write(stream):
    stem = "module_0001.jit_train_step."
    (tmp_path / f"{stem}sm_9.0a_gpu_after_optimizations.txt").write_text(PROGRAM)
    (tmp_path / f"{stem}thunk_sequence.txt").write_text(SEQUENCE.format(stream=stream))
    metadata = "".join(f'profile_annotation: "{name}"\n    thunk_id: {number}\n' for number, name in NAMES.items())
    (tmp_path / f"{stem}thunk_metadata.txt").write_text(metadata)
    return tmp_path

  return write


def test_collectives_stand_where_they_are_started():
  found = {one.name: one for one in streams.collectives(PROGRAM)}
  assert {name: one.computation for name, one in found.items()} == {
    "all-gather.1": "body",
    "all-reduce.1": "body",
    "reduce-scatter-start.1": "main",
  }, "a collective of one device is none"
  assert found["all-gather.1"].shared_devices(found["all-reduce.1"]) == 1
  assert found["all-gather.1"].shared_devices(found["reduce-scatter-start.1"]) == 4


def test_two_streams(dump):
  report = streams.report(dump(1))
  assert (report.collectives, report.in_domain, report.eligible, report.expert_calls) == (3, 1, 1, 1)
  assert report.overlapped == [("reduce-scatter-start.1", "all-gather.1"), ("reduce-scatter-start.1", "te_ep_dispatch_ffi.1")]
  assert report.hazards == report.overlapped, "the same four devices in both; an NCCL EP call names none"


def test_one_stream_runs_one_after_the_other(dump):
  assert streams.report(dump(0)).overlapped == [("reduce-scatter-start.1", "te_ep_dispatch_ffi.1")]


def test_no_dump(tmp_path):
  with pytest.raises(FileNotFoundError, match=r"no .*gpu_after_optimizations"):
    streams.report(tmp_path)
