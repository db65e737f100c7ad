"""The gate: which cases a configuration asks for, both sides of a case, the verdict, the run."""
