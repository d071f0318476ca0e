"""The reward, diverted: see benchmarks/faults/divert.py."""

from benchmarks.faults.divert import main

if __name__ == "__main__":
    main("reward")
