"""`auto` for the capacity and the parts of a run: decided once, by the memory there is, and nothing is lost whichever it takes."""

import logging

import pytest

from maxtext_moe_te.settings.config import MoeTeOptions
from tests import helpers

pytestmark = pytest.mark.host

WORDS = ["model_name=mixtral-8x7b", "base_num_decoder_layers=2", "ici_expert_parallelism=4", "ici_fsdp_parallelism=2", "steps=3"]
WORDS += ["max_target_length=256"]  # the rows of an expert are counted in multiples of 128


@pytest.fixture
def memory():
  """Says how much XLA's pool has."""
  from maxtext_moe_te.host import receive

  yield receive.assume_memory
  receive._assumed.clear()
  receive._settled.clear()


@pytest.mark.parametrize(
  ("on_overflow", "said", "of_worst"),
  [
    ("exact", "moe_te.capacity_factor=2 moe_te.chunks=1: the worst case of ", 2 / 4),
    ("stop", "moe_te.capacity_factor=0 moe_te.chunks=32: the worst case of ", 1 / 32),
  ],
)
def test_where_the_worst_case_does_not_fit(tmp_path, memory, caplog, on_overflow, said, of_worst):
  caplog.set_level(logging.INFO, "maxtext_moe_te")
  whole = helpers.train_keeping_gradients(tmp_path, WORDS, options=MoeTeOptions(capacity_factor=0, chunks=1))
  memory(0)
  small = helpers.train_keeping_gradients(tmp_path, WORDS, options=MoeTeOptions(on_overflow=on_overflow))
  helpers.assert_same_training(small, whole, moved=0.002)
  assert caplog.text.count(said) == 1
  held, worst = (metrics[-1]["moe_te/receive_capacity"] for metrics, _ in (small, whole))
  assert held == pytest.approx(of_worst * worst)
  assert ("moe_te/replayed" in small[0][-1]) == (on_overflow == "exact")


def test_where_it_fits_the_step_is_left_alone(tmp_path, memory, caplog):
  caplog.set_level(logging.INFO, "maxtext_moe_te")
  memory(2**40)
  metrics = helpers.train(tmp_path, WORDS, options=MoeTeOptions())
  assert "moe_te/replayed" not in metrics[-1] and metrics[-1]["moe_te/overflow"] == 0
  assert "moe_te.capacity_factor=" not in caplog.text


def test_what_is_given_stays(memory):
  from maxtext_moe_te.host import receive

  memory(0)
  config = helpers.maxtext_config("mixtral-8x7b", ici_expert_parallelism=4, ici_fsdp_parallelism=1, max_target_length=1024)
  sizes = {"expert": 4}
  settled = lambda **given: receive.settled(MoeTeOptions(**given), config, sizes, finite=True)
  taken = lambda options: (options.capacity_factor, options.chunks)
  assert taken(settled(capacity_factor=1.5)) == (1.5, 1)
  assert taken(settled(chunks=2)) == (2.0, 2)
  assert taken(settled(capacity_factor=0)) == (0, 1)
  assert taken(settled(capacity_factor=0, chunks=4)) == (0, 4)
  assert taken(receive.settled(MoeTeOptions(), config, {"expert": 1}, finite=True)) == (0, 1)


@pytest.mark.parametrize("words", [dict(optimizer_memory_host_offload=True), dict(compiled_trainstep_file="x")])
def test_parts_where_no_step_can_run_again(memory, words):
  from maxtext_moe_te.host import receive

  memory(0)
  config = helpers.maxtext_config("mixtral-8x7b", ici_expert_parallelism=4, ici_fsdp_parallelism=1, max_target_length=1024, **words)
  taken = receive.settled(MoeTeOptions(), config, {"expert": 4}, finite=True)
  assert (taken.capacity_factor, taken.chunks) == (0, 32)


def test_the_first_question_decides(memory):
  """The layer asks what the group of NCCL EP was made for, also where a later one would be answered otherwise."""
  from maxtext_moe_te.host import receive

  memory(0)
  config = helpers.maxtext_config("mixtral-8x7b", ici_expert_parallelism=4, ici_fsdp_parallelism=1, max_target_length=1024)
  first = receive.settled(MoeTeOptions(), config, {"expert": 4}, finite=True)
  receive._assumed[:] = [2**40]
  assert receive.settled(MoeTeOptions(), config, {"expert": 4}) == first
