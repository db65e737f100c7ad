"""An experiment: train many small runs that differ only in arithmetic, mask and seed, and compare what they recall."""
