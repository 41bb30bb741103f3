"""`python -m mcore_rl ...` is the command `mcore-rl ...`."""

from mcore_rl.cli import main

if __name__ == "__main__":
    main()
