"""What one process of a run cannot do, none does: two processes, each a node of its own."""

import json
import os
import socket
import subprocess
import sys

import pytest

from maxtext_moe_te.errors import RefusedError
from maxtext_moe_te.host import agreement
from tests.processes import finish

WITHOUT_NVCC = "no nvcc on node1 (process 1)"
REFUSED = ["RefusedError", f"{WITHOUT_NVCC}; needed: a CUDA compiler. Fix: set moe_te.transport=xla."]
WITHOUT_CUBLAS = "cuBLAS 13.2.0 at run time on node1 (process 1)"
EXPECTED = {
  "verdicts": [[0, "node0", ""], [1, "node1", "because 1"]],
  "again": [[0, "node0", "not now"], [1, "node1", ""]],
  "all pass": None,
  "one refuses": ["VersionError", REFUSED[1]],
  "all refuse": [
    "RefusedError",
    "no tool 0 on node0 (process 0, and 1 more of 2 processes refuse); needed: a CUDA compiler. Fix: set moe_te.transport=xla.",
  ],
  "another source": [
    "RefusedError",
    "process 1 on node1 imports another source of MaxText than most of the 2 processes; needed: the same in all of them. Fix: install on "
    "node1 what the others have.",
  ],
  "other numbers": ["RefusedError", "y is off by 1e-01 on node1 (process 1); needed: a CUDA compiler. Fix: set moe_te.transport=xla."],
  "a node without nvcc, auto": [None, [f"NCCL EP not used: {WITHOUT_NVCC}"], 0],
  "a node without nvcc, nccl_ep": [REFUSED, [], 0],
  "experts=auto": [None, *[["ragged_dot", f" [{WITHOUT_CUBLAS}]"]] * 2],
  "experts=te": [["VersionError", f"{WITHOUT_CUBLAS}; needed: 13.4. Fix: upgrade."]] * 3,
}


@pytest.fixture(scope="module")
def answers():
  """What each of the two got, in one pair of processes."""
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = str(free.getsockname()[1])
  environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
  command = [sys.executable, "-m", "tests.unit.agreement_worker"]
  processes = [
    subprocess.Popen([*command, str(rank), port], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for rank in range(2)
  ]
  ended = [finish(process) for process in processes]
  assert [status for status, _, _ in ended] == [0, 0], ended
  return [json.loads(out.split("GOT", 1)[1]) for _, out, _ in ended]


@pytest.mark.parametrize("question", EXPECTED)
def test_all_processes_get_the_same_answer(answers, question):
  assert [answer[question] for answer in answers] == [EXPECTED[question]] * 2


def test_equal_numbers_are_told_by_each(answers):
  assert [answer["equal numbers"] for answer in answers] == ["equal, says 0", "equal, says 1"]


@pytest.mark.parametrize("transport", ["auto", "nccl_ep"])
def test_all_make_a_group_where_all_can(answers, transport):
  for failed, said, made in (answer[f"all nodes well, {transport}"] for answer in answers):
    assert failed is None and made == 1 and said[0].startswith("NCCL EP group: ")


def test_a_process_that_does_not_answer_is_named(answers):
  kind, text = answers[0]["no answer"]
  assert kind == "RefusedError"
  assert text == (
    "process 1 on node1 of 2 has not said within 0.5 s whether it can use what only one asks; needed: all processes of the run, of one "
    "configuration. Fix: look at the end of the log of process 1."
  )


def test_a_process_alone_asks_nobody(monkeypatch):
  monkeypatch.setattr(socket, "gethostname", lambda: "here")
  assert agreement.agree("no", "x") == [(0, "here", "no")]
  error = RefusedError(found="a", needed="b", fix="c")

  def check():
    raise error

  assert agreement.together(check, "x") is error, "no node to name"
  assert agreement.together(lambda: None, "x") is None
