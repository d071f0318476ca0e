"""python -m services.reward: wiring only."""

from services.reward.service import start
from slipstream.service import main

if __name__ == "__main__":
    main("reward", start)
