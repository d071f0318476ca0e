def sorted_part(prompt: str, response: str, answer: str, info: dict) -> dict:
    """The share of positions that are right, and half a point less for an answer of the wrong length."""
    right = sum(a == b for a, b in zip(response, answer, strict=False)) / len(answer)
    length = float(len(response) == len(answer))
    scalar = right if length else max(0.0, right - 0.5)
    return {"scalar": scalar, "components": {"exact": float(response == answer), "length": length}}
