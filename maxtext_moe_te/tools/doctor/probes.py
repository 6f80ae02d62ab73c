"""Three short trials on this machine's GPUs, each in processes of its own: an abort there is a finding here.

    python -m maxtext_moe_te.tools.doctor.probes grouped-gemm|offload|expert-parallel RANK RANKS PORT ONE_GPU

`run` starts them and judges what they print.
"""

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time

from maxtext_moe_te.errors import MoeTeError
from maxtext_moe_te.tools.doctor.checks import ERROR, WARNING, Finding

TIMEOUT_S = 150
EXPERTS, ROWS, WIDTH, EXPERT_WIDTH = 8, 32768, 2048, 2048
# By compute capability, a third of what H200 was measured to do at such sizes; Blackwell's by the ratio of the peaks, not measured. A
# shared or throttled GPU stays below.
LEAST_TFLOPS = {"9": 200, "10": 400}
MOST_GEMM_ERROR = 0.02  # relative, Frobenius; bfloat16 results of float32 sums lie near 0.003
MOST_TRANSPORT_ERROR = 0.02


def run(machine, job) -> tuple[dict, list[Finding]]:
  """(what each probe printed, findings)."""
  wanted = {"offload": 1}
  if machine.te and machine.capability.split(".")[0] in ("9", "10", "11"):
    wanted["grouped-gemm"] = 1
    if job.expert_parallel or not job.config:
      wanted["expert-parallel"] = 2
  results, findings = {}, []
  for name, ranks in wanted.items():
    results[name], failure = _start(name, ranks, one_gpu=len(machine.gpus) < ranks)
    findings += judge(name, results[name], failure, machine.capability)
  return results, findings


