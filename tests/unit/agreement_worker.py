"""One of two processes that ask each other: agreement_worker RANK PORT. Each plays a node of its own; prints what it got, as JSON."""

import json
import logging
import socket
import sys
import types

import jax
import numpy as np

from maxtext_moe_te.errors import MoeTeError, RefusedError, VersionError
from maxtext_moe_te.host import agreement, engine, expert_group, known, parts, selfcheck
from maxtext_moe_te.moe.transport import nccl_ep
from maxtext_moe_te.settings.config import MoeTeOptions

rank, port = int(sys.argv[1]), sys.argv[2]
socket.gethostname = lambda: f"node{rank}"
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
CONFIG = types.SimpleNamespace(
  num_experts=8, num_experts_per_tok=2, micro_batch_size_to_train_on=8, eval_interval=-1, max_target_length=16, emb_dim=64,
  moe_expert_input_dim=-1, attention="dot_product", moe_mlp_dim=64, num_decoder_layers=2, decoder_block="qwen3_moe", hardware="gpu",
  enable_diloco=False, compiled_trainstep_file="",
)  # fmt: skip
GPU = type("Device", (), {"platform": "gpu", "compute_capability": "9.0"})()  # hashable, as jax's are
MESH = types.SimpleNamespace(shape={"expert": 2}, devices=np.array([GPU, GPU]))
NO_NVCC = dict(found="no nvcc", needed="a CUDA compiler", fix="set moe_te.transport=xla")


def refuse_on(*ranks, kind=RefusedError, **fields):
  """A check that some processes fail, each with its rank."""

  def check(*args):
    if rank in ranks:
      raise kind(**{name: text.format(rank=rank) for name, text in fields.items()})

  return check


def told(error):
  return None if error is None else [type(error).__name__, str(error)]


def outcome(call):
  try:
    return call()
  except MoeTeError as error:
    return told(error)


got = {
  "verdicts": agreement.agree(f"because {rank}" if rank else "", "a thing"),
  "again": agreement.agree("" if rank else "not now", "a thing"),
  "all pass": told(agreement.together(refuse_on(), "x")),
  "one refuses": told(agreement.together(refuse_on(1, kind=VersionError, **NO_NVCC), "x")),
  "all refuse": told(agreement.together(refuse_on(0, 1, **NO_NVCC | {"found": "no tool {rank}"}), "x")),
}

said, made = [], []
logging.getLogger("maxtext_moe_te").addHandler(types.SimpleNamespace(level=0, handle=lambda record: said.append(record.getMessage())))
logging.getLogger("maxtext_moe_te").setLevel(logging.INFO)
nccl_ep.bootstrap = lambda *args: made.append(True)
for name, ranks in (("a node without nvcc", (1,)), ("all nodes well", ())):
  for transport in ("auto", "nccl_ep"):
    said.clear()
    made.clear()
    expert_group._check_nccl_ep = refuse_on(*ranks, **NO_NVCC)
    failed = outcome(lambda transport=transport: expert_group.bootstrap(MoeTeOptions(transport=transport), CONFIG, MESH))
    got[f"{name}, {transport}"] = [failed, list(said)[:1], len(made)]

spec = types.SimpleNamespace(dtype=np.dtype("float32"))
old_cublas = dict(found="cuBLAS 13.2.0 at run time", needed="13.4", fix="upgrade")
for options in (MoeTeOptions(), MoeTeOptions(experts="te")):
  engine.experts_error.cache_clear()
  engine.check_experts = refuse_on(1, kind=VersionError, **old_cublas)
  decide = lambda options=options: engine.decide(options, GPU)
  choose = lambda options=options: parts._experts(options, GPU, spec)
  got[f"experts={options.experts}"] = [outcome(decide), outcome(choose), outcome(choose)]  # once asked before tracing, and no more

# MaxText's source: another one on a node, numbers that differ on a node, and all well.
selfcheck._applies = lambda config, options: True
for name, digest, settle in (
  ("another source", f"of {rank}", lambda config, options: "equal"),
  ("other numbers", "of all", lambda config, options: refuse_on(1, **NO_NVCC | {"found": "y is off by 1e-01"})()),
  ("equal numbers", "of all", lambda config, options: f"equal, says {rank}"),
):
  known.judge = lambda group, digest=digest: types.SimpleNamespace(digest=digest)
  selfcheck.settle = settle
  got[name] = outcome(lambda: selfcheck.settle_together(None, MoeTeOptions()))

if rank == 0:
  got["no answer"] = outcome(lambda: agreement.agree("", "what only one asks", timeout_s=0.5))
print("GOT", json.dumps(got), flush=True)
agreement.agree("", "the end")  # the coordinator stays until the other has its answers
