"""Floor 3: from one cell to N ranks and back."""
