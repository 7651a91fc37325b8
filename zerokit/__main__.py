"""`python -m zerokit`: the program `zerokit` if it is not installed."""

from zerokit.cli import main

if __name__ == "__main__":
    main()
