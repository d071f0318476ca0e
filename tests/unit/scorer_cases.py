"""Scorers of users, good and bad."""

import os
import time

import numpy as np


def length(prompt, response, answer, info):
    return len(response) / 10


def rich(prompt, response, answer, info):
    return {"scalar": np.float32(0.5), "components": {"prompt": len(prompt), "bonus": info["bonus"]}, "per_turn": [0.25, 0.25]}


async def later(prompt, response, answer, info):
    return response == answer


def raises(prompt, response, answer, info):
    return 1 / 0


def infinite(prompt, response, answer, info):
    return {"scalar": 1.0, "components": {"x": float("inf")}}


def nothing(prompt, response, answer, info):
    return None


def leaves(prompt, response, answer, info):
    os._exit(3)


def prints(prompt, response, answer, info):
    print('{"scalar": 99}')
    return 1


def hangs_on_demand(prompt, response, answer, info):
    if response == "hang":
        time.sleep(60)
    return 1.0
