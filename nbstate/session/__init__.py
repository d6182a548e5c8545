"""Floor 4: cells that run on ranks. In this version a cell's ranks end with it; ranks that stay will stand here too."""
