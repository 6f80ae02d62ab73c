"""Random rules, shapes, meshes, parts and loads against the oracle.

A case is one comparison of the output, the load, the loss and every gradient. Compiling costs far more than comparing, so a run draws
a pool of problems (everything static) and hypothesis draws cases from it (the numbers). `--fuzz-cases N [--fuzz-seed S]` compares
more of them and records the result in fuzz_result.json.
"""

import dataclasses
import datetime
import json
import random
from pathlib import Path

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from maxtext_moe_te.moe import block
from maxtext_moe_te.moe.capacity import chunks_within
from maxtext_moe_te.moe.experts.base import ExpertWeights
from maxtext_moe_te.moe.routing import BalanceLoss, RouterInputs
from maxtext_moe_te.moe.rules import ExpertRule, RouterRule, Selection, Weighting
from maxtext_moe_te.moe.transport.local import LocalTransport
from maxtext_moe_te.moe.transport.xla import XlaTransport
from tests import helpers, tolerances
from tests.numerics import contract, oracle

RESULT = Path(__file__).with_name("fuzz_result.json")
CASES = 500
CASES_PER_PROBLEM = 200  # in a long run; a short one has PROBLEMS
PROBLEMS = 36
# Where a score or an activation lies closer than this to where the result jumps, two exact computations may differ.
MARGIN = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
  """Everything static.

  Attributes:
    spec: what to compute.
    axes: mesh axes and sizes, as pairs; "expert" splits experts, "tensor" their width, "data" only tokens.
    batch_axes, sequence_axes: which of them split B and S.
    shape: B, S, D, F.
    experts, alignment: the parts.
    capacity_factor, chunks: how many rows a rank can receive of a part, and in how many parts its tokens go.
    biases, fused, replayed: which arrays there are.
  """

  spec: block.LayerSpec
  axes: tuple[tuple[str, int], ...]
  batch_axes: tuple[str, ...]
  sequence_axes: tuple[str, ...]
  shape: tuple[int, int, int, int]
  experts: str
  alignment: int
  capacity_factor: float
  chunks: int
  biases: bool
  fused: bool
  replayed: bool

  @property
  def layout(self) -> block.Layout:
    sizes = [size for _, size in self.axes]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes), [name for name, _ in self.axes])
    given = lambda name: (name,) if mesh.shape.get(name, 1) > 1 else ()
    return block.Layout(mesh=mesh, batch=self.batch_axes, sequence=self.sequence_axes, expert=given("expert"), width=given("tensor"))

  @property
  def parts(self) -> block.Parts:
    layout = self.layout
    ranks = layout.size(layout.expert)
    transport = LocalTransport(self.spec.num_experts, self.alignment)
    if ranks > 1:
      split = set(layout.expert) <= set(layout.tokens)
      transport = XlaTransport(self.spec.num_experts, layout.expert, ranks, split, self.alignment, self.capacity_factor)
    return block.Parts(transport=transport, grouped_matmul=block.GROUPED_MATMULS[self.experts], chunks=self.chunks)

  @property
  def holding(self) -> block.Parts:
    """The parts with which a step runs again that needed more rows: they hold whatever the routing, in as many parts as that takes."""
    parts, router = self.parts, self.spec.router
    finite, distinct = parts.transport, router.selection is Selection.TOP and not self.replayed
    worst = dataclasses.replace(finite, capacity_factor=0.0)
    group = finite.ranks if finite.tokens_split else 1
    tokens = self.shape[0] * self.shape[1] // self.layout.size(self.layout.tokens)
    rows = lambda of_part: worst.capacity(of_part * group, router.experts_per_token, distinct)
    held = finite.capacity(tokens // self.chunks * group, router.experts_per_token, distinct)
    return dataclasses.replace(parts, transport=worst, chunks=chunks_within(rows, held, tokens, at_least=self.chunks))


def draw_problem(rng: random.Random) -> Problem:
  """A problem that makes sense; the rules come in combinations that no model has."""
  devices = rng.choice([1, 2, 4, 8])
  expert = rng.choice([n for n in (1, 2, 4, 8) if n <= devices])
  tensor = rng.choice([n for n in (1, 2) if n * expert <= devices])
  axes = (("data", devices // (expert * tensor)), ("expert", expert), ("tensor", tensor))
  batch, sequence = rng.choice([(1, 8), (2, 16), (4, 5), (8, 1), (8, 3), (8, 7), (16, 2), (3, 11)])
  batch_axes, sequence_axes = [], []
  for name, size in axes[:2]:  # tokens are never split over "tensor"
    used = lambda taken: int(np.prod([dict(axes)[axis] for axis in taken]))
    if size > 1 and batch % (used(batch_axes) * size) == 0:
      batch_axes.append(name)
    elif size > 1 and sequence % (used(sequence_axes) * size) == 0:
      sequence_axes.append(name)

  tokens = batch * sequence // int(np.prod([dict(axes)[axis] for axis in (*batch_axes, *sequence_axes)]))
  experts = rng.choice([n for n in (4, 8, 16) if n % expert == 0])
  weighting = rng.choice(list(Weighting))
  on_input = weighting is Weighting.SIGMOID and rng.random() < 0.7
  k = 1 if on_input else rng.randint(1, 4)
  score = rng.choice(["sigmoid", "sqrtsoftplus", "softmax"] + [""] * (weighting is not Weighting.SCORES))
  selection = rng.choice([Selection.TOP] * 4 + [Selection.TABLE])
  groups = rng.choice([0, 0, 2, 4]) if selection is Selection.TOP else 0
  groups = 0 if groups and experts // groups < 2 else groups
  enough = [n for n in range(1, groups + 1) if n * (experts // groups) >= k] if groups else [0]
  replayed = not on_input and rng.random() < 0.15
  router = RouterRule(
    experts_per_token=k, selection=selection, score_function=score, bias=rng.random() < 0.5,
    weights_ignore_bias=rng.random() < 0.5, groups=groups, groups_kept=rng.choice(enough), weighting=weighting,
    renormalize=weighting is not Weighting.SIGMOID and rng.random() < 0.5, renormalize_epsilon=1e-20,
    scale=1.0 if on_input else rng.choice([1.0, 2.5]), expert_scale=not on_input and rng.random() < 0.3,
    weight_on_input=on_input,
  )  # fmt: skip
  expert_rule = ExpertRule(
    activation=rng.choice(list(oracle.ACTIVATIONS)), clamp=rng.choice([None, 0.5]), gate_scale=rng.choice([1.0, 1.702]),
    self_gated=rng.random() < 0.3, up_offset=rng.choice([0.0, 1.0]), activation_in_float32=rng.random() < 0.3,
  )  # fmt: skip
  spec = block.LayerSpec(
    num_experts=experts, router=router, expert=expert_rule, dtype=jnp.dtype(jnp.float32), sum_dtype=jnp.dtype(jnp.float32),
    load_balance_coefficient=rng.choice([0.0, 0.01, 0.01]),
    balance_loss=rng.choice(list(BalanceLoss)) if score else BalanceLoss.SWITCH_SEQUENCE,
  )  # fmt: skip
  return Problem(
    spec=spec, axes=axes, batch_axes=tuple(batch_axes), sequence_axes=tuple(sequence_axes),
    shape=(batch, sequence, rng.choice([8, 16]), rng.choice([4, 8, 16])), experts=rng.choice(sorted(block.GROUPED_MATMULS)),
    alignment=rng.choice([1, 1, 4]), capacity_factor=rng.choice([0.0, 1.0, 1.25, 2.0]) if expert > 1 else 0.0,
    chunks=rng.choice([1, rng.choice([c for c in range(1, tokens + 1) if tokens % c == 0])]),
    biases=rng.random() < 0.5, fused=tensor == 1 and rng.random() < 0.5, replayed=replayed,
  )  # fmt: skip


LOADS = ("even", "few", "one", "equal", "pairs", "coarse", "by sequence")


def arrays_of(problem: Problem, seed: int, load: str, spread: float, unused: float):
  """(arrays, cotangent) as `contract.run_block` takes them."""
  rng = np.random.default_rng(seed)
  (batch, sequence, width, hidden), experts = problem.shape, problem.spec.num_experts
  normal = lambda *shape, scale=1.0: jnp.asarray(rng.normal(0, scale, shape), jnp.float32)
  logits = rng.normal(0, spread, (batch, sequence, experts))
  match load:
    case "few":
      logits[..., rng.random(experts) < 0.7] -= 8
    case "one":
      logits[..., rng.integers(experts)] += 8
    case "equal":
      logits[...] = spread
    case "pairs":
      logits[..., 1::2] = logits[..., ::2]
    case "coarse" if not problem.spec.router.groups:  # groups of equal sums in one precision are none in another
      logits = np.round(logits) + 0.0  # no -0.0: top_k orders it before 0.0, which is no tie
    case "by sequence":
      logits += rng.normal(0, 4, (batch, 1, experts))
  rule = problem.spec.router
  chosen = lambda: rng.integers(0, experts, (batch, sequence, rule.experts_per_token))
  table = jnp.asarray(chosen(), jnp.int32) if rule.selection is Selection.TABLE and not problem.replayed else None
  replayed = None
  if problem.replayed:
    replayed = jnp.asarray(np.where(rng.random(chosen().shape) < unused, -1, chosen()), jnp.int32)
  inputs = RouterInputs(
    # Not negative: scores that are divided by their sum need one that is not near zero.
    bias=jnp.abs(normal(experts, scale=0.1)) if rule.bias else None,
    expert_scale=1 + normal(experts, scale=0.1) if rule.expert_scale else None,
    table_experts=table,
    replayed_experts=replayed,
  )
  gate, up = normal(experts, width, hidden, scale=width**-0.5), normal(experts, width, hidden, scale=width**-0.5)
  kernels = dict(fused=jnp.concatenate([gate, up], -1)) if problem.fused else dict(gate=gate, up=up)
  if problem.biases:
    kernels |= dict(gate_bias=normal(experts, hidden), up_bias=normal(experts, hidden), down_bias=normal(experts, width))
  weights = ExpertWeights(down=normal(experts, hidden, width, scale=hidden**-0.5), **kernels)
  arrays = dict(x=normal(batch, sequence, width), logits=jnp.asarray(logits, jnp.float32), router_inputs=inputs, weights=weights)
  return arrays, normal(batch, sequence, width)


def compare(problem: Problem, arrays, cotangent) -> bool:
  """One case. Returns whether a rank was sent more rows than it holds, after which the result is that of the parts that hold all."""
  expected = oracle.results(problem.spec, arrays, cotangent)
  hypothesis.assume(min(expected["margin"], expected["kink"]) > MARGIN)
  actual = contract.run_block(problem.spec, arrays, cotangent, layout=problem.layout, parts=problem.parts)
  overflowed = actual.pop("overflow") > 0
  if overflowed:
    assert problem.capacity_factor, "nothing exceeds the worst case"
    actual = contract.run_block(problem.spec, arrays, cotangent, layout=problem.layout, parts=problem.holding)
    assert actual.pop("overflow") == 0
  # The router's gradients are differences of such terms and may cancel, all of them if K = 1; then rounding is relative to these.
  terms = np.linalg.norm(expected["y"] * cotangent) / min(expected["divisor"], 1.0) + expected.get("load_balance_loss", 0.0)
  del expected["margin"], expected["kink"], expected["divisor"]
  assert actual.keys() == expected.keys()
  for name, wanted in expected.items():
    bound = tolerances.FLOAT32_FORWARD if name in contract.FORWARD else tolerances.FLOAT32_GRADIENT
    scale = max(np.linalg.norm(wanted), 0.01 * terms if name in ("d_logits", "d_bias", "d_expert_scale") else 0.0)
    error = np.linalg.norm(np.asarray(actual[name], np.float64) - wanted)
    assert helpers.within(name, error, bound * scale), f"{name}: error {error:.1e} of {scale:.1e}"
  return bool(overflowed)


def test_fuzz(request):
  asked, seed = request.config.getoption("--fuzz-cases"), request.config.getoption("--fuzz-seed")
  cases = asked or CASES
  rng = random.Random(seed)
  pool = [draw_problem(rng) for _ in range(max(PROBLEMS, cases // CASES_PER_PROBLEM))]
  compared, overflowed = [], []

  @hypothesis.seed(seed)
  @hypothesis.settings(
    max_examples=cases, deadline=None, database=None, phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
    suppress_health_check=list(hypothesis.HealthCheck),
  )  # fmt: skip
  @hypothesis.given(
    number=st.integers(0, len(pool) - 1),
    seed=st.integers(0, 2**32 - 1),
    load=st.sampled_from(LOADS),
    spread=st.sampled_from([0.5, 1.0, 3.0]),
    unused=st.sampled_from([0.0, 0.3, 1.0]),
  )
  def case(number, seed, load, spread, unused):
    problem = pool[number]
    overflowed.append(compare(problem, *arrays_of(problem, seed, load, spread, unused)))
    compared.append(number)

  failure = None
  try:
    case()
  except Exception as error:
    failure = error
  if asked:
    result = {
      "date": datetime.date.today().isoformat(),
      "seed": seed,
      "cases": len(compared),
      "problems": len(set(compared)),
      "overflowed": sum(overflowed),
      "failures": 0 if failure is None else f"{failure}".splitlines()[0],
      "command": f"pytest tests/numerics/test_fuzz.py --fuzz-cases {asked} --fuzz-seed {seed}",
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
  if failure is not None:
    raise failure
  assert len(compared) >= cases
  assert len(set(compared)) >= 0.9 * len(pool), "hypothesis left much of the pool out"
  assert 0.02 * cases < sum(overflowed) < 0.5 * cases, "finite capacities are exceeded by some and hold most"


def test_a_weight_off_by_a_thousandth_is_seen():
  rng = random.Random(1)
  problem = next(p for p in iter(lambda: draw_problem(rng), None) if not p.replayed and p.spec.router.experts_per_token == 2)
  spec = dataclasses.replace(problem.spec, router=dataclasses.replace(problem.spec.router, scale=1.001))
  arrays, cotangent = arrays_of(problem, 0, "even", 1.0, 0.0)
  compare(problem, arrays, cotangent)
  wrong = dataclasses.replace(problem, spec=spec)
  expected = oracle.results(problem.spec, arrays, cotangent)
  actual = contract.run_block(wrong.spec, arrays, cotangent, layout=wrong.layout, parts=wrong.parts)
  assert np.linalg.norm(actual["y"] - expected["y"]) > tolerances.FLOAT32_FORWARD * np.linalg.norm(expected["y"])


def test_the_long_run_is_on_record():
  result = json.loads(RESULT.read_text())
  assert result["cases"] >= 20_000
  assert result["failures"] == 0
