"""The tests of the judge, and of what it says of the trainer against the oracle."""
