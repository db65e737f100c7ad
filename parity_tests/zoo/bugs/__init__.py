"""One file a bug; see `parity_tests.zoo`."""
