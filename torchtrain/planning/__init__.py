"""What training will cost, before it is begun: memory, FLOPs, and settings that fit."""
