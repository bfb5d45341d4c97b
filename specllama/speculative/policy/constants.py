"""The numbers that the policy rests on, each with what it is derived from.

What follows from another one is said by its formula.
"""

from __future__ import annotations

# -- the contract: what README promises

BEHIND = 8.0  # plain steps that all drafting of a pair may be behind plain decoding, ever
EPSILON = 0.01  # and this share of the time

# -- balances, in plain steps

OWN = 0.5  # a source's first one: a doubtful row or two; as much is kept back for unknown passes
SAVED = 4.0 * OWN  # the most that a source saves up to explore with
LEAD = 4.0 * BEHIND  # the most that is kept of what was gained beyond full balances

# -- what a measurement is believed

OUTLIER = 1.35  # times what is expected: passes of an idle machine scatter less (measured)
SETTLE = 4  # first samples of a width, of which the median counts: one disturbed one is passed over
SINGLES = 3 * SETTLE  # and of a plain step: everything is compared with it
GAIN = 0.08  # of the level, per plain step: it follows drift within a dozen steps
SLOPE = 0.15  # single passes that a further row costs, before one was timed: between CPU and GPU
SHARE = 0.1  # of a plain step that a draft step costs, before sizes or times are known

# -- memories

MEMORY = 64  # values of a running mean: some replies, so that one text does not decide
RECENT = 24  # guesses that say what the next one will be like: a passage
FORGET = 0.998  # of what was learnt, by guess: half of it is of the last 350
STRETCH_S = 1.0  # plain steps so close together are one measurement
MEMORY_S = 5.0 * STRETCH_S  # after which one counts a third of a newer one: a busy moment passes
FRESH_S = 120.0  # so old they are of these minutes: machines warm up and slow down in them

# -- decisions

AHEAD = 8  # guesses looked ahead: as many as ``BEHIND`` can pay for where a row costs a step
READ = 32  # tokens of a text that a draft model needs to guess well (measured)
LEAST = 10.0 * EPSILON  # tokens; a smaller balance is weighed as this one
