"""Advantages: what is better than expected, per sample or per token. numpy, float64.

Axes: G samples of a group, N trained tokens of an optimizer step, T generated tokens of an episode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

STD_EPS = 1e-6
VARIANCE_EPS = 1e-8


def nothing_to_compare(rewards_G: np.ndarray) -> bool:
    """Whether a group has no signal: fewer than two samples, or equal rewards."""
    return len(rewards_G) < 2 or bool(rewards_G.max() == rewards_G.min())


def grpo(rewards_G: np.ndarray) -> np.ndarray:
    """A_i = (R_i - mean(R)) / (std(R) + 1e-6), std with ddof = 1: [G].

    Group-relative advantages, GRPO (arXiv 2402.03300, section 4.1.2). A group whose rewards are all equal, or that has one
    sample, gets exactly 0: there is nothing to compare.
    """
    centred_G = dr_grpo(rewards_G)
    return centred_G if nothing_to_compare(rewards_G) else centred_G / (rewards_G.std(ddof=1) + STD_EPS)


def dr_grpo(rewards_G: np.ndarray) -> np.ndarray:
    """A_i = R_i - mean(R): [G]. Dr. GRPO (arXiv 2503.20783, section 3.2): no division by the standard deviation."""
    if nothing_to_compare(rewards_G):
        return np.zeros(len(rewards_G))
    return rewards_G - rewards_G.mean()


def rloo(rewards_G: np.ndarray) -> np.ndarray:
    """A_i = R_i - mean of the others' = G / (G - 1) (R_i - mean(R)): [G]. RLOO (arXiv 2402.14740, equation 6)."""
    return dr_grpo(rewards_G) * (len(rewards_G) / max(len(rewards_G) - 1, 1))


def nothing(rewards_G: np.ndarray) -> np.ndarray:
    """A_i = 0: [G]. Rewards play no part; a teacher alone says what is better."""
    return np.zeros(len(rewards_G))


def plain(rewards_G: np.ndarray) -> np.ndarray:
    """A_i = R_i: [G]; whitened over the batch afterwards. REINFORCE++ (arXiv 2501.03262, section 3)."""
    return rewards_G


# Name in the run file -> the function of a group's rewards.
OF_GROUP: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo, "reinforce_pp": plain, "reinforce_pp_baseline": dr_grpo,
    "none": nothing}
# Those that are whitened over all trained tokens of the step.
WHITENED = frozenset({"reinforce_pp", "reinforce_pp_baseline"})


def whitened(values_S: np.ndarray, tokens_S: np.ndarray) -> np.ndarray:
    """(A - mean) / sqrt(var + 1e-8) over the step's trained tokens: [S], where sample i counts tokens_i times; ddof = 1.

    Statistics are global: of the whole optimizer step, never of a micro-batch or a rank. REINFORCE++ (arXiv 2501.03262, 3.2).
    """
    total = int(tokens_S.sum())
    if total < 2:
        return np.zeros(len(values_S))
    mean = float(values_S @ tokens_S) / total
    variance = float((values_S - mean) ** 2 @ tokens_S) / (total - 1)
    return (values_S - mean) / np.sqrt(variance + VARIANCE_EPS)


def gae(rewards_T: np.ndarray, values_T: np.ndarray, gamma: float = 1.0, lam: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """delta_t = r_t + gamma V_(t+1) - V_t; A_t = delta_t + gamma lam A_(t+1); returns A + V: two [T], A not whitened.

    GAE (arXiv 1506.02438, equation 16). T runs over *generated* tokens only: what an environment or a tool wrote in between is
    not there, so nothing decays across it.
    """
    values, deltas = values_T.tolist(), rewards_T.tolist()
    running = following = 0.0
    for t in range(len(deltas) - 1, -1, -1):
        running = deltas[t] + gamma * following - values[t] + gamma * lam * running
        deltas[t], following = running, values[t]
    advantages_T = np.array(deltas, np.float64)
    return advantages_T, advantages_T + values_T


def to_go(rewards_T: np.ndarray, gamma: float = 1.0) -> np.ndarray:
    """G_t = r_t + gamma G_(t+1): [T], what an episode brings from each token on."""
    if gamma == 1.0:
        return np.cumsum(rewards_T[::-1])[::-1]
    return gae(rewards_T, np.zeros(len(rewards_T)), gamma)[0]


def turn_by_turn(
    rewards: Sequence[np.ndarray], turns: Sequence[np.ndarray], compare: Callable[[np.ndarray], np.ndarray],
) -> tuple[list[np.ndarray], bool]:
    """Advantages of the samples of one group, each [T_i], and whether any turn had something to compare.

    The return-to-go of turn k, G_(i,k) = sum of r_i from its first token on, is compared with that of turn k of the samples
    that came so far: A of all tokens of turn k = compare(G_k)_i. With all reward at the end and turns in equal number that is
    the comparison of whole samples. Credit per turn as in arXiv 2505.11821, section 3, on returns instead of rewards, so that a
    turn also answers for what it led to. `turns` numbers the turn of each token, ascending.
    """
    returns = [to_go(rewards_T) for rewards_T in rewards]
    advantages, compared = [np.zeros(len(rewards_T)) for rewards_T in rewards], False
    for turn in sorted({int(k) for turns_T in turns for k in np.unique(turns_T)}):
        there = [i for i, turns_T in enumerate(turns) if turn in turns_T]
        returns_G = np.array([returns[i][np.argmax(turns[i] == turn)] for i in there])
        if nothing_to_compare(returns_G):
            continue
        compared = True
        for i, advantage in zip(there, compare(returns_G).tolist(), strict=True):
            advantages[i][turns[i] == turn] = advantage
    return advantages, compared


def overlong_penalty(tokens: int, longest: int, margin: int) -> float:
    """min(0, (L_max - margin - |o|) / margin), at least -1: added to the reward. DAPO (arXiv 2503.14476, equation 13)."""
    return float(np.clip((longest - margin - tokens) / margin, -1.0, 0.0))
