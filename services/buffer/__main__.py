"""python -m services.buffer --run-file PATH --redis URL [--port N] [--metrics-port N]"""

from services.buffer.service import start
from slipstream.service import main

if __name__ == "__main__":
    main("buffer", start)
