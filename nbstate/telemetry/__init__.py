"""Floor 0: what a rank tells, without talking to anyone."""
