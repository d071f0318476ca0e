"""python -m services.rollout: wiring only."""

from services.rollout.service import start
from slipstream.service import main

if __name__ == "__main__":
    main("rollout", start)
