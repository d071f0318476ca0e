"""python -m slipstream.cli: the same as the console script."""

from slipstream.cli import main

if __name__ == "__main__":
    main()
