"""MaxText's entry points, by name."""

TRAIN = "maxtext.trainers.pre_train.train"
# Entries of MaxText 0.2.5 whose configuration goes through `pyconfig`, for close matches.
KNOWN_MODULES = (
  TRAIN,
  "maxtext.trainers.pre_train.train_compile",
  "maxtext.trainers.post_train.sft.train_sft",
  "maxtext.trainers.post_train.sft.train_sft_native",
  "maxtext.trainers.post_train.dpo.train_dpo",
  "maxtext.trainers.post_train.rl.train_rl",
  "maxtext.trainers.post_train.distillation.train_distill",
  "maxtext.inference.decode",
)
