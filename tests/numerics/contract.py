"""What every pair of transport and experts must do, against an oracle: subclass `Contract`, say the mesh, the dtype and the parts.

Needs no MaxText. The cases are those that break such layers: loads that are empty, full or uneven, ties, odd shapes, garbage in
unused rows, several layers at once.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_moe_te.moe import block
from maxtext_moe_te.moe.experts.base import ExpertWeights, expert_of_rows
from maxtext_moe_te.moe.routing import BalanceLoss, RouterInputs
from maxtext_moe_te.moe.rules import ExpertRule, RouterRule, Weighting
from maxtext_moe_te.moe.transport.local import LocalTransport
from maxtext_moe_te.moe.transport.xla import XlaTransport
from tests import helpers, tolerances
from tests.numerics import oracle

FORWARD = ("y", "load_balance_loss", "rows_per_expert")
SOFTMAX = RouterRule(experts_per_token=2, renormalize=True)
DEEPSEEK3 = RouterRule(
  experts_per_token=2, score_function="sigmoid", bias=True, weights_ignore_bias=True, groups=4, groups_kept=2,
  weighting=Weighting.SCORES, renormalize=True, renormalize_epsilon=1e-20, scale=2.5,
)  # fmt: skip
LLAMA4 = RouterRule(experts_per_token=1, weighting=Weighting.SIGMOID, weight_on_input=True)
GEMMA4 = RouterRule(experts_per_token=3, weighting=Weighting.SOFTMAX_OF_ALL, renormalize=True, expert_scale=True)
GPT_OSS = ExpertRule(activation="sigmoid", clamp=0.5, gate_scale=1.702, self_gated=True, up_offset=1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """One problem.

  Attributes:
    experts: E; 0 for one per rank.
    batch, sequence: B and S.
    router, expert: the rules.
    load: how tokens choose, see `make_arrays`.
    biases: whether the experts have biases.
    fused: whether the gate and up kernels come as one.
    balance_loss: its definition; its coefficient is 0.01.
  """

  experts: int = 8
  batch: int = 8
  sequence: int = 8
  router: RouterRule = SOFTMAX
  expert: ExpertRule = ExpertRule()  # noqa: RUF009 (frozen)
  load: str = "random"
  biases: bool = False
  fused: bool = True
  balance_loss: BalanceLoss = BalanceLoss.SWITCH_SEQUENCE


ONE = RouterRule(experts_per_token=1, weighting=Weighting.SIGMOID)
# Cases that differ only in their load share one compilation.
CASES = {
  "softmax": Case(fused=False),
  "deepseek3": Case(router=DEEPSEEK3, balance_loss=BalanceLoss.MEGATRON_SEQUENCE),
  "gpt_oss": Case(router=RouterRule(experts_per_token=2), expert=GPT_OSS, biases=True),
  "llama4": Case(router=LLAMA4),
  "gemma4": Case(router=GEMMA4, expert=ExpertRule(activation="gelu")),
  "empty_experts": Case(load="few", biases=True),
  "all_rows_to_one_rank": Case(load="first_two", biases=True),
  "ties": Case(load="equal", biases=True),
  "ties_of_pairs": Case(load="pairs", biases=True),
  "k_is_1": Case(router=ONE, biases=True),
  "all_rows_to_one_expert": Case(load="one", router=ONE, biases=True),
  "one_expert_per_rank": Case(experts=0, router=ONE, biases=True),
  "k_is_all": Case(router=RouterRule(experts_per_token=8)),
  "one_sequence": Case(batch=1, sequence=32),
  "one_token_per_sequence": Case(sequence=1),
  "sequence_33": Case(sequence=33),
  "replayed": Case(load="replayed", router=DEEPSEEK3, biases=True),
  "replayed_unused": Case(load="replayed_unused", router=DEEPSEEK3, biases=True),
  "nothing_to_do": Case(load="all_unused", router=DEEPSEEK3, biases=True),
}
GARBAGE = ("deepseek3", "gpt_oss", "replayed_unused")
MODEL_WIDTH, EXPERT_WIDTH = 32, 16  # D and F


class Contract:
  """The tests. A subclass sets the attributes or overrides the methods."""

  axes: dict[str, int]  # mesh axes and their sizes; one called "expert" splits the experts
  experts: str = "reference"
  dtype = jnp.float32
  alignment = 1

  def parts(self, layout: block.Layout, num_experts: int) -> block.Parts:
    """What is tested: here, rows sorted on one rank, or collectives over several."""
    ranks = layout.size(layout.expert)
    split = set(layout.expert) <= set(layout.tokens)
    transport = (
      LocalTransport(num_experts, self.alignment) if ranks == 1 else XlaTransport(num_experts, layout.expert, ranks, split, self.alignment)
    )
    return block.Parts(transport=transport, grouped_matmul=block.GROUPED_MATMULS[self.experts])

  @property
  def tolerances(self) -> dict[str, float]:
    if self.dtype == jnp.float32:
      return dict(forward=tolerances.FLOAT32_FORWARD, gradient=tolerances.FLOAT32_GRADIENT)
    return dict(forward=tolerances.BFLOAT16_FORWARD, gradient=tolerances.BFLOAT16_GRADIENT)

  def tolerances_of(self, case: Case) -> dict[str, float]:
    clamped = self.dtype != jnp.float32 and case.expert.clamp is not None
    return self.tolerances | (dict(gradient=tolerances.BFLOAT16_CLAMPED_GRADIENT) if clamped else {})

  @pytest.mark.parametrize("name", CASES)
  def test_equals_oracle(self, name):
    self.compare(CASES[name])

  @pytest.mark.parametrize("name", GARBAGE)
  def test_garbage_in_unused_rows_reaches_nothing(self, name):
    self.compare(CASES[name], around=with_garbage)

  def test_three_runs_give_the_same_bits(self):
    case, layout = CASES["deepseek3"], self.layout(8, 8)
    first, *others = [run_block(*self.problem(case), layout=layout, parts=self.parts(layout, 8)) for _ in range(3)]
    for other in others:
      for name in first:
        assert first[name].tobytes() == other[name].tobytes(), name

  def test_two_layers_in_one_program(self):
    layout = self.layout(8, 8)
    parts = self.parts(layout, 8)
    (spec_a, a, cotangent), (spec_b, b, _) = self.problem(CASES["softmax"]), self.problem(CASES["gpt_oss"], seed=1)

    def layer(spec, arrays, x):
      return block.moe_block(**{**arrays, "x": x}, spec=spec, layout=layout, parts=parts).y

    def both(weights_a, weights_b, x):
      """a(x) and b(x) side by side: their dispatches and combines may lie between each other's."""
      one, two = layer(spec_a, {**a, "weights": weights_a}, x), layer(spec_b, {**b, "weights": weights_b}, 2 * x)
      return ((one + two) * cotangent).sum(), (one, two)

    differentiated = a["weights"], b["weights"], a["x"]
    (_, (one, two)), (d_a, d_b, d_x) = jax.jit(jax.value_and_grad(both, argnums=(0, 1, 2), has_aux=True))(*differentiated)
    # The load-balance loss, which is only in these, reaches the logits alone.
    alone_a = run_block(spec_a, a, cotangent, layout=layout, parts=parts)
    alone_b = run_block(spec_b, {**b, "x": 2 * a["x"]}, cotangent, layout=layout, parts=parts)
    assert_close({"y": one}, {"y": alone_a["y"]}, **self.tolerances)
    assert_close({"y": two}, {"y": alone_b["y"]}, **self.tolerances)
    assert_close({"d_x": d_x}, {"d_x": alone_a["d_x"] + 2 * alone_b["d_x"]}, **self.tolerances_of(CASES["gpt_oss"]))
    for d_weights, alone in ((d_a, alone_a), (d_b, alone_b)):
      actual = oracle.name_gradients(None, None, None, None, d_weights)
      assert_close(actual, {name: alone[name] for name in actual}, **self.tolerances_of(CASES["gpt_oss"]))

  def layout(self, batch: int, sequence: int) -> block.Layout:
    """Tokens split over every axis: over the batch if it divides, else over the sequence, else over none."""
    sizes = tuple(self.axes.values())
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    mesh = jax.sharding.Mesh(devices, tuple(self.axes))
    everything = tuple(self.axes)
    expert = ("expert",) if self.axes.get("expert", 1) > 1 else ()
    for dim, size in (("batch", batch), ("sequence", sequence)):
      if size % devices.size == 0:
        return block.Layout(mesh=mesh, expert=expert, **{dim: everything})
    return block.Layout(mesh=mesh, expert=expert)

  def problem(self, case: Case, seed: int = 0):
    """(spec, arrays, cotangent); see `make_arrays`."""
    experts = case.experts or self.axes.get("expert", 1)
    spec = block.LayerSpec(
      num_experts=experts, router=case.router, expert=case.expert, dtype=jnp.dtype(self.dtype), sum_dtype=jnp.dtype(jnp.float32),
      load_balance_coefficient=0.01, balance_loss=case.balance_loss,
    )  # fmt: skip
    return spec, *make_arrays(spec, case, seed)

  def compare(self, case: Case, around=lambda grouped_matmul: grouped_matmul):
    spec, arrays, cotangent = self.problem(case)
    layout = self.layout(case.batch, case.sequence)
    parts = self.parts(layout, spec.num_experts)
    parts = dataclasses.replace(parts, grouped_matmul=around(parts.grouped_matmul))
    actual = run_block(spec, arrays, cotangent, layout=layout, parts=parts)
    assert actual.pop("overflow") == 0
    expected = expected_of(spec, case)
    assert not [name for name, value in actual.items() if not np.isfinite(np.asarray(value, np.float64)).all()]
    assert_close(actual, expected, **self.tolerances_of(case))


