"""Algorithms as plain functions, each with its equation and source, and `objective.py`, which puts the chosen ones together.

Axes: S samples of an optimizer step, G samples of a group, R rows (segments) of a micro-batch, M trained tokens.

Three policies: mu, the sampler, whose log-probabilities were recorded token by token while it generated; p, the proximal
policy, the anchor of the trust region; pi, the model that is being trained. All log-probabilities are of the plain softmax: a
temperature other than 1 is refused when the run file is read.
"""
