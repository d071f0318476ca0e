"""python -m services.weights --run-file PATH [--port N] [--metrics-port N]"""

from services.weights.service import start
from slipstream.service import main

if __name__ == "__main__":
    main("weights", start)
