"""What a rank may receive, and the capacity and parts that a run takes by itself."""

import json

import pytest

from maxtext_moe_te.moe import capacity
from maxtext_moe_te.moe.capacity import GIB
from maxtext_moe_te.tools.capacity import main

DEEPSEEK3 = dict(ranks=8, tokens=8192, experts_per_token=8, num_experts=256, width=7168, hidden=2048)
# MaxText's keys, as the doctor resolves them, of DeepSeek-V3 on 128 GPUs, expert 8 x fsdp 16.
CONFIG = dict(
  num_experts=256, num_experts_per_tok=8, emb_dim=7168, moe_expert_input_dim=-1, moe_mlp_dim=2048, mlp_dim=18432, num_decoder_layers=61,
  first_num_dense_layers=3, decoder_block="deepseek", max_target_length=4096, micro_batch_size_to_train_on=256, weight_dtype="bfloat16",
  mu_dtype="bfloat16", opt_type="adamw",
)  # fmt: skip
AXES = {"fsdp": 16, "expert": 8}


def test_the_worst_case_is_that_of_every_token():
  """All 65,536 tokens of the group can send their 8 rows here: 8 times what balanced routing sends."""
  received = capacity.Received(**DEEPSEEK3)
  assert received.rows() == 8 * 65536 + 32 * 128
  assert received.rows(2.0) == 2 * 65536 and received.rows(1.0, 8) == 8192
  assert received.rows(0.0, 8) == 65536 + 32 * 128
  assert received.rows(100.0) == received.rows()


def test_bytes_grow_as_a_compiled_step_does():
  """Temporaries of a step of one DeepSeek-V3 layer, compiled for an H200 at expert 8: 31.6 GiB for the worst case, 10.3 in 8 parts."""
  received = capacity.Received(**DEEPSEEK3)
  assert (received.buffer_bytes() - received.buffer_bytes(0.0, 8)) / GIB == pytest.approx(31.6 - 10.3, rel=0.2)


@pytest.mark.parametrize(
  ("room_gib", "finite", "chunks", "wanted"),
  [
    (45, True, None, (0.0, 1)),
    (38, True, None, (2.0, 1)),
    (38, False, None, (0.0, 2)),
    (12, True, None, (2.0, 1)),
    (6, False, None, (0.0, 8)),
    (0.1, False, None, (0.0, 32)),  # as few rows as can be: what else does not fit is not for us to say
    (38, True, 2, (0.0, 2)),
    (12, True, 2, (2.0, 2)),
    (12, False, 2, (0.0, 2)),
    (None, True, None, (0.0, 1)),
    (None, True, 4, (0.0, 4)),
  ],
)
def test_what_is_chosen(room_gib, finite, chunks, wanted):
  room = None if room_gib is None else int(room_gib * GIB)
  choice = capacity.choose(capacity.Received(**DEEPSEEK3), room, finite=finite, chunks=chunks)
  assert (choice.capacity_factor, choice.chunks) == wanted
  assert bool(choice.why) == (wanted not in ((0.0, 1), (0.0, 4)) and (room_gib, chunks) != (38, 2))
  if choice.why:
    assert "the worst case of " in choice.why and f"of {room_gib:.1f} GiB" in choice.why


def test_parts_divide_the_tokens():
  choice = capacity.choose(capacity.Received(**DEEPSEEK3 | dict(tokens=6000)), 10 * GIB, finite=False)
  assert choice.chunks == 4 and 6000 % choice.chunks == 0
  odd = capacity.choose(capacity.Received(**DEEPSEEK3 | dict(tokens=8191)), GIB, finite=False)
  assert odd.chunks == 1


@pytest.mark.parametrize(
  ("memory_gib", "given", "wanted"),
  [
    (118, {}, (0.0, 1)),
    (70, {}, (2.0, 1)),
    (70, dict(finite=False), (0.0, 2)),
    (70, dict(capacity_factor=0.0), (0.0, 1)),  # as asked for
    (70, dict(capacity_factor=1.25, chunks=2), (1.25, 2)),
    (None, {}, (0.0, 1)),
  ],
)
def test_a_configuration_decides(memory_gib, given, wanted):
  arguments = dict(capacity_factor=None, chunks=None, finite=True) | given
  choice = capacity.decided(CONFIG, AXES, memory=None if memory_gib is None else memory_gib * GIB, **arguments)
  assert (choice.capacity_factor, choice.chunks) == wanted


def test_without_an_expert_axis_nothing_travels():
  choice = capacity.decided(CONFIG, {"fsdp": 128}, capacity_factor=None, chunks=None, memory=GIB, finite=True)
  assert choice == capacity.Choice(0.0, 1)


def test_what_the_weights_take_is_not_for_rows():
  """58 layers of 256 experts, three matrices of 7168 x 2048 each, in bfloat16 and with two moments, over 128 GPUs."""
  assert capacity.least_state_bytes(CONFIG, AXES) == 58 * 256 * 3 * 7168 * 2048 * 6 // 128
  assert capacity.least_state_bytes(CONFIG | {"opt_type": "sgd"}, AXES) == 58 * 256 * 3 * 7168 * 2048 * 2 // 128
  assert capacity.least_state_bytes(CONFIG | {"weight_dtype": "float32", "mu_dtype": ""}, AXES) == 58 * 256 * 3 * 7168 * 2048 * 12 // 128


@pytest.mark.host
@pytest.mark.parametrize(("memory", "wanted"), [("160", (0.0, 1)), ("80", (2.0, 1)), (None, (0.0, 1))])
def test_the_command_shows_the_choice(capsys, monkeypatch, memory, wanted):
  from maxtext_moe_te.tools import doctor
  from maxtext_moe_te.tools.doctor import facts

  answer = {"config": CONFIG | {"axis_sizes": AXES, "model_name": "deepseek3-671b"}, "refused": None}
  monkeypatch.setattr(doctor, "ask_maxtext", lambda *_: answer)
  monkeypatch.setattr(facts, "gather", lambda: facts.Machine(python="3.12"))
  monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
  words = ["model_name=deepseek3-671b", *(["--memory", memory] if memory else [])]
  assert main([*words, "--json"]) == 0
  report = json.loads(capsys.readouterr().out)
  assert (report["takes"]["capacity_factor"], report["takes"]["chunks"]) == wanted
  fits = {(row["capacity_factor"], row["chunks"]): row["fits"] for row in report["rows"]}
  assert fits[wanted] is (None if memory is None else True)
  assert main(words) == 0
  shown = capsys.readouterr().out
  assert "deepseek3-671b on fsdp 16 x expert 8: 8,192 tokens a rank" in shown
  assert shown.splitlines()[-1].startswith(f"the run takes moe_te.capacity_factor={wanted[0]:g} moe_te.chunks=1")