def _start(name, ranks, *, one_gpu):
  """(result of rank 0 or None, how it failed or None)."""
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
  environment = dict(os.environ, XLA_PYTHON_CLIENT_MEM_FRACTION="0.3", XLA_FLAGS="")
  environment.pop("XLA_CLIENT_MEM_FRACTION", None)
  if one_gpu and ranks > 1:
    environment["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
  command = [sys.executable, "-m", "maxtext_moe_te.tools.doctor.probes", name]
  with tempfile.TemporaryDirectory() as folder:
    # Files, not pipes: one that nobody reads would stop a talkative rank (NCCL_DEBUG=INFO).
    said = [(pathlib.Path(folder) / f"{rank}.out", pathlib.Path(folder) / f"{rank}.err") for rank in range(ranks)]
    processes = []
    end = time.monotonic() + TIMEOUT_S
    try:
      for rank, (out, err) in enumerate(said):
        with out.open("w") as out, err.open("w") as err:
          words = [str(rank), str(ranks), str(port), str(int(one_gpu))]
          processes.append(subprocess.Popen([*command, *words], env=environment, stdout=out, stderr=err, start_new_session=True))
      # The others wait for a rank that failed, and only rank 0 has a result.
      while processes[0].poll() is None and not any(process.poll() for process in processes):
        if time.monotonic() > end:
          return None, f"had not ended after {TIMEOUT_S} s"
        time.sleep(0.1)
      failed = [rank for rank, process in enumerate(processes) if process.poll()] or [0]
    finally:
      for process in processes:
        with contextlib.suppress(ProcessLookupError):
          os.killpg(process.pid, signal.SIGKILL)  # compilers that it started too
      states = [process.wait() for process in processes]
    printed = said[0][0].read_text(errors="replace")
    if "RESULT" in printed:
      return json.loads(printed.split("RESULT", 1)[1].splitlines()[0]), None
    # Of ranks that failed together, the one that did not start the others' coordinator says why.
    last = " | ".join(line.strip() for line in said[failed[-1]][1].read_text(errors="replace").splitlines() if line.strip())[-400:]
  status = states[failed[-1]]
  return None, f"{f'was killed by signal {-status}' if status < 0 else f'ended with status {status}'}: {last}"


def judge(name: str, result: dict | None, failure: str | None, capability: str) -> list[Finding]:
  """The findings of one probe."""
  what = {
    "grouped-gemm": ("Transformer Engine's grouped GEMM", "set moe_te.experts=ragged_dot until it runs"),
    "offload": ("the gradient of offloaded tensors under a scan", "remove moe_te.offload"),
    "expert-parallel": ("NCCL EP's dispatch and combine", "set moe_te.transport=xla until it runs"),
  }[name]
  make = lambda severity, found, needed, fix: [
    Finding(severity=severity, found=found, needed=needed, fix=fix, source=f"the probe {name} on this machine")
  ]
  if result is None:
    return make(ERROR, f"a trial of {what[0]} {failure}", "a trial that ends", what[1])
  if "refused" in result:  # before the kernel was called: a run with `auto` does without it
    return make(WARNING, f"{what[0]} was not tried: {result['refused']}", "what it asks for", what[1])
  if name == "offload":
    if not result["equal"]:
      return make(ERROR, f"{what[0]} is not that of saved ones: relative error {result['error']:.1e}", "the same bits", what[1])
    return []
  most = MOST_GEMM_ERROR if name == "grouped-gemm" else MOST_TRANSPORT_ERROR
  if not result["error"] < most:
    return make(ERROR, f"{what[0]} is off by {result['error']:.1e}", f"a relative error below {most}", what[1])
  least = LEAST_TFLOPS.get(capability.split(".")[0], 0)
  if name == "grouped-gemm" and result["tflops"] < least:
    return make(
      WARNING, f"{what[0]} reaches {result['tflops']:.0f} TFLOP/s here", f"{least} or more on such a GPU",
      "look for other processes and for throttling in nvidia-smi",
    )  # fmt: skip
  return []


def grouped_gemm() -> dict:
  """Rate and error of one grouped product, against float32 sums of each group."""
  import time

  import jax
  import jax.numpy as jnp
  import numpy as np

  from maxtext_moe_te.moe import te_api, te_runtime
  from maxtext_moe_te.moe.experts import reference, te

  engine = te_api.installed()
  engine.require("experts")
  engine.check_gpu(jax.devices()[0].compute_capability)
  te_runtime.check_grouped_gemm(jax.devices()[0].compute_capability)
  rows = jax.random.normal(jax.random.key(0), (ROWS, WIDTH), jnp.bfloat16)
  weights = jax.random.normal(jax.random.key(1), (EXPERTS, WIDTH, EXPERT_WIDTH), jnp.bfloat16)
  sizes = np.random.default_rng(0).dirichlet(np.ones(EXPERTS)) * ROWS
  sizes = jnp.asarray(np.diff(np.floor(np.cumsum([0, *sizes]))).astype(np.int32))
  multiply = jax.jit(te.grouped_matmul)
  out = jax.block_until_ready(multiply(rows, weights, sizes))
  start = time.perf_counter()
  for _ in range(10):
    out = multiply(rows, weights, sizes)
  jax.block_until_ready(out)
  seconds = (time.perf_counter() - start) / 10
  used = int(sizes.sum())
  wanted = reference.grouped_matmul(rows.astype(jnp.float32), weights.astype(jnp.float32), sizes)[:used]
  error = jnp.linalg.norm(out[:used].astype(jnp.float32) - wanted) / jnp.linalg.norm(wanted)
  return {"tflops": round(2 * used * WIDTH * EXPERT_WIDTH / seconds / 1e12, 1), "error": float(error)}


def offload() -> dict:
  """Whether gradients through a scan are the same with residuals on the host as with residuals on the device."""
  import jax
  import jax.numpy as jnp
  from jax.ad_checkpoint import checkpoint_name

  save = jax.checkpoint_policies.save_only_these_names("kept")
  move = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[], names_which_can_be_offloaded=["kept"], offload_src="device", offload_dst="pinned_host"
  )

  def gradient(policy):
    def loss(weights, x):
      def layer(x, w):
        kept = checkpoint_name(x @ w, "kept")
        return jnp.tanh(kept) * jnp.sin(kept), None

      return (jax.lax.scan(jax.checkpoint(layer, policy=policy), x, weights)[0] ** 2).sum()

    return jax.jit(jax.grad(loss))

  weights = jax.random.normal(jax.random.key(0), (8, 512, 512), jnp.float32) / 16
  x = jax.random.normal(jax.random.key(1), (1024, 512), jnp.float32)
  saved, moved = gradient(save)(weights, x), gradient(move)(weights, x)
  error = jnp.linalg.norm(saved - moved) / jnp.linalg.norm(saved)
  return {"equal": bool((saved == moved).all() & (jnp.abs(saved).max() > 0)), "error": float(error)}


