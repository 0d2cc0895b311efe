"""The studies of folb: the paper reproduced, the arena, the defence. Each adds a command to `folb`."""
