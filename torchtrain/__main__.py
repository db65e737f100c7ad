"""`python -m torchtrain`, which is also how torchrun starts it."""

from torchtrain.cli import main

if __name__ == "__main__":
    main()