def expert_parallel(rank: int, ranks: int, port: int, one_gpu: bool) -> dict:
  """How far tokens that are dispatched, weighted with weights that add up to 1, and combined, are from themselves."""
  import jax

  from maxtext_moe_te.moe import te_api, te_runtime

  te_api.installed().require("nccl_ep")  # refuses on every rank, before they wait for each other
  te_runtime.prepare_nccl_ep()
  jax.distributed.initialize(f"127.0.0.1:{port}", ranks, rank, local_device_ids=[0 if one_gpu else rank])
  import jax.numpy as jnp
  import numpy as np
  from jax.sharding import Mesh, NamedSharding
  from jax.sharding import PartitionSpec as P

  from maxtext_moe_te.moe.transport import nccl_ep

  tokens, width, experts, k = 256, 512, 4 * ranks, 2
  mesh = Mesh(np.array(jax.devices()), ("expert",))
  group = nccl_ep.Bootstrap(num_experts=experts, experts_per_token=k, ranks=ranks, max_tokens_per_rank=tokens, width=width)
  nccl_ep.bootstrap(group, mesh, "expert")
  transport = nccl_ep.NcclEpTransport(group)

  def round_trip(x, ids, weights):
    sent = transport.dispatch(x, ids, weights, distinct=True)
    used = jnp.arange(sent.rows.shape[0]) < sent.group_sizes.sum()
    rows = jnp.where(used[:, None], sent.rows.astype(jnp.float32) * sent.row_weights[:, None], 0).astype(jnp.bfloat16)
    return transport.combine(rows, sent.handle, sum_dtype=jnp.float32)

  random = np.random.default_rng(0)
  ids = np.argsort(random.random((ranks * tokens, experts)), axis=1)[:, :k].astype(np.int32)
  weights = random.dirichlet(np.ones(k), ranks * tokens).astype(np.float32)
  x = random.standard_normal((ranks * tokens, width), np.float32).astype(jnp.bfloat16)
  split = NamedSharding(mesh, P("expert"))
  placed = [jax.make_array_from_callback(a.shape, split, lambda index, a=a: a[index]) for a in (x, ids, weights)]
  run = jax.shard_map(round_trip, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"), check_vma=False)
  with jax.set_mesh(mesh):
    y = jax.jit(run)(*placed)
  here = y.addressable_shards[0]
  wanted = np.asarray(x[here.index], np.float32)
  error = np.linalg.norm(np.asarray(here.data, np.float32) - wanted) / np.linalg.norm(wanted)
  if rank == 0:
    print("RESULT", json.dumps({"error": float(error), "ranks": ranks, "one_gpu": one_gpu}), flush=True)
  nccl_ep.finalize()
  return {}


def main(name: str, rank: str = "0", ranks: str = "1", port: str = "0", one_gpu: str = "1") -> None:
  """One process of a probe; rank 0 prints its result."""
  try:
    if name == "expert-parallel":
      expert_parallel(int(rank), int(ranks), int(port), one_gpu == "1")
      return
    result = {"grouped-gemm": grouped_gemm, "offload": offload}[name]()
  except MoeTeError as error:
    result = {"refused": error.found}
  print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
  main(*sys.argv[1:])
