"""Every tolerance of the suite, with its reason. A test takes its bound from here; loosening one means changing its reason."""

# Relative Frobenius error, ours against MaxText's own layer, both in float32. The sums run over the same products in another order:
# a few units in the last place (1.2e-7) times the square root of the number of terms.
FLOAT32_FORWARD = 1e-5
FLOAT32_GRADIENT = 1e-4

# Our bfloat16 error against the float32 oracle, as a multiple of MaxText's own bfloat16 error against it. Both round at the same
# places, but not always in the same order.
BFLOAT16_RATIO = 1.2

# Relative difference of a step's loss, ours against plain MaxText's, in float32 under sgd: as a layer's output, over some ten layers, and
# updates that differ as gradients do. Under Adam no bound would hold: it divides by the root of the second moment, which in the first
# steps turns the rounding of vanishing gradients into whole updates.
TRAINING_LOSS = 1e-5

# Relative Frobenius error of what 30 steps of sgd added to a parameter, in float32, one run's against another's: every update is within
# FLOAT32_GRADIENT of one taken at a state that is off by the rounding of those before.
UPDATES_OF_30_STEPS = 1e-3

# The share of all gradients' norm below which a parameter's own is held to that share, not to itself. The exact gradient of such a
# parameter is zero or nearly so (a scale in front of a norm), and what is left of it is rounding, 1e-8 of all of them at most.
VANISHING_GRADIENT = 1e-3

# Relative Frobenius error of one bfloat16 layer against float64 on the same bfloat16 inputs: weights, first product, activation,
# second product and sum are rounded, 2^-9 at most and 0.0015 on average each, and the activation magnifies what comes before it;
# gradients meet all of it twice.
BFLOAT16_FORWARD = 8e-3
BFLOAT16_GRADIENT = 2e-2
# Where an activation is clamped, its slope is 0 or 1: one value in a few hundred is rounded across the clamp.
BFLOAT16_CLAMPED_GRADIENT = 5e-2

# Relative Frobenius error of one product rounded to bfloat16: half a unit in the last place is 2^-9 of each element, 1.1e-3 in the
# mean over a mantissa; three times that leaves room for rounded inputs of the backward products.
BFLOAT16_ROUNDING = 4e-3

# Relative Frobenius error of the expert-parallel layer in bfloat16 against the float32 oracle from the same bfloat16 inputs: three
# roundings of products and one of the sum over ranks, 2^-9 each, in quadrature with those of activation and weights.
EXPERT_PARALLEL_BFLOAT16 = 6e-3

# Relative difference of the loss over 20 steps of a small model in bfloat16, ours against MaxText's own layer: 2^-9 per rounding,
# a few hundred of which enter a loss, and an optimizer that feeds them back. A test holds MaxText's own distance between bfloat16
# and float32 against it.
BFLOAT16_TRAINING_LOSS = 5e-3