@functools.cache
def expected_of(spec, case):
  """The oracle's results, which depend on neither parts nor mesh."""
  results = oracle.results(spec, *make_arrays(spec, case))
  del results["margin"], results["kink"], results["divisor"]
  return results


def assert_close(actual, expected, *, forward, gradient):
  """Like helpers.assert_close, where what should be exactly zero has no relative error: it must be zero."""
  for name in list(expected):
    if not np.any(expected[name]):
      assert not np.any(actual[name]), f"{name} should be zero"
      expected = {k: v for k, v in expected.items() if k != name}
      actual = {k: v for k, v in actual.items() if k != name}
  helpers.assert_close(actual, expected, forward=forward, gradient=gradient, forward_names=FORWARD)


def run_block(spec, arrays: dict, cotangent, *, layout, parts) -> dict:
  """Output, loss, load and every gradient of `moe_block`, as numpy arrays.

  Args:
    spec: what to compute.
    arrays: x [B,S,D], logits [B,S,E], router_inputs, weights; real bool [B,S] where there is padding.
    cotangent: [B,S,D], weights of the scalar that is differentiated; the load-balance loss enters it with factor 3.
    layout: how.
    parts: with what.
  """
  differentiated = (
    arrays["x"], arrays["logits"], arrays["router_inputs"].bias, arrays["router_inputs"].expert_scale, arrays["weights"]
  )  # fmt: skip
  (_, out), gradients = _value_and_gradients(spec, layout, parts, differentiated, arrays["router_inputs"], cotangent, arrays.get("real"))
  out = {"y": out.y, "load_balance_loss": out.load_balance_loss, "rows_per_expert": out.rows_per_expert, "overflow": out.overflowed.sum()}
  out = {name: value for name, value in out.items() if value is not None}
  return jax.device_get(out | oracle.name_gradients(*gradients))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _value_and_gradients(spec, layout, parts, differentiated, router_inputs, cotangent, real):
  def scalar(x, logits, bias, expert_scale, weights):
    inputs = router_inputs._replace(bias=bias, expert_scale=expert_scale)
    out = block.moe_block(x, logits, inputs, weights, spec=spec, layout=layout, parts=parts, real=real)
    loss = 0.0 if out.load_balance_loss is None else out.load_balance_loss
    return (out.y.astype(jnp.float32) * cotangent).sum() + 3.0 * loss, out

  return jax.value_and_grad(scalar, argnums=(0, 1, 2, 3, 4), has_aux=True)(*differentiated)


