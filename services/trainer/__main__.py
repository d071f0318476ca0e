"""python -m services.trainer --run-file PATH --instance trainer-0 --buffer HOST:PORT"""

from services.trainer.service import start
from slipstream.service import main

if __name__ == "__main__":
    main("trainer", start)
