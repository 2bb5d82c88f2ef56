"""Every knob of the embedded model's training, with its unit. Read by train.py and told by its model card."""

from __future__ import annotations

SEED = 15
STEPS = 1700
TOKENS_PER_STEP = 4096
PER_SHAPE = 25
BUCKETS = (6, 12, 24, 48, 80)  # entries + keys asked, at most
TOP_SHARE = 0.45  # of steps, from the largest bucket reached; the rest from smaller ones
NEXT_BUCKET_AT = 0.97  # share of answer digits right, smoothed over the largest bucket's steps
LEARNING_RATE = 3e-3
WARM_UP_STEPS = 100
DECAY_SHARE = 0.4  # of the steps, the last ones
EXPECTED, UNIFORM, ENTROPY = 0.8, 0.2, 0.1  # weights of the loss's parts

GATE_STEPS = 150
GATE_TOKENS_PER_STEP = 2048
GATE_LEARNING_RATE = 0.1  # Adam's, falling to 0
GATE_BUCKETS = BUCKETS[-3:]  # in turn
LOOP_PRICE = 0.03  # nats per loop; at 0.1 tokens leave at loop 1 whose K and V a later token needs

EXACT_MIN = 0.99  # to ship
MEAN_DEPTH_MAX = 3.5
