"""What the commands do: a run from its config to its report, with folder, lock, checkpoints and exports."""
