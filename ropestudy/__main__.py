"""`python -m ropestudy`: the command `jaxref`."""

from ropestudy.cli import main

if __name__ == "__main__":
    main()
