"""python -m services.trainer --run-file PATH --instance trainer-0 --buffer HOST:PORT"""

if __name__ == "__main__":
    from services.trainer.parallel.launch import divide

    divide()  # with several ranks: before anything heavy is loaded into a process that only starts others

    from services.trainer.service import start
    from slipstream.service import main

    main("trainer", start)
