"""`python -m parity_tests`: the command `parity`."""

from parity_tests.cli import main

if __name__ == "__main__":
    main()