def make_arrays(spec, case: Case, seed: int = 0) -> tuple[dict, jax.Array]:
  """(arrays, cotangent) for `run_block`, random but for the loads that a case names.

  x and the weights are rounded to bfloat16 where the layer's dtype is, so that the oracle gets the same numbers.
  """
  rng = np.random.default_rng(seed)
  experts, k = spec.num_experts, spec.router.experts_per_token
  tokens = (case.batch, case.sequence)
  normal = lambda *shape, scale=1.0: jnp.asarray(rng.normal(0, scale, shape), jnp.float32).astype(spec.dtype).astype(jnp.float32)
  logits = rng.normal(0, 1, (*tokens, experts))
  replayed = None
  match case.load:
    case "random":
      pass
    case "few":  # experts 1, 4 and the last get everything
      logits[..., [e for e in range(experts) if e not in (1, 4, experts - 1)]] -= 30
    case "one":
      logits[..., : experts - 1] -= 30
    case "first_two":
      logits[..., 2:] -= 30
    case "equal":
      logits = np.zeros_like(logits)
    case "pairs":  # expert 0 high, the others' values twice: the second best is one of two equals
      logits[..., 0] += 3
      logits[..., 2::2] = logits[..., 1:-1:2]
    case "replayed" | "replayed_unused" | "all_unused":
      replayed = np.argsort(rng.normal(size=logits.shape), -1)[..., :k]
      if case.load == "replayed_unused":
        replayed = np.where(rng.random(replayed.shape) < 0.4, -1, replayed)
      if case.load == "all_unused":
        replayed = np.full_like(replayed, -1)
    case _:
      raise ValueError(case.load)
  width, hidden = MODEL_WIDTH, EXPERT_WIDTH
  gate, up = normal(experts, width, hidden, scale=width**-0.5), normal(experts, width, hidden, scale=width**-0.5)
  biases = {}
  if case.biases:
    biases = dict(gate_bias=normal(experts, hidden), up_bias=normal(experts, hidden), down_bias=normal(experts, width))
  kernels = dict(fused=jnp.concatenate([gate, up], -1)) if case.fused else dict(gate=gate, up=up)
  arrays = dict(
    x=normal(*tokens, width),
    logits=jnp.asarray(logits, jnp.float32),
    router_inputs=RouterInputs(
      bias=jnp.asarray(rng.normal(0, 0.1, experts), jnp.float32) if spec.router.bias else None,
      expert_scale=jnp.asarray(rng.normal(1, 0.1, experts), jnp.float32) if spec.router.expert_scale else None,
      replayed_experts=None if replayed is None else jnp.asarray(replayed, jnp.int32),
    ),
    weights=ExpertWeights(down=normal(experts, hidden, width, scale=hidden**-0.5), **kernels, **biases),
  )
  return arrays, normal(*tokens, width)


@functools.cache
def with_garbage(grouped_matmul):
  """The same product, reading nothing from unused rows and leaving NaN in them, forward and backward: what a kernel may do."""

  def only_used(rows, group_sizes, otherwise):
    used = expert_of_rows(group_sizes, rows.shape[0]) < group_sizes.shape[0]
    return jnp.where(used[:, None], rows, otherwise)

  @jax.custom_vjp
  def product(rows, kernels, group_sizes):
    return only_used(grouped_matmul(only_used(rows, group_sizes, 0), kernels, group_sizes), group_sizes, jnp.nan)

  def forward(rows, kernels, group_sizes):
    return product(rows, kernels, group_sizes), (rows, kernels, group_sizes)

  def backward(residuals, d_out):
    rows, kernels, group_sizes = residuals
    _, pull = jax.vjp(lambda r, w: grouped_matmul(r, w, group_sizes), only_used(rows, group_sizes, 0), kernels)
    d_rows, d_kernels = pull(only_used(d_out, group_sizes, 0))
    return only_used(d_rows, group_sizes, jnp.nan), d_kernels, None

  product.defvjp(forward, backward)
  return product
