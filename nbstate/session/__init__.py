"""Floor 4: ranks that stay, so that cells can run on them. Empty in this version; the floor keeps its place."""
