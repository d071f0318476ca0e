from slipstream.environment import Environment, Reset, Task


class Reverse(Environment):
    scorer = "exact"
    truncated_is_wrong = True

    def reset(self, task: Task) -> Reset:
        digits = "".join(task.random.choices("0123456789", k=task.random.randint(3, 5)))
        return Reset(digits + "=", answer=digits[::-1])
