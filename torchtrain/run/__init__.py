"""What the commands do: a run from its config to its report, with its folder, its lock, its checkpoints and its
exports.
"""
