"""The numbers of the policy, all of them, each with its derivation."""

from __future__ import annotations

# -- the contract: what README promises

BEHIND = 8.0  # plain steps that all drafting of a pair may be behind plain decoding, ever
EPSILON = 0.01  # and this share of the time; nothing smaller is told from nothing

# -- balances, in plain steps

OWN = 0.5  # a source's first one: a doubtful row or two; as much is kept back for unknown passes

# -- what a measurement is believed

OUTLIER = 1.35  # times what is expected: passes of an idle machine scatter less (measured)
SETTLE = 4  # first samples, of which the median counts: one disturbed one is passed over
SINGLES = 12  # and of a plain step: everything is compared with it
GAIN = 0.08  # of the level, per plain step: it follows drift in a dozen; more is no noise
SLOPE = 0.15  # plain steps of a further row or a draft step, before one was timed: CPU to GPU
# wide passes share a cell per step of about a third: few drafts go that far, prompts are that long
CELLS: tuple[int, ...] = (*range(1, 18), 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)

# -- memories

MEMORY = 64  # values of a running mean: some replies, so that one text does not decide
RECENT = 24  # tokens that say what the next guess will be like: a passage
FORGET = 0.998  # of what was learnt, by guess: half of it is of the last 350
STRETCH_S = 1.0  # plain steps so close together are one measurement
FRESH_S = 120.0  # so old they are of these minutes: machines warm up and slow down in them

# -- guesses

# Weights, see ``Acceptance``: bias and two features. A draft model's confidence means roughly what
# it says; long matches copy well; of what a caller expects its match says more, and how much of it
# came so far.
PRIOR = {"draft": (-0.3, 0.5, 0.5), "copy": (-1.0, 1.4, 0.8), "prediction": (-1.5, 2.0, 0.8)}
VARIANCES = (1.0, 0.25, 0.25)
MEAN = 0.75  # acceptance of a guess behind an accepted one, before any was seen
CERTAIN = 6.0  # log odds: what is surer is not told apart
# Looks before the first one, by acceptance in tenths: many of a good draft model's guesses are all
# but certain, the others are anything.
FIRST_LOOKS = (*(0.4,) * 9, 1.6)

# -- decisions

AHEAD = 8  # guesses looked ahead: as many as ``BEHIND`` can pay for where a row costs a step
